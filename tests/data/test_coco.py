"""COCO files as users have them: cases D01, D02, D04, D05, D06, D07, D09, D10, E05 of the shared list, and their relatives."""

import json
import pickle

import cv2
import numpy as np
import pytest
from toy import make_toy, toy_box, toy_coco, toy_image, write_coco, write_image

from mmdet.data.categories import Categories
from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.errors import DataError
from mmdet.data.image_io import image_fault, load_image


def dataset(root, split="train", categories=None):
    return CocoDataset(*find_coco(root, split), categories)


def one_image(root, boxes, width=200, height=100, image=None, name="a.png", **extra):
    """A data set of one image with boxes (x, y, w, h) of one class; ``extra`` are further keys of each annotation."""
    (root / "images").mkdir(parents=True)
    write_image(root / "images" / name, np.zeros((height, width, 3), np.uint8) if image is None else image)
    coco = toy_coco(0, 1)
    coco["images"] = [{"id": 5, "file_name": name, "width": width, "height": height}]
    coco["annotations"] = [{"id": i, "image_id": 5, "category_id": 1, "bbox": b, **extra} for i, b in enumerate(boxes, 1)]
    write_coco(root, coco, "train")
    return dataset(root)


# Categories


def test_d01_order_of_the_categories_in_the_file_is_irrelevant(tmp_path):
    def shuffle(coco, split):
        if split == "val":
            coco["categories"] = [coco["categories"][i] for i in (2, 0, 1)]

    root = make_toy(tmp_path, 6, 3, category_ids=(7, 13, 42), edit=shuffle)
    train = dataset(root)
    val = dataset(root, "val", train.categories)
    assert [train.categories.index_of(i) for i in (7, 13, 42)] == [0, 1, 2] == [val.categories.index_of(i) for i in (7, 13, 42)]
    assert [train.annotation(i).labels.item() for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [val.annotation(i).labels.item() for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert {a["category_id"] for a in val.ground_truth()["annotations"]} == {7, 13, 42}
    assert train.categories.id_of(2) == 42 and len(train.categories) == 3
    assert "42" in train.categories.table() and "c3" in train.categories.table()


def test_d01_swapped_names_stop_with_both_ids_and_names(tmp_path):
    root = make_toy(tmp_path, 6, 3, category_ids=(7, 13, 42))
    write_coco(root, toy_coco(6, 3, (7, 13, 42), ("c2", "c1", "c3")), "val")
    with pytest.raises(DataError) as caught:
        dataset(root, "val", dataset(root).categories)
    message = str(caught.value)
    assert "id 7 is 'c1' in the training annotations but 'c2'" in message and "id 13 is 'c2'" in message
    assert "42" not in message and "instances_val.json" in message


def test_a_category_that_training_does_not_know_is_named(tmp_path):
    root = make_toy(tmp_path, 2, 2)
    write_coco(root, toy_coco(2, 2, (1, 9), ("c1", "dog")), "val")
    with pytest.raises(DataError, match=r"id 9 \('dog'\) is not in the training annotations"):
        dataset(root, "val", dataset(root).categories)


def test_val_may_lack_categories_and_keeps_the_training_labels(tmp_path):
    root = make_toy(tmp_path, 2, 3)
    write_coco(root, toy_coco(2, 1, (3,), ("c3",)), "val")
    val = dataset(root, "val", dataset(root).categories)
    assert val.annotation(0).labels.tolist() == [2]
    assert [c["id"] for c in val.ground_truth()["categories"]] == [3]
    assert val.class_names == ("c1", "c2", "c3")


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        ([], "empty"),
        ([{"id": 1, "name": "a"}, {"id": 1, "name": "b"}], "id 1 is given twice"),
        ([{"id": 1, "name": "a"}, {"id": 2, "name": "a"}], "name 'a' is given twice"),
        ([{"id": "1", "name": "a"}], "integer 'id'"),
        ([{"id": 1}], "'name'"),
    ],
)
def test_broken_categories_are_named(categories, message):
    with pytest.raises(DataError, match=message):
        Categories.from_coco(categories)


# Annotations


