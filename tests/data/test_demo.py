"""The demo data set: same bytes everywhere, and the properties that make it a fair small task."""

import json
import time

import cv2
import numpy as np
import pytest

from mmdet.data import demo
from mmdet.data.demo import CLASS_NAMES, digest, encode_png, hidden_shares, make_demo, make_scenes
from mmdet.data.errors import DataError

DIGEST = "86e4eb211822c7eb36e73d762809a105448f1adf78d5a54b7c4f7e9a2af3efff"
COUNTS = {"train": 240, "val": 60}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    start = time.process_time()
    folder = make_demo(tmp_path_factory.mktemp("demo") / "set")
    return folder, time.process_time() - start


@pytest.fixture(scope="module")
def scenes():
    return {split: make_scenes(0, split, count) for split, count in COUNTS.items()}


def content(folder, split):
    return json.loads((folder / "annotations" / f"instances_{split}.json").read_text())


def test_same_bytes_everywhere_in_seconds(made):
    folder, seconds = made
    assert digest(folder) == DIGEST
    assert seconds < 30


def test_images_decode_to_the_painted_scenes(made, scenes):
    for split in COUNTS:
        coco = content(made[0], split)
        assert len(coco["images"]) == COUNTS[split]
        for entry, scene in list(zip(coco["images"], scenes[split]))[::20]:
            image = cv2.imread(str(made[0] / "images" / entry["file_name"]))
            assert image.shape == (320, 320, 3) == (entry["height"], entry["width"], 3)
            np.testing.assert_array_equal(image[..., ::-1], scene.rgb())


def test_classes_differ_only_in_shape_and_only_in_colour(scenes):
    assert len(CLASS_NAMES) >= 4
    looks = list(zip(demo._CLASS_SHAPES, demo._CLASS_HUES))
    pairs = [(a, b) for i, a in enumerate(looks) for b in looks[:i]]
    assert any(a[0] != b[0] and a[1] == b[1] for a, b in pairs)
    assert any(a[0] == b[0] and a[1] != b[1] for a, b in pairs)
    counts = np.bincount([t.label for s in scenes["train"] for t in s.things])
    assert len(counts) == len(CLASS_NAMES) and counts.min() > 0.7 * counts.mean()


def test_boxes_are_tight_around_the_whole_object_and_16_to_160_px(made, scenes):
    for split in COUNTS:
        boxes = {}
        for a in content(made[0], split)["annotations"]:
            if not a["iscrowd"]:
                boxes.setdefault(a["image_id"], []).append((a["category_id"], a["bbox"], a["area"]))
        for image_id, scene in enumerate(scenes[split], 1):
            expected = []
            for thing in scene.things:
                rows, columns = np.flatnonzero(thing.mask.any(1)), np.flatnonzero(thing.mask.any(0))
                width, height = int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1
                box = [thing.x + int(columns[0]), thing.y + int(rows[0]), width, height]
                expected.append((thing.label + 1, box, int(thing.mask.sum())))
                assert min(width, height) >= 16 and max(width, height) <= 160
                assert box[0] >= 0 and box[1] >= 0 and box[0] + width <= 320 and box[1] + height <= 320
            assert boxes.get(image_id, []) == expected


def test_the_pixels_of_an_object_have_its_hue_and_fill_its_box(scenes):
    for scene in scenes["val"]:
        owner = np.full((320, 320), -1)
        for number, thing in enumerate(scene.things):
            x1, y1, x2, y2 = thing.box
            owner[y1:y2, x1:x2][thing.mask] = number
        for number, thing in enumerate(scene.things):
            assert np.isin(scene.pixels[owner == number] // 16, demo._CLASS_HUES[thing.label]).all()
        painted = np.isin(scene.pixels // 16, range(8))
        assert scene.crowd or np.array_equal(painted, owner >= 0)  # object hues appear nowhere else


@pytest.mark.parametrize("split", COUNTS)
def test_a_third_of_the_objects_is_overlapped_and_none_vanishes(scenes, split):
    shares = np.array([h for s in scenes[split] for h in hidden_shares(s.things)])
    assert 0.28 <= np.mean(shares >= 0.2) <= 0.38
    assert shares.max() <= 0.6


@pytest.mark.parametrize("split", COUNTS)
def test_images_without_objects_and_one_crowd_region(made, split):
    coco = content(made[0], split)
    with_objects = {a["image_id"] for a in coco["annotations"]}
    assert 0.10 <= 1 - len(with_objects) / len(coco["images"]) <= 0.2
    assert sum(a["iscrowd"] for a in coco["annotations"]) == 1
    assert [a["id"] for a in coco["annotations"]] == list(range(1, len(coco["annotations"]) + 1))


def test_backgrounds_are_textured_and_cluttered(scenes):
    for scene in (s for s in scenes["train"] if not s.things and not s.crowd):
        grey = cv2.cvtColor(scene.rgb(), cv2.COLOR_RGB2GRAY).astype(float)
        local = grey.reshape(20, 16, 20, 16).std(axis=(1, 3))
        assert np.median(local) > 3  # texture in nearly every patch
        assert grey.std() > 12
        assert len(np.unique(scene.pixels // 16)) >= 5  # of eight muted hues


def test_train_and_val_and_seeds_differ(scenes):
    assert not np.array_equal(scenes["train"][1].pixels, scenes["val"][1].pixels)
    assert not np.array_equal(make_scenes(1, "train", 1)[0].pixels, scenes["train"][0].pixels)
    np.testing.assert_array_equal(make_scenes(0, "train", 3)[2].pixels, scenes["train"][2].pixels)


def test_a_complete_set_stays_and_a_damaged_one_is_made_again(tmp_path):
    folder = make_demo(tmp_path / "set", 3, 2)
    file = folder / "images" / "train_0001.png"
    before, whole = file.stat().st_mtime_ns, digest(folder)
    make_demo(folder, 3, 2)
    assert file.stat().st_mtime_ns == before
    file.write_bytes(file.read_bytes()[:1000])
    make_demo(folder, 3, 2)
    assert digest(folder) == whole
    assert len(content(make_demo(folder, 4, 2), "train")["images"]) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(DataError, match="not the demo data set"):
        make_demo(tmp_path, 1, 1)
    assert (tmp_path / "holiday.jpg").read_bytes() == b"precious"


def test_png_of_any_size_decodes():
    pixels = np.arange(300 * 400, dtype=np.int64).reshape(300, 400).astype(np.uint8)  # more than one stored block
    image = cv2.imdecode(np.frombuffer(encode_png(pixels), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(image[..., ::-1], demo.palette()[pixels])


def test_unknown_shape_is_named():
    with pytest.raises(ValueError, match="'star'.*disc"):
        demo.shape_mask("star", 4, 4)
