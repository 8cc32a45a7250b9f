"""The judge against pycocotools on random data, and the numbers that are known by hand or measurement."""

import contextlib
import io
import math

import numpy as np
import pytest
from loguru import logger
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mmdet.data.errors import DataError
from mmdet.evaluators.judge import judge
from mmdet.evaluators.results import Results

STANDARD = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def truth_of(boxes, image_ids=None, category_ids=None, crowd=None, first_id=1) -> dict:
    """A ground truth with one annotation per box; all in image 1 and category 1 unless given."""
    image_ids = image_ids or [1] * len(boxes)
    category_ids = category_ids or [1] * len(boxes)
    crowd = crowd or [0] * len(boxes)
    rows = zip(boxes, image_ids, category_ids, crowd)
    annotations = [
        {"id": n + first_id, "image_id": i, "category_id": c, "bbox": list(b), "area": b[2] * b[3], "iscrowd": k}
        for n, (b, i, c, k) in enumerate(rows)
    ]
    images = [{"id": i, "file_name": f"{i}.png", "width": 640, "height": 480} for i in dict.fromkeys(image_ids)]
    categories = [{"id": c, "name": f"c{c}"} for c in sorted(set(category_ids))]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def found_at(boxes, scores=None, image_ids=None, category_ids=None) -> list[dict]:
    """Detections; scores 0.90, 0.89, ... unless given."""
    scores = scores or [0.9 - 0.01 * n for n in range(len(boxes))]
    rows = zip(image_ids or [1] * len(boxes), category_ids or [1] * len(boxes), boxes, scores)
    return [{"image_id": i, "category_id": c, "bbox": list(b), "score": s} for i, c, b, s in rows]


def pycocotools_tables(truth: dict, results: list[dict], max_dets: list[int]):
    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO()
        reference.dataset = truth
        reference.createIndex()
        run = COCOeval(reference, reference.loadRes([dict(r) for r in results]), "bbox")
        run.params.maxDets = max_dets
        run.evaluate()
        run.accumulate()
    return run


def random_data(seed, num_images=12, num_classes=4, crowd_rate=0.1, tie_levels=0, most=30):
    """Objects of all sizes, some crowd; detections near objects or anywhere; scores with ties where asked."""
    rng = np.random.default_rng(seed)
    boxes, images, classes, crowd = [], [], [], []
    found = []
    ids = rng.permutation(1000)[:num_images]
    category_ids = np.sort(rng.permutation(200)[:num_classes] + 1)
    for image in ids.tolist():
        for _ in range(rng.integers(0, 8)):
            size = np.exp(rng.uniform(np.log(8), np.log(250), 2))
            box = np.concatenate([rng.uniform(0, 300, 2), size]).round(2)
            boxes.append(box.tolist())
            images.append(image)
            classes.append(int(rng.choice(category_ids)))
            crowd.append(int(rng.random() < crowd_rate))
            for _ in range(rng.integers(0, 4)):
                near = box + rng.normal(0, 0.08, 4) * np.tile(size, 2)
                near[2:] = np.maximum(near[2:], 1)
                found.append((image, classes[-1] if rng.random() < 0.9 else int(rng.choice(category_ids)), near.tolist()))
        for _ in range(rng.integers(0, most)):
            anywhere = np.concatenate([rng.uniform(0, 300, 2), rng.uniform(5, 200, 2)])
            found.append((image, int(rng.choice(category_ids)), anywhere.tolist()))
    order = rng.permutation(len(found))
    scores = rng.random(len(found))
    if tie_levels:
        scores = np.ceil(scores * tie_levels) / tie_levels
    results = [
        {"image_id": found[n][0], "category_id": found[n][1], "bbox": found[n][2], "score": float(s)}
        for n, s in zip(order.tolist(), scores)
    ]
    truth = truth_of(boxes, images, classes, crowd)
    truth["images"] = [{"id": i} for i in ids.tolist()]
    truth["categories"] = [{"id": c, "name": f"c{c}"} for c in category_ids.tolist()]
    return truth, results


def assert_equal_tables(got: dict, want: np.ndarray) -> None:
    values = np.array([got[name] for name in STANDARD])
    want = np.where(want == -1, np.nan, want)
    np.testing.assert_allclose(values, want, atol=1e-9, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"crowd_rate": 0.5}),
        (2, {"num_classes": 60, "num_images": 30}),
        (3, {"tie_levels": 3}),
        (4, {"tie_levels": 1, "num_classes": 1, "crowd_rate": 0.3}),
        (5, {"num_images": 1, "num_classes": 2, "most": 400}),
        (6, {"crowd_rate": 0.0, "num_images": 40}),
    ],
)
def test_the_twelve_numbers_equal_pycocotools(seed, options):
    truth, results = random_data(seed, **options)
    reference = pycocotools_tables(truth, results, [1, 10, 100])
    with contextlib.redirect_stdout(io.StringIO()):
        reference.summarize()
    assert_equal_tables(judge(truth, results).metrics, reference.stats)