def test_d04_images_without_boxes_stay(tmp_path):
    def thin(coco, split):
        coco["annotations"] = [a for a in coco["annotations"] if a["image_id"] % 2]

    ds = dataset(make_toy(tmp_path, 6, 1, edit=thin))
    assert len(ds) == 6
    assert [len(ds.annotation(i).boxes) for i in range(6)] == [1, 0, 1, 0, 1, 0]
    assert ds.load(1).boxes.shape == (0, 4) and len(ds.ground_truth()["images"]) == 6
    assert "6 images, 3 boxes of 1 classes, 3 images without boxes" in ds.report()


def test_d05_degenerate_boxes_are_dropped_or_clipped_and_listed(tmp_path):
    boxes = [[10, 10, 20, 20], [50, 20, 0, 30], [60, 60, -10, 20], [190, 90, 30, 30], [300, 10, 20, 20]]
    ds = one_image(tmp_path, boxes)
    assert ds.annotation(0).boxes.tolist() == [[10, 10, 30, 30], [190, 90, 200, 100]]
    assert "3 dropped, 1 clipped" in ds.report()
    assert "dropped: 2, 3, 5; clipped: 4" in ds.report()
    truth = ds.ground_truth()["annotations"]
    assert [a["bbox"] for a in truth] == [[10, 10, 20, 20], [190, 90, 10, 10]] and [a["id"] for a in truth] == [1, 2]


def test_d05_relatives(tmp_path):
    ds = one_image(tmp_path, [[float("nan"), 1, 2, 3], [], None, [0, 0, 200.01, 50], [1e-9, 2, 1e-7, 4]])
    assert ds.annotation(0).boxes.tolist() == [[0, 0, 200, 50]]
    assert "4 dropped, 0 clipped" in ds.report()  # a hundredth of a pixel is rounding, not reaching out
    ds = one_image(tmp_path / "many", [[0, 0, 0, 0]] * 25)
    assert "18, 19, 20 and 5 more" in ds.report()
    with pytest.raises(DataError, match=r"annotation 1 has bbox \[1, 2, 3\].*x, y, width, height"):
        one_image(tmp_path / "three", [[1, 2, 3]])


def test_clean_file_reports_no_mending(tmp_path):
    assert "dropped" not in dataset(make_toy(tmp_path, 2, 1)).report()


@pytest.mark.parametrize("ids", [(1, 2, 3), ("a", "b", "c")])
def test_d10_missing_keys_are_filled_in_and_string_ids_work(tmp_path, ids):
    def reduce(coco, split):
        del coco["info"], coco["licenses"]
        for image, new in zip(coco["images"], ids):
            image["id"] = new
        keep = ("id", "image_id", "category_id", "bbox")
        coco["annotations"] = [{k: a[k] for k in keep} | {"image_id": ids[a["image_id"] - 1]} for a in coco["annotations"]]

    ds = dataset(make_toy(tmp_path, 3, 1, edit=reduce))
    assert ds.image_ids == list(ids) and ds.load(2).image_id == ids[2] and type(ds.load(2).image_id) is type(ids[2])
    truth = ds.ground_truth()
    assert [a["image_id"] for a in truth["annotations"]] == [ds.judge_image_id(i) for i in ids] == [1, 2, 3]
    assert [a["bbox"] for a in truth["annotations"]] == [toy_box(k) for k in (1, 2, 3)]
    assert {(a["area"], a["iscrowd"]) for a in truth["annotations"]} == {(1200, 0)}
    assert {i["id"] for i in truth["images"]} == {1, 2, 3} and "info" in truth
    json.dumps(truth)  # plain values only


def test_e02_annotation_ids_are_renumbered_from_one(tmp_path):
    def zero(coco, split):
        for a in coco["annotations"]:
            a["id"] = 0

    ds = dataset(make_toy(tmp_path, 3, 1, edit=zero))
    assert [a["id"] for a in ds.ground_truth()["annotations"]] == [1, 2, 3]


def test_e05_crowd_is_ignored_in_training_and_kept_for_the_judge(tmp_path):
    def crowd(coco, split):
        coco["annotations"].append(
            {"id": 9, "image_id": 1, "category_id": 1, "bbox": [80, 60, 60, 100], "iscrowd": 1, "area": 99}
        )

    ds = dataset(make_toy(tmp_path, 1, 1, edit=crowd))
    boxes, labels, ignore = ds.annotation(0)
    assert len(boxes) == len(labels) == 1 and ignore.tolist() == [[80, 60, 140, 120]]
    assert ds.load(0).ignore.tolist() == ignore.tolist()
    assert [(a["iscrowd"], a["area"]) for a in ds.ground_truth()["annotations"]] == [(0, 1200), (1, 99)]
    assert "1 crowd regions" in ds.report()


