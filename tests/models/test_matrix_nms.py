"""Matrix NMS against a loop over pairs and the reference values."""

import math

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.models import matrix_nms
from mmdet.models.boxes import iou_pairwise
from mmdet.models.matrix_nms import MatrixNMS


def random_case(points=60, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(2, points, 2, generator=generator) * 90 - 30
    boxes = torch.cat([corner, corner + 5 + 40 * torch.rand(2, points, 2, generator=generator)], -1)
    return boxes, torch.rand(2, points, classes, generator=generator) ** 3


def brute_force(boxes, scores, nms):
    """Rows (label, decayed score, box) of one image, by the definition, in Python."""
    overlap = iou_pairwise(boxes.double(), boxes.double()).tolist()
    pairs = [(s, p, c) for p, row in enumerate(scores.tolist()) for c, s in enumerate(row) if s > nms.score_threshold]
    pairs.sort(key=lambda pair: -pair[0])
    pairs = pairs if nms.nms_top_k < 0 else pairs[: nms.nms_top_k]

    def f(value):
        return math.exp(-nms.gaussian_sigma * value**2) if nms.use_gaussian else 1 - value

    kept, greatest = [], []
    for score, point, label in pairs:
        better = [(overlap[p][point], m) for (_, p, c), m in zip(pairs, greatest, strict=False) if c == label]
        ratios = [f(o) / f(m) for o, m in better if f(m) > 0]
        kept.append((label, score * min([1.0, *ratios]), *boxes[point].tolist()))
        greatest.append(max([0.0, *(o for o, _ in better)]))
    kept = sorted((row for row in kept if row[1] > nms.post_threshold), key=lambda row: -row[1])
    return kept if nms.keep_top_k < 0 else kept[: nms.keep_top_k]


def rows(found):
    return [(k, s, *b) for k, s, b in zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist(), strict=True)]


def close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=2e-6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_gaussian": True}, {"nms_top_k": 40, "keep_top_k": -1}, {"nms_top_k": -1, "keep_top_k": 9, "post_threshold": 0.2}],
)
def test_equals_brute_force(settings):
    nms = MatrixNMS(**{"score_threshold": 0.05, **settings})
    boxes, scores = random_case()
    scores[1, :, 0] = 0
    before = boxes.clone(), scores.clone()
    for found, b, s in zip(nms(boxes, scores), boxes, scores, strict=True):
        close(rows(found), brute_force(b, s, nms))
    assert torch.equal(boxes, before[0])
    assert torch.equal(scores, before[1])


@pytest.mark.parametrize("use_gaussian", [False, True])
def test_slices_of_bounded_memory_change_nothing(monkeypatch, use_gaussian):
    nms = MatrixNMS(nms_top_k=-1, keep_top_k=-1, use_gaussian=use_gaussian)
    boxes, scores = random_case()
    whole = nms(boxes, scores)
    monkeypatch.setattr(matrix_nms, "MATRIX_BYTES", 50_000)
    for a, b in zip(whole, nms(boxes, scores), strict=True):
        assert rows(a) == rows(b)


def test_by_hand():
    """The second box has IoU 0.6 with the first, the third 0.6 with the second and 1/3 with the first."""
    boxes = torch.tensor([[[0.0, 0, 80, 10], [20, 0, 100, 10], [40, 0, 120, 10]]])
    found = MatrixNMS()(boxes, torch.tensor([[[0.9], [0.8], [0.7]]]))[0]
    assert found.scores.tolist() == pytest.approx([0.9, 0.7 * (1 - 1 / 3), 0.8 * 0.4])


def test_classes_do_not_lower_each_other():
    boxes = torch.tensor([[[0.0, 0, 100, 100], [0, 0, 100, 90]]])
    found = MatrixNMS()(boxes, torch.tensor([[[0.9, 0.0], [0.0, 0.8]]]))[0]
    assert found.scores.tolist() == pytest.approx([0.9, 0.8])