@pytest.mark.parametrize("max_dets", [300, 50, 10])
def test_other_limits_of_detections_have_a_right_summary(max_dets):
    """pycocotools evaluates any limits; only its printed summary insists on the third being 100."""
    truth, results = random_data(5, num_images=8, num_classes=2, most=600)
    limits = sorted({1, 10, 100, max_dets})
    run = pycocotools_tables(truth, results, limits)
    last = limits.index(max_dets)

    def mean(values):
        return values[values > -1].mean()

    metrics = judge(truth, results, max_dets=max_dets).metrics
    precision, recall = run.eval["precision"], run.eval["recall"]
    want = {"AP": precision[..., 0, last], "AP50": precision[0, ..., 0, last], "APs": precision[..., 1, last]}
    want |= {f"AR{n}": recall[..., 0, m] for m, n in enumerate(limits)} | {"ARl": recall[..., 3, last]}
    for name, values in want.items():
        assert metrics[name] == pytest.approx(mean(values), abs=1e-9), name
    assert set(metrics) == {*STANDARD, f"AR{max_dets}"}
    assert metrics["AP"] != judge(truth, results).metrics["AP"]  # the limit matters in these data


def test_every_class_equals_pycocotools():
    truth, results = random_data(7, num_images=30, num_classes=5)
    run = pycocotools_tables(truth, results, [1, 10, 100])
    per_class = judge(truth, results).per_class
    for k, category in enumerate(truth["categories"]):
        row = per_class[category["name"]]
        assert row["AP"] == pytest.approx(run.eval["precision"][:, :, k, 0, 2].mean(), abs=1e-9)
        assert row["AP50"] == pytest.approx(run.eval["precision"][0, :, k, 0, 2].mean(), abs=1e-9)
        assert row["AR100"] == pytest.approx(run.eval["recall"][:, k, 0, 2].mean(), abs=1e-9)
        own = [a for a in truth["annotations"] if a["category_id"] == category["id"]]
        assert row["objects"] == sum(not a["iscrowd"] for a in own)
        assert row["detections"] == sum(r["category_id"] == category["id"] for r in results)


@pytest.mark.parametrize(
    ("truth", "found", "ap", "ap50"),
    [
        ([[0, 0, 100, 100]], [[0, 0, 100, 60]], 0.30, 1.0),  # IoU 0.6
        ([[0, 0, 100, 100]], [[0, 0, 100, 90]], 0.90, 1.0),  # IoU 0.9
        ([[0, 0, 50, 50], [200, 200, 50, 50]], [[0, 0, 50, 50]], 51 / 101, 51 / 101),  # 101 recalls, so not 0.5
        ([[0, 0, 50, 50], [200, 200, 0, 50]], [[0, 0, 50, 50]], 51 / 101, 51 / 101),  # a zero-width object counts here
    ],
)
def test_golden_numbers(truth, found, ap, ap50):
    metrics = judge(truth_of(truth), found_at(found)).metrics
    assert metrics["AP"] == pytest.approx(ap, abs=1e-6)
    assert metrics["AP50"] == pytest.approx(ap50, abs=1e-6)


def test_unknown_image_is_named():
    with pytest.raises(DataError, match=r"1 of 2 detections are of images .* \(image ids 9\); its 1 images are 1"):
        judge(truth_of([[0, 0, 9, 9]]), found_at([[0, 0, 9, 9]] * 2, image_ids=[1, 9]))


@pytest.mark.parametrize("first_id", [0, 1])
def test_e02_annotation_id_zero_is_an_object_like_any_other(first_id):
    boxes = [[10, 10, 100, 100], [200, 50, 120, 90], [400, 200, 100, 150]]
    assert judge(truth_of(boxes, first_id=first_id), found_at(boxes)).metrics["AP"] == pytest.approx(1.0, abs=1e-9)
    assert judge(truth_of(boxes[:1], first_id=first_id), found_at(boxes[:1])).metrics["AP"] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("crowd", "ap"), [([0, 1], 1.0), ([0, 0], 0.1262)])
def test_e05_detections_inside_a_crowd_region_cost_nothing(crowd, ap):
    truth = truth_of([[10, 10, 100, 100], [300, 100, 200, 200]], crowd=crowd)
    inside = [[310, 110, 60, 60], [380, 150, 60, 60], [420, 220, 60, 60]]
    results = found_at([[10, 10, 100, 100], *inside], scores=[0.8, 0.9, 0.9, 0.9])
    assert judge(truth, results).metrics["AP"] == pytest.approx(ap, abs=1e-4)