def test_contradictions_are_named(tmp_path):
    def edited(change, name):
        return make_toy(tmp_path / name, 2, 1, edit=lambda coco, split: change(coco))

    def expect(name, change, message):
        with pytest.raises(DataError, match=message):
            dataset(edited(change, name))

    expect("category", lambda c: c["annotations"][1].update(category_id=4), "annotation 2 has category_id 4")
    expect("twice", lambda c: c["images"][1].update(id=1), "image ids given twice: 1")
    expect("width", lambda c: c["images"][1].pop("width"), "image 2 lacks 'width'")
    expect("zero", lambda c: c["images"][1].update(height=0), "image 2 has width 160 and height 0")
    expect("list", lambda c: c.pop("annotations"), "lacks the list 'annotations'")
    expect("type", lambda c: [a.update(image_id=str(a["image_id"])) for a in c["annotations"]], "first has image_id '1'.*1, 2")
    ds = dataset(edited(lambda c: c["annotations"][1].update(image_id=77), "unlisted"))
    assert "1 annotations of images that are not listed, ids: 2" in ds.report()


def test_broken_json_is_named(tmp_path):
    root = make_toy(tmp_path, 1, 1)
    file = root / "annotations" / "instances_train.json"
    file.write_text(file.read_text()[:-30])
    with pytest.raises(DataError, match="instances_train.json is no JSON"):
        dataset(root)
    with pytest.raises(DataError, match="cannot be read"):
        CocoDataset(tmp_path / "none.json", tmp_path)


def test_an_empty_split_is_legal_for_the_reader(tmp_path):
    root = make_toy(tmp_path, 1, 1)
    write_coco(root, toy_coco(0, 1), "val")
    ds = dataset(root, "val")
    assert len(ds) == 0 and ds.ground_truth()["images"] == [] and "0 images" in ds.report()


def test_order_of_annotations_in_the_file_is_irrelevant(tmp_path):
    ds = dataset(make_toy(tmp_path, 5, 2, edit=lambda coco, split: coco["annotations"].reverse()))
    for k in range(1, 6):
        x, y, w, h = toy_box(k)
        assert ds.annotation(k - 1).boxes.tolist() == [[x, y, x + w, y + h]] and ds.annotation(k - 1).labels == (k - 1) % 2


# Files


def test_samples_are_rgb_of_the_declared_size(tmp_path):
    ds = dataset(make_toy(tmp_path, 3, 3))
    for index in range(3):
        sample = ds.load(index)
        np.testing.assert_array_equal(sample.image, toy_image(index + 1, 3))
        assert sample.original_size == (120, 160) and sample.image.dtype == np.uint8
        np.testing.assert_array_equal(sample.transform, np.eye(3))
    assert ds.sizes.tolist() == [[120, 160]] * 3


def with_exif(jpeg: bytes, orientation: int) -> bytes:
    """A JPEG with an EXIF orientation tag put right after its first mark."""
    tiff = b"MM\0*\0\0\0\x08" + b"\0\x01" + b"\x01\x12\0\x03\0\0\0\x01" + bytes([0, orientation]) + b"\0\0" + b"\0\0\0\0"
    body = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + jpeg[2:]


@pytest.mark.parametrize(("width", "height", "box"), [(40, 60, [0, 0, 40, 30]), (60, 40, [0, 0, 30, 40])])
def test_d06_rotated_photographs_agree_with_their_boxes(tmp_path, width, height, box):
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, :30], image[:, 30:] = (255, 0, 0), (0, 0, 255)
    ds = one_image(tmp_path, [box], width, height, image, "a.jpg")
    file = tmp_path / "images" / "a.jpg"
    file.write_bytes(with_exif(file.read_bytes(), 6))
    assert cv2.imread(str(file)).shape[:2] == (60, 40)  # OpenCV does turn it
    sample = ds.load(0)
    assert sample.image.shape == (height, width, 3)
    x1, y1, x2, y2 = sample.boxes[0].astype(int)
    inside = sample.image[y1:y2, x1:x2].reshape(-1, 3).astype(int)
    near_seam = 30 * 40 * 0.1  # JPEG blurs the seam
    assert ((inside[:, 0] > 200) & (inside[:, 2] < 60)).sum() >= len(inside) - near_seam
    ds.check_files()


