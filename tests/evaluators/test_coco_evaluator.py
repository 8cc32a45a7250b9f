"""The evaluator over real files: ids, frames, batch sizes, modes, what is dropped, and what it shows."""

import contextlib
import json

import numpy as np
import pytest
import torch
from loguru import logger
from perfect import PerfectModel, PlainLoader
from torch import nn
from toy import make_toy, write_coco, write_image

from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.errors import DataError
from mmdet.data.structures import Detections
from mmdet.evaluators import CocoEvaluator, Results, draw_comparison, format_per_class, format_summary, judge
from mmdet.evaluators.evaluator import Evaluation, evaluation_mode


def open_split(folder, split="val", categories=None) -> CocoDataset:
    return CocoDataset(*find_coco(folder, split), categories)


def toy(path, *args, **kwargs) -> CocoDataset:
    return open_split(make_toy(path, *args, **kwargs))


def evaluator_of(source, batch_size=1, scale=1.0, **options) -> CocoEvaluator:
    return CocoEvaluator(PlainLoader(source, batch_size, scale=scale), source.categories, **options)


def found(boxes, scores, labels=None) -> Detections:
    labels = [0] * len(boxes) if labels is None else labels
    return Detections(torch.tensor(boxes).float().reshape(-1, 4), torch.tensor(scores).float(), torch.tensor(labels).long())


@contextlib.contextmanager
def log_lines(level="INFO"):
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).strip()), level=level, format="{message}")
    try:
        yield lines
    finally:
        logger.remove(sink)


def one_image(path, size, annotations, categories=({"id": 1, "name": "person"},)) -> CocoDataset:
    """A val set of one grey image (W, H) = ``size`` with the given annotations."""
    (path / "images").mkdir()
    write_image(path / "images" / "a.png", np.full((size[1], size[0], 3), 127, np.uint8))
    image = {"id": 5, "file_name": "a.png", "width": size[0], "height": size[1]}
    annotations = [{"image_id": 5, "category_id": 1, **a} for a in annotations]
    write_coco(path, {"images": [image], "annotations": annotations, "categories": list(categories)}, "val")
    return open_split(path)


def test_e01_results_carry_the_data_sets_category_ids(tmp_path):
    source = toy(tmp_path, 3, 3, category_ids=[7, 13, 42])
    evaluator = evaluator_of(source)
    assert evaluator.evaluate(PerfectModel(source)).metrics["AP"] == pytest.approx(1.0)
    assert {d["category_id"] for d in evaluator.detections} == {7, 13, 42}
    wrong = [{**d, "category_id": d["image_id"]} for d in evaluator.detections]
    assert judge(source.ground_truth(), wrong).metrics["AP"] == 0.0


def test_d01_order_of_categories_does_not_matter_but_their_names_do(tmp_path):
    def reorder(coco, split):
        if split == "val":
            coco["categories"] = [coco["categories"][n] for n in (2, 0, 1)]

    make_toy(tmp_path, 6, 3, category_ids=[7, 13, 42], edit=reorder)
    train = open_split(tmp_path, "train")
    val = open_split(tmp_path, "val", train.categories)
    evaluator = CocoEvaluator(PlainLoader(val, 4), train.categories)
    assert evaluator.evaluate(PerfectModel(val)).metrics["AP"] == pytest.approx(1.0)

    def swap(coco, split):
        names = {7: "c2", 13: "c1", 42: "c3"}
        if split == "val":
            coco["categories"] = [{"id": i, "name": n} for i, n in names.items()]

    make_toy(tmp_path, 6, 3, category_ids=[7, 13, 42], edit=swap)
    with pytest.raises(DataError, match=r"(?s)7.*13"):
        open_split(tmp_path, "val", train.categories)


def test_e02_first_annotation_id_zero(tmp_path):
    boxes = [[10, 10, 100, 100], [200, 50, 120, 90], [400, 200, 100, 150]]
    source = one_image(
        tmp_path, (640, 480), [{"id": n, "bbox": b, "area": b[2] * b[3], "iscrowd": 0} for n, b in enumerate(boxes)]
    )
    assert evaluator_of(source).evaluate(PerfectModel(source)).metrics["AP"] == pytest.approx(1.0)


