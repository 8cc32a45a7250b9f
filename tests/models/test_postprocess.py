"""Suppression against brute force and the reference values."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.models.boxes import iou_pairwise
from mmdet.models.postprocess import MulticlassNMS


def random_case(points=120, classes=4, seed=0, low=-60.0):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(2, points, 2, generator=generator) * 120 + low
    boxes = torch.cat([corner, corner + 5 + 40 * torch.rand(2, points, 2, generator=generator)], -1)
    return boxes, torch.rand(2, points, classes, generator=generator) ** 3


def brute_force(boxes, scores, nms):
    """Rows (label, score, box) of one image, by the definition."""
    overlaps = iou_pairwise(boxes.double(), boxes.double())
    kept = []
    for label in range(scores.shape[1]):
        order = [i for i in scores[:, label].argsort(descending=True).tolist() if scores[i, label] > nms.score_threshold]
        chosen = []
        for i in order if nms.nms_top_k < 0 else order[: nms.nms_top_k]:
            if all(overlaps[i, j] <= nms.nms_threshold for j in chosen):
                chosen.append(i)
        kept += [(label, scores[i, label].item(), *boxes[i].tolist()) for i in chosen]
    kept.sort(key=lambda row: -row[1])
    return kept if nms.keep_top_k < 0 else kept[: nms.keep_top_k]


def rows(found):
    return [(k, s, *b) for k, s, b in zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist(), strict=True)]


@pytest.mark.parametrize(
    "settings", [{}, {"nms_top_k": 20}, {"keep_top_k": 7, "nms_threshold": 0.3}, {"nms_top_k": -1, "keep_top_k": -1}]
)
@pytest.mark.parametrize("points", [120, 400])
def test_equals_brute_force_also_with_negative_coordinates(settings, points):
    """Above 1,000 candidates torchvision takes another path."""
    nms = MulticlassNMS(**{"score_threshold": 0.05, **settings})
    boxes, scores = random_case(points, classes=5 if points == 120 else 3)
    scores[1, :, 0] = 0
    before = boxes.clone(), scores.clone()
    for found, b, s in zip(nms(boxes, scores), boxes, scores, strict=True):
        assert rows(found) == brute_force(b, s, nms)
    assert torch.equal(boxes, before[0])
    assert torch.equal(scores, before[1])


def test_classes_do_not_suppress_each_other_unless_asked():
    boxes = torch.tensor([[[-100.0, 0, 0, 100], [-100, 0, 0, 100], [541, 0, 641, 100]]])
    scores = torch.tensor([[[0.9, 0.0], [0.0, 0.8], [0.7, 0.0]]])
    assert len(MulticlassNMS()(boxes, scores)[0]) == 3
    assert MulticlassNMS(class_agnostic=True)(boxes, scores)[0].scores.tolist() == pytest.approx([0.9, 0.7])


def test_best_class_only():
    boxes = torch.tensor([[[0.0, 0, 10, 10], [100, 0, 110, 10]]])
    scores = torch.tensor([[[0.9, 0.8], [0.1, 0.3]]])
    found = MulticlassNMS(multi_label=False)(boxes, scores)[0]
    assert found.labels.tolist() == [0, 1]
    assert len(MulticlassNMS()(boxes, scores)[0]) == 4


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("points", [0, 5])
def test_nothing_found(multi_label, points):
    found = MulticlassNMS(multi_label=multi_label)(torch.zeros(2, points, 4), torch.zeros(2, points, 3))
    assert [tuple(t.shape) for t in (found[0].boxes, found[0].scores, found[0].labels)] == [(0, 4), (0,), (0,)]
    assert found[1].labels.dtype == torch.int64


def test_values_that_are_not_finite_are_passed_on_and_spoil_nothing():
    boxes, scores = random_case(40, 2)
    clean = MulticlassNMS()(boxes, scores)[0]
    boxes = torch.cat([boxes, torch.full((2, 1, 4), float("nan")), torch.full((2, 1, 4), float("inf"))], 1)
    scores = torch.cat([scores, torch.tensor([[[0.001, 0.5], [0.0, 0.4]]]).expand(2, 2, 2)], 1)
    found = MulticlassNMS(keep_top_k=-1)(boxes, scores)[0]
    finite = found.boxes.isfinite().all(1)
    assert rows(found.map(lambda t: t[finite])) == rows(clean)
    assert (~finite).sum() == 2


def test_half_precision_goes_in_and_float32_comes_out():
    boxes, scores = random_case()
    found = MulticlassNMS()(boxes.bfloat16(), scores.bfloat16())[0]
    assert found.boxes.dtype == found.scores.dtype == torch.float32


def reference_rows(array):
    return sorted((int(r[0]), round(float(r[1]), 5), *(round(float(v), 3) for v in r[2:])) for r in array)


@needs_shared
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("t0.01_n0.6_k100", {}),
        ("t0.01_n0.7_k300", {"nms_threshold": 0.7, "keep_top_k": 300}),
        ("t0.3_n0.5_k20_top50", {"score_threshold": 0.3, "nms_threshold": 0.5, "keep_top_k": 20, "nms_top_k": 50}),
    ],
)
def test_reference_multi_label(name, settings):
    given = np.load(SHARED / "golden/pure/nms.miemie.npz")
    expected = np.load(SHARED / "golden/pure/nms.paddledet.npz")[f"MultiClassNMS_{name}"]
    found = MulticlassNMS(**settings)(torch.from_numpy(given["boxes"])[None], torch.from_numpy(given["scores"])[None])[0]
    assert reference_rows(rows(found)) == reference_rows(expected)


@needs_shared
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mc_t0.01_n0.6_k100", {}),
        ("mc_t0.3_n0.5_k20", {"score_threshold": 0.3, "nms_threshold": 0.5, "keep_top_k": 20}),
        ("mc_agnostic", {"class_agnostic": True}),
    ],
)
def test_reference_best_class(name, settings):
    given = np.load(SHARED / "golden/pure/nms.miemie.npz")
    nms = MulticlassNMS(multi_label=False, **settings)
    found = nms(torch.from_numpy(given["boxes"])[None], torch.from_numpy(given["scores"])[None])[0]
    assert reference_rows(rows(found)) == reference_rows(given[f"my_multiclass_nms_{name}"])