def test_d06_a_size_that_fits_neither_way_stops_with_both(tmp_path):
    ds = one_image(tmp_path, [[0, 0, 9, 9]], 500, 400, np.zeros((40, 60, 3), np.uint8), "a.jpg")
    with pytest.raises(DataError, match=r"a\.jpg is 60x40 px .* 500x400 px"):
        ds.load(0)
    with pytest.raises(DataError, match="60x40"):
        ds.check_files()
    ds = one_image(tmp_path / "turned", [[0, 0, 9, 9]], 40, 60, np.zeros((40, 60, 3), np.uint8), "a.jpg")
    with pytest.raises(DataError, match="60x40"):  # width and height swapped, and no EXIF that would explain it
        ds.check_files()


def damaged_toy(root):
    """TOY(10, 1) of JPEGs: 4 cut in half, 7 empty, 9 an HTML page, 10 absent."""

    def rename(coco, split):
        for image in coco["images"]:
            image["file_name"] = image["file_name"].replace(".png", ".jpg")

    make_toy(root, 10, 1, edit=rename)
    for k in range(1, 10):
        write_image(root / "images" / f"t_{k:04d}.jpg", toy_image(k, 1))
    file = root / "images" / "t_0004.jpg"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (root / "images" / "t_0007.jpg").write_bytes(b"")
    (root / "images" / "t_0009.jpg").write_text("<html>not found</html>")
    return dataset(root)


def test_d07_all_broken_files_in_one_message(tmp_path):
    ds = damaged_toy(tmp_path)
    with pytest.raises(DataError) as caught:
        ds.check_files()
    message = str(caught.value)
    assert all(f"t_{k:04d}.jpg" in message for k in (4, 7, 9, 10)) and "4 of the 10 images" in message
    assert not any(f"t_{k:04d}.jpg" in message for k in (1, 2, 3, 5, 6, 8))
    for index in (3, 6, 8, 9):
        with pytest.raises(DataError, match=f"t_{index + 1:04d}.jpg"):
            ds.load(index)


def test_d07_the_sound_rest_can_be_selected(tmp_path):
    ds = damaged_toy(tmp_path)
    rest = ds.select([i for i in range(len(ds)) if i not in ds.broken_files()])
    rest.check_files()
    assert len(rest) == 6 and rest.image_ids == [1, 2, 3, 5, 6, 8] and len(ds) == 10
    for index, k in enumerate(rest.image_ids):
        x, y, w, h = toy_box(k)
        assert rest.load(index).boxes.tolist() == [[x, y, x + w, y + h]]
    assert [a["image_id"] for a in rest.ground_truth()["annotations"]] == rest.image_ids