@pytest.mark.parametrize("use_gaussian", [False, True])
def test_zero_area_and_identical_boxes_spoil_nothing(use_gaussian):
    boxes, scores = random_case(40, 2)
    nms = MatrixNMS(keep_top_k=-1, nms_top_k=-1, use_gaussian=use_gaussian)
    clean = rows(nms(boxes, scores)[0])
    flat = torch.tensor([[5.0, 5, 5, 25], [5, 5, 5, 25], [7, 7, 7, 7], [30, 5, 20, 25]]).expand(2, 4, 4)
    found = nms(torch.cat([boxes, flat], 1), torch.cat([scores, torch.full((2, 4, 2), 0.5)], 1))[0]
    area = (found.boxes[:, 2] > found.boxes[:, 0]) & (found.boxes[:, 3] > found.boxes[:, 1])
    assert rows(found.map(lambda t: t[area])) == clean
    assert found.scores[~area].tolist() == [0.5] * 8
    same = nms(boxes[:, :1].expand(2, 3, 4), torch.tensor([[[0.9], [0.8], [0.7]]] * 2))[0]
    if not use_gaussian:
        assert same.scores.tolist() == pytest.approx([0.9])
    assert same.scores.isfinite().all()


@pytest.mark.parametrize("points", [0, 5])
def test_nothing_found(points):
    found = MatrixNMS()(torch.zeros(2, points, 4), torch.zeros(2, points, 3))
    assert [tuple(t.shape) for t in (found[0].boxes, found[0].scores, found[0].labels)] == [(0, 4), (0,), (0,)]
    assert found[1].labels.dtype == torch.int64


def test_values_that_are_not_finite_are_passed_on_and_spoil_nothing():
    boxes, scores = random_case(40, 2)
    nms = MatrixNMS(keep_top_k=-1)
    clean = rows(nms(boxes, scores)[0])
    bad = torch.tensor([[math.nan] * 4, [math.inf] * 4, [0.0, 0, 100, 100]]).expand(2, 3, 4)
    bad_scores = torch.tensor([[0.001, 0.5], [0.0, 0.4], [math.nan, 0.0]]).expand(2, 3, 2)
    found = nms(torch.cat([boxes, bad], 1), torch.cat([scores, bad_scores], 1))[0]
    finite = found.boxes.isfinite().all(1) & found.scores.isfinite()
    assert rows(found.map(lambda t: t[finite])) == clean
    assert (~finite).sum() == 3


def test_half_precision_goes_in_and_float32_comes_out():
    boxes, scores = random_case()
    found = MatrixNMS()(boxes.bfloat16(), scores.bfloat16())[0]
    assert found.boxes.dtype == found.scores.dtype == torch.float32


def reference_rows(array):
    return sorted((int(r[0]), round(float(r[1]), 5), *(round(float(v), 3) for v in r[2:])) for r in array)


@needs_shared
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("linear_topk500", {}),
        ("linear_topk-1", {"nms_top_k": -1}),
        (
            "gauss",
            {"score_threshold": 0.05, "post_threshold": 0.05, "nms_top_k": 300, "keep_top_k": 50, "use_gaussian": True},
        ),
    ],
)
def test_reference(name, settings):
    given = np.load(SHARED / "golden/pure/nms.miemie.npz")
    found = MatrixNMS(**settings)(torch.from_numpy(given["boxes"])[None], torch.from_numpy(given["scores"])[None])[0]
    close(rows(found), [tuple(row) for row in given[f"matrix_nms_{name}"].tolist()])
    other = np.load(SHARED / "golden/pure/nms.paddledet.npz")[f"MatrixNMS_{name}_normalized1"]
    assert reference_rows(rows(found)) == reference_rows(other)


@needs_shared
def test_reference_survives_two_zero_area_boxes():
    """One reference turns the whole image into one row of -1 here."""
    given = np.load(SHARED / "golden/pure/nms.miemie.npz")
    boxes = torch.from_numpy(given["boxes"]).clone()
    scores = torch.from_numpy(given["scores"])
    boxes[[3, 9], 2:] = boxes[[3, 9], :2]
    nms = MatrixNMS(keep_top_k=-1)
    found = nms(boxes[None], scores[None])[0]
    area = (found.boxes[:, 2:] > found.boxes[:, :2]).all(1)
    keep = torch.ones(len(boxes), dtype=torch.bool)
    keep[[3, 9]] = False
    others = nms(boxes[keep][None], scores[keep][None])[0]
    assert (~area).sum() > 0
    assert len(others) >= 100
    assert set(rows(found.map(lambda t: t[area]))) <= {*rows(others)}