def test_e04_boxes_return_to_the_pixels_of_the_file(tmp_path):
    source = one_image(tmp_path, (1280, 960), [{"id": 1, "bbox": [200, 100, 400, 300]}])
    in_network_frame = found([[100, 50, 300, 200]], [0.9])
    evaluator = evaluator_of(source, scale=0.5)
    evaluation = evaluator.evaluate(PerfectModel(source, lambda *_: in_network_frame))
    assert evaluation.metrics["AP"] == pytest.approx(1.0)
    assert evaluator.detections[0]["bbox"] == pytest.approx([200, 100, 400, 300], abs=0.01)
    assert evaluator.detections[0]["image_id"] == 5


def test_e05_detections_inside_a_crowd_region_cost_nothing(tmp_path):
    crowd = {"id": 2, "bbox": [300, 100, 200, 200], "iscrowd": 1}
    source = one_image(tmp_path, (640, 480), [{"id": 1, "bbox": [10, 10, 100, 100], "iscrowd": 0}, crowd])
    boxes = [[10, 10, 110, 110], [310, 110, 370, 170], [380, 150, 440, 210], [420, 220, 480, 280]]
    evaluation = evaluator_of(source).evaluate(PerfectModel(source, lambda *_: found(boxes, [0.8, 0.9, 0.9, 0.9])))
    assert evaluation.metrics["AP"] == pytest.approx(1.0)
    assert evaluation.samples[0]["ignore"].tolist() == [[300, 100, 500, 300]]


@pytest.mark.parametrize(("score", "ap"), [(0.95, 0.5), (0.5, 1.0)])
def test_d04_images_without_objects_are_judged(tmp_path, score, ap):
    def only_first(coco, split):
        coco["annotations"] = coco["annotations"][:1]

    source = toy(tmp_path, 2, 1, edit=only_first)
    model = PerfectModel(source, lambda image_id, f: f if image_id == 1 else found([[50, 50, 90, 80]], [score]))
    evaluator = evaluator_of(source)
    assert evaluator.evaluate(model).metrics["AP"] == pytest.approx(ap)
    assert {d["image_id"] for d in evaluator.detections} == {1, 2}


@pytest.mark.parametrize("ids", [[1, 2, 3], ["a", "b", "c"]])
def test_d10_reduced_annotations_and_string_ids(tmp_path, ids):
    def reduce(coco, split):
        keep = {"images": ("id", "file_name", "width", "height"), "annotations": ("id", "image_id", "category_id", "bbox")}
        keep["categories"] = ("id", "name")
        for key, names in keep.items():
            coco[key] = [{n: entry[n] for n in names} for entry in coco[key]]
        for image, annotation, new in zip(coco["images"], coco["annotations"], ids):
            image["id"] = annotation["image_id"] = new
        del coco["info"], coco["licenses"]

    source = toy(tmp_path, 3, 1, edit=reduce)
    evaluator = evaluator_of(source)
    assert evaluator.evaluate(PerfectModel(source)).metrics["AP"] == pytest.approx(1.0)
    assert [d["image_id"] for d in evaluator.detections] == ids
    evaluator.results.save(tmp_path / "found.json")
    again = Results.load(tmp_path / "found.json")
    assert again.to_coco() == evaluator.detections


def scattered(seed: int):
    """A detector with misses, doubles and shifted boxes, the same for an image wherever it stands."""

    def spoil(image_id, perfect):
        rng = np.random.default_rng([seed, image_id])
        boxes = perfect.boxes.repeat(3, 1) + torch.tensor(rng.normal(0, 3, (3 * len(perfect), 4))).float()
        return Detections(boxes, torch.tensor(rng.random(len(boxes))).float(), perfect.labels.repeat(3))

    return spoil


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_any_batch_size_gives_the_same_numbers(tmp_path, batch_size):
    source = toy(tmp_path, 7, 2)
    reference = evaluator_of(source)
    want = reference.evaluate(PerfectModel(source, scattered(0)))
    evaluator = evaluator_of(source, batch_size)
    got = evaluator.evaluate(PerfectModel(source, scattered(0)))
    assert 0 < got.metrics["AP"] < 1
    np.testing.assert_equal(got.metrics, want.metrics)
    assert evaluator.detections == reference.detections


def test_a_saved_results_file_gives_exactly_the_logged_number(tmp_path):
    source = toy(tmp_path, 7, 2)
    evaluator = evaluator_of(source, 3)
    evaluation = evaluator.evaluate(PerfectModel(source, scattered(1)))
    evaluator.results.save(tmp_path / "found.json")
    again = judge(source.ground_truth(), json.loads((tmp_path / "found.json").read_text()))
    np.testing.assert_equal(again.metrics, evaluation.metrics)
    np.testing.assert_equal(again.per_class, evaluation.per_class)