def test_a_thumbnail_does_not_hide_a_cut():
    ok, thumb = cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))
    ok, whole = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole, thumb = whole.tobytes(), thumb.tobytes()
    data = whole[:2] + b"\xff\xe2" + (len(thumb) + 2).to_bytes(2, "big") + thumb + whole[2:]
    assert image_fault(data) is None
    assert image_fault(data + b"\0" * 500) is None and image_fault(data + b"trailing words") is None
    assert "cut short" in image_fault(data[: len(data) * 2 // 3])


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp", ".jpg"])
def test_cut_files_of_all_formats_are_found(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    write_image(file, np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    assert load_image(file, (30, 40)).shape == (30, 40, 3)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(DataError, match="cut short"):
        load_image(file)


def test_grey_alpha_and_16_bit_images_become_rgb(tmp_path):
    for name, image in {
        "grey": np.full((4, 5), 9, np.uint8),
        "alpha": np.full((4, 5, 4), 9, np.uint8),
        "deep": np.full((4, 5, 3), 9 * 257, np.uint16),
    }.items():
        cv2.imwrite(str(tmp_path / f"{name}.png"), image)
        loaded = load_image(tmp_path / f"{name}.png")
        assert loaded.shape == (4, 5, 3) and loaded.dtype == np.uint8 and (loaded == 9).all()


@pytest.mark.parametrize("separator", ["/", "\\"])
def test_d09_names_beyond_ascii(tmp_path, monkeypatch, separator):
    root = tmp_path / "größe_数据 set"
    (root / "images" / "cam a").mkdir(parents=True)
    write_image(root / "images" / "cam a" / "图 1.png", toy_image(1, 1))
    coco = toy_coco(1, 1, names=["Straße 猫"])
    coco["images"][0]["file_name"] = f"cam a{separator}图 1.png"
    write_coco(root, coco, "train")
    monkeypatch.chdir("/")
    ds = dataset(root)
    ds.check_files()
    np.testing.assert_array_equal(ds.load(0).image, toy_image(1, 1))
    assert ds.class_names == ("Straße 猫",) and "Straße 猫" in ds.categories.table()
    assert ds.ground_truth()["categories"][0]["name"] == "Straße 猫"
    escaped = json.dumps(coco)  # \u escapes instead of UTF-8, and a byte order mark
    (root / "annotations" / "instances_train.json").write_text(escaped, encoding="utf-8-sig")
    assert dataset(root).class_names == ("Straße 猫",)


# Layouts


@pytest.mark.parametrize(
    ("annotations", "images"),
    [
        ("instances_train.json", "images"),
        ("instances_train2017.json", "train2017"),
        ("instances_train2017.json", "images/train2017"),
        ("my_train_set.json", "train"),
        ("instances_train.json", "."),
    ],
)
def test_layouts_that_are_found(tmp_path, annotations, images):
    (tmp_path / "val2017").mkdir()
    (tmp_path / "annotations").mkdir()
    (tmp_path / images).mkdir(parents=True, exist_ok=True)
    (tmp_path / "annotations" / annotations).write_text(json.dumps(toy_coco(1, 1)))
    write_image(tmp_path / images / "t_0001.png", toy_image(1, 1))
    file, folder = find_coco(tmp_path, "train")
    assert file.name == annotations and folder.resolve() == (tmp_path / images).resolve()


def test_layouts_that_are_not_found_say_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        find_coco(tmp_path / "none", "train")
    root = make_toy(tmp_path, 1, 1)
    with pytest.raises(DataError, match=r"split 'test'.*instances_test\*\.json and .*\*test\*\.json"):
        find_coco(root, "test")
    write_coco(root, toy_coco(1, 1), "train_b")
    assert find_coco(root, "train")[0].name == "instances_train.json"
    write_coco(root, toy_coco(1, 1), "train_c")
    (root / "annotations" / "instances_train.json").unlink()
    with pytest.raises(DataError, match=r"several.*train_b\.json, instances_train_c\.json"):
        find_coco(root, "train")
    (root / "images" / "t_0001.png").unlink()
    with pytest.raises(DataError, match=r"none of the first 1 images .*t_0001\.png.*looked in .*images"):
        find_coco(root, "val")


def test_s3_few_large_arrays_instead_of_many_objects(tmp_path):
    root = make_toy(tmp_path, 1, 1)
    coco = toy_coco(1, 1)
    coco["annotations"] = [{**coco["annotations"][0], "id": i} for i in range(50_000)]
    write_coco(root, coco, "train")
    ds = dataset(root)
    assert len(ds.annotation(0).boxes) == 50_000
    assert sum(len(v) for v in vars(ds).values() if isinstance(v, (list, dict, tuple))) < 20
    assert len(pickle.dumps(ds)) < 60 * 50_000


def test_boxes_written_as_corners_are_doubted(tmp_path):
    from toy import make_toy

    def corners(coco, split):
        for a in coco["annotations"]:
            x, y, w, h = a["bbox"]
            a["bbox"] = [x, y, x + w + 80, y + h + 60]

    source = CocoDataset(*find_coco(make_toy(tmp_path, 6, 2, edit=corners), "train"))
    assert any("were x1, y1, x2, y2 written?" in line for line in source.doubts())
    assert not CocoDataset(*find_coco(make_toy(tmp_path / "good", 6, 2), "train")).doubts()