@pytest.mark.parametrize(("score", "ap"), [(0.95, 0.5), (0.5, 1.0)])
def test_d04_a_false_box_on_an_image_without_objects_counts(score, ap):
    truth = truth_of([[10, 10, 40, 30]])
    truth["images"].append({"id": 2})
    results = found_at([[10, 10, 40, 30], [50, 50, 40, 30]], scores=[0.9, score], image_ids=[1, 2])
    assert judge(truth, results).metrics["AP"] == pytest.approx(ap, abs=1e-9)


@pytest.mark.parametrize("ids", [[3, 1, 2], ["c", "a", "b"]])
def test_d10_bare_annotations_and_string_ids(ids):
    """Without ids, area, iscrowd and info, as a hand-written file may be."""
    boxes = [[10, 10, 40, 30], [20, 20, 40, 30], [30, 30, 40, 30]]
    annotations = [{"image_id": i, "category_id": 1, "bbox": b} for i, b in zip(ids, boxes)]
    truth = {"images": [{"id": i} for i in ids], "annotations": annotations, "categories": [{"id": 1, "name": "x"}]}
    assert judge(truth, found_at(boxes, image_ids=ids)).metrics["AP"] == pytest.approx(1.0, abs=1e-9)


def test_no_detections_is_zero_and_no_objects_is_undefined():
    nothing = judge(truth_of([[0, 0, 200, 200]]), []).metrics
    assert {name for name, value in nothing.items() if value == 0.0} == set(STANDARD) - {"APs", "APm", "ARs", "ARm"}
    assert all(math.isnan(nothing[name]) for name in ("APs", "APm", "ARs", "ARm"))  # no object of these sizes
    empty = {"images": [{"id": 1}], "annotations": [], "categories": [{"id": 1, "name": "x"}]}
    for results in ([], found_at([[0, 0, 9, 9]])):
        evaluation = judge(empty, results)
        assert all(math.isnan(value) for value in evaluation.metrics.values())
        assert math.isnan(evaluation.per_class["x"]["AP"]) and evaluation.per_class["x"]["objects"] == 0
    only_crowd = judge(truth_of([[0, 0, 50, 50]], crowd=[1]), found_at([[0, 0, 50, 50]]))
    assert math.isnan(only_crowd.metrics["AP"])
    assert math.isnan(judge({"images": [], "annotations": [], "categories": []}, []).metrics["AP"])


def test_entries_that_are_not_finite_or_of_unknown_categories_are_counted_in_the_log():
    box, nan, inf = [10, 10, 40, 30], float("nan"), float("inf")
    results = found_at([box, [nan, 0, 5, 5], [0, 0, inf, 5], box, box], [0.5, 0.9, 0.9, nan, 0.9], category_ids=[1, 1, 1, 1, 7])
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING", format="{message}")
    try:
        evaluation = judge(truth_of([box]), results)
    finally:
        logger.remove(sink)
    assert evaluation.metrics["AP"] == pytest.approx(1.0, abs=1e-9)
    assert lines[0].startswith("3 detections with a NaN or infinite box or score were dropped")
    assert lines[1].startswith("1 of 2 detections are not counted: category ids 7 are not in the ground truth, which has 1")


def test_classes_of_one_name_stay_apart_and_given_names_are_used():
    truth = truth_of([[0, 0, 9, 9], [20, 20, 9, 9]], category_ids=[3, 8])
    for category in truth["categories"]:
        category["name"] = "猫"
    assert list(judge(truth, []).per_class) == ["猫 (id 3)", "猫 (id 8)"]
    assert list(judge(truth, [], class_names=["cat", "dog"]).per_class) == ["cat", "dog"]
    with pytest.raises(ValueError, match="1 class names for 2 categories"):
        judge(truth, [], class_names=["cat"])
    with pytest.raises(ValueError, match="max_dets is 0"):
        judge(truth, [], max_dets=0)


def test_flat_arrays_and_dictionaries_are_the_same(tmp_path):
    truth, results = random_data(8)
    flat = Results.from_coco(results)
    assert flat.to_coco() == results
    assert judge(truth, flat).metrics == judge(truth, results).metrics
    flat.save(tmp_path / "größe 猫.json")
    assert Results.load(tmp_path / "größe 猫.json").to_coco() == results
    assert [p.name for p in tmp_path.iterdir()] == ["größe 猫.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON file"),
        ('{"a": 1}', "expected a list of detections"),
        ("[1]", "entry 0 is a int"),
        ('[{"image_id": 1, "category_id": 1, "score": 1}]', "entry 0 has no bbox"),
        ('[{"image_id": 1, "category_id": 1, "score": 1, "bbox": [1, 2, 3]}]', r"entry 0 has bbox \[1, 2, 3\]"),
        ('[{"image_id": 1, "category_id": 1, "score": "a", "bbox": [1, 2, 3, 4]}]', "entry 0 is not numeric"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_results_file_is_named_with_the_fault(tmp_path, content, message):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        Results.load(file)
    assert str(file) in str(caught.value)