def test_values_that_are_not_finite_are_dropped_and_counted(tmp_path):
    source = toy(tmp_path, 3, 1)
    nan, inf = float("nan"), float("inf")

    def spoil(image_id, perfect):
        broken = found([[nan, 0, 5, 5], [0, 0, inf, 5], [0, 0, 5, 5]], [0.99, 0.99, nan])
        return Detections(*(torch.cat([getattr(broken, k), getattr(perfect, k)]) for k in ("boxes", "scores", "labels")))

    with log_lines("WARNING") as lines:
        evaluation = evaluator_of(source, 2).evaluate(PerfectModel(source, spoil))
    assert evaluation.metrics["AP"] == pytest.approx(1.0)
    assert lines == ["9 detections with a NaN or infinite box or score were dropped"]


def test_no_detections_is_zero(tmp_path):
    source = toy(tmp_path, 3, 2)
    evaluator = evaluator_of(source, 2)
    metrics = evaluator.evaluate(PerfectModel(source, lambda *_: found([], []))).metrics
    assert metrics["AP"] == metrics["AP50"] == metrics["AR100"] == 0.0
    assert evaluator.detections == []


def test_every_module_keeps_its_own_mode_also_after_an_error(tmp_path):
    source = toy(tmp_path, 2, 1)
    model = nn.Sequential(PerfectModel(source), nn.Dropout(), nn.BatchNorm2d(3)).train()
    model[2].eval()  # frozen
    with evaluation_mode(model), torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
        assert not any(m.training for m in model.modules())
    modes = [m.training for m in model.modules()]
    assert modes == [True, True, True, True, False]

    def boom(image_id, perfect):
        raise ValueError("boom")

    failing = PerfectModel(source, boom).train()
    failing.norm.eval()
    with pytest.raises(ValueError, match="boom"):
        evaluator_of(source).evaluate(failing)
    assert failing.training and not failing.norm.training and torch.is_grad_enabled()


@pytest.mark.parametrize(("amp", "dtype"), [(None, torch.float32), ("off", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_float32_unless_asked(amp, dtype):
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), evaluation_mode(layer, "cpu", amp):
        assert layer(torch.ones(1, 4)).dtype == dtype
    with pytest.raises(ValueError, match="amp is 'half'"), evaluation_mode(layer, "cpu", "half"):
        pass


def test_a_class_index_without_category_is_an_error(tmp_path):
    source = toy(tmp_path, 2, 2)
    with pytest.raises(ValueError, match="image 1: the model found class index 2, but there are only 2 categories"):
        evaluator_of(source).evaluate(PerfectModel(source, lambda *_: found([[0, 0, 5, 5]], [0.5], [2])))


def test_samples_show_truth_and_detections(tmp_path):
    source = toy(tmp_path, 9, 2, names=["Straße", "猫"])
    evaluation = evaluator_of(source, 4).evaluate(PerfectModel(source))
    assert [s["image_id"] for s in evaluation.samples] == [1, 4, 6, 9]
    for sample in evaluation.samples:
        torch.testing.assert_close(sample["detections"].boxes, sample["truth"].boxes)
        assert sample["detections"].labels.tolist() == sample["truth"].labels.tolist()
        assert sample["image"].shape == (120, 160, 3) and sample["image"].dtype == np.uint8
        before = sample["image"].copy()
        picture = draw_comparison(sample, source.class_names)
        assert picture.dtype == np.uint8 and picture.shape[2] == 3
        assert (sample["image"] == before).all()


def test_reports_are_readable(tmp_path):
    source = toy(tmp_path, 6, 2, names=["Straße 猫", "a name that is rather long for a column of a table, but is not cut"])
    evaluation = evaluator_of(source).evaluate(PerfectModel(source))
    table = format_per_class(evaluation)
    for name in source.class_names:
        assert name in table
    assert "1.0000" in table and table.splitlines()[0].split()[:3] == ["class", "AP", "AP50"]
    summary = format_summary(evaluation)
    assert "AP         1.0000  mean over IoU 0.50 to 0.95" in summary.splitlines()
    assert "APl     undefined  large objects, above 96 x 96 px" in summary.splitlines()
    assert format_summary(Evaluation({"other": 0.5})) == "other      0.5000"
    assert format_per_class(Evaluation({}, {})).strip().startswith("class")
