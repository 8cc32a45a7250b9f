"""ATSS and task-aligned assignment: reference values, brute force by the definition, chunks, odd inputs."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.data.structures import Targets
from mmdet.families.ppyoloe import assigner
from mmdet.families.ppyoloe.assigner import assign_atss, assign_task_aligned
from mmdet.families.ppyoloe.head import Predictions
from mmdet.models.assign import finite_predictions, inside_ignored
from mmdet.models.boxes import iou_pairwise
from mmdet.models.points import make_points

GRID = make_points([(3, 4), (6, 8), (12, 16)], (32, 16, 8))  # 96 x 128 px, A = 252
CLASSES = 6


def case(counts, seed=0, size=(96, 128)):
    """Targets with ``counts`` boxes per image, predicted boxes and scores."""
    generator, num_points = torch.Generator().manual_seed(seed), len(GRID.points)
    scale = torch.tensor([size[1], size[0]])
    boxes = []
    for n in counts:
        corner = torch.rand(n, 2, generator=generator) * scale * 0.8
        boxes.append(torch.cat([corner, corner + 4 + torch.rand(n, 2, generator=generator) * 60], 1))
    labels = [torch.randint(CLASSES, (n,), generator=generator) for n in counts]
    corner = torch.rand(len(counts), num_points, 2, generator=generator) * scale * 0.7
    pred_boxes = torch.cat([corner, corner + 5 + torch.rand(len(counts), num_points, 2, generator=generator) * 60], -1)
    return Targets.from_lists(boxes, labels), pred_boxes, torch.rand(len(counts), num_points, CLASSES, generator=generator)


def atss(targets, pred_boxes, _, **options):
    return assign_atss(pred_boxes, targets, *GRID, **options)


def task_aligned(targets, pred_boxes, pred_scores, **options):
    return assign_task_aligned(pred_boxes, pred_scores, targets, GRID.points, **options)


BOTH = pytest.mark.parametrize("assign", [atss, task_aligned])


def strictly_inside(point, box):
    return box[0] < point[0] < box[2] and box[1] < point[1] < box[3]


def settle(wanted, overlaps):
    """Point -> box, by the definition."""
    owner = {}
    for point in range(overlaps.shape[1]):
        claims = [m for m in range(len(overlaps)) if point in wanted[m]]
        if len(claims) == 1:
            owner[point] = claims[0]
        elif claims:
            owner[point] = int(overlaps[:, point].argmax())
    return owner


def atss_by_definition(boxes, pred_boxes):
    half = GRID.strides * 2.5
    overlaps = iou_pairwise(boxes, torch.cat([GRID.points - half, GRID.points + half], 1))
    wanted = []
    for m, box in enumerate(boxes):
        centre = (box[:2] + box[2:]) / 2
        candidates, start = [], 0
        for size in GRID.level_sizes:
            distance = (GRID.points[start : start + size] - centre).norm(dim=1)
            candidates += (distance.topk(min(9, size), largest=False).indices + start).tolist()
            start += size
        values = overlaps[m, candidates]
        threshold = values.mean() + values.std()
        wanted.append({a for a in candidates if overlaps[m, a] > threshold and strictly_inside(GRID.points[a], box)})
    owner = settle(wanted, overlaps)
    return owner, {a: iou_pairwise(boxes[m][None], pred_boxes[a][None]).item() for a, m in owner.items()}


def task_aligned_by_definition(boxes, labels, pred_boxes, pred_scores):
    overlaps = iou_pairwise(boxes, pred_boxes)
    metric = pred_scores.T[labels] * overlaps**6
    wanted = []
    for m, box in enumerate(boxes):
        inside = [a for a in range(len(GRID.points)) if strictly_inside(GRID.points[a], box) and metric[m, a] > 0]
        wanted.append(set(sorted(inside, key=lambda a: -metric[m, a])[:13]))
    owner = settle(wanted, overlaps)
    scores = {}
    for a, m in owner.items():
        own = [b for b in owner if owner[b] == m]
        scores[a] = (metric[m, a] / (metric[m, own].max() + 1e-9) * overlaps[m, own].max()).item()
    return owner, scores


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(assign, seed):
    targets, pred_boxes, pred_scores = case([7, 0, 25, 1], seed)
    found = assign(targets, pred_boxes, pred_scores)
    for i in range(4):
        boxes, labels = targets.boxes[i][targets.valid[i]], targets.labels[i][targets.valid[i]]
        if assign is atss:
            owner, scores = atss_by_definition(boxes, pred_boxes[i])
        else:
            owner, scores = task_aligned_by_definition(boxes, labels, pred_boxes[i], pred_scores[i])
        positive = found.positive[i].nonzero().flatten().tolist()
        assert positive == sorted(owner)
        assert found.box_index[i, positive].tolist() == [owner[a] for a in positive]
        torch.testing.assert_close(found.scores[i, positive], torch.tensor([scores[a] for a in positive]), rtol=1e-4, atol=1e-6)
        assert not found.scores[i][~found.positive[i]].any()


@needs_shared
def test_reference_values():
    given = np.load(SHARED / "golden/pure/assign.miemie.npz")
    paddle = np.load(SHARED / "golden/pure/assign.paddledet.npz")
    tensors = {name: torch.from_numpy(given[name]) for name in given}
    targets = Targets(
        tensors["gt_bbox"],
        tensors["gt_class"].squeeze(2),
        tensors["pad_gt_mask"].squeeze(2).bool(),
        torch.ones(2, 8),
        torch.zeros(2, 0, 4),
    )
    sizes = tuple(given["num_anchors_list"].tolist())
    grid = tensors["anchor_points"], tensors["stride_tensor"], sizes
    results = {
        "atss": assign_atss(tensors["pred_bboxes"], targets, *grid),
        "tal": assign_task_aligned(tensors["pred_bboxes"], tensors["pred_scores"], targets, tensors["anchor_points"]),
    }
    for name, found in results.items():
        index = found.positive.nonzero()
        box = found.box_index[found.positive]
        for reference in (given, paddle):
            np.testing.assert_array_equal(index, reference[f"{name}_pos_index"])
            np.testing.assert_array_equal(targets.boxes[index[:, 0], box], reference[f"{name}_pos_bbox"])
            np.testing.assert_allclose(found.scores[found.positive], reference[f"{name}_pos_score"], rtol=1e-4, atol=1e-6)
            labels = reference[f"{name}_labels"][found.positive.numpy()]
            np.testing.assert_array_equal(targets.labels[index[:, 0], box], labels)


@BOTH
def test_chunks_change_nothing(assign, monkeypatch):
    inputs = case([5, 0, 40, 3, 17])
    whole = assign(*inputs)
    sizes = []
    original = assigner._chunks
    monkeypatch.setattr(assigner, "_chunks", lambda *args: sizes.append(original(*args)) or sizes[-1])
    for images in (1, 2, 3):
        budget = images * 40 * len(GRID.points) * assigner.PAIR_BYTES
        for a, b in zip(whole, assign(*inputs, assign_bytes=budget), strict=True):
            assert torch.equal(a, b)
        assert len(sizes[-1]) == -(-5 // images)
    assert len(original(5, 10**9, 1)) == 5


@BOTH
def test_images_do_not_influence_each_other_and_box_order_does_not_matter(assign):
    targets, pred_boxes, pred_scores = case([9, 30])
    found = assign(targets, pred_boxes, pred_scores)
    alone = assign(targets[:1].map(lambda t: t[:, :9]), pred_boxes[:1], pred_scores[:1])
    assert torch.equal(alone.positive, found.positive[:1])
    assert torch.equal(alone.scores, found.scores[:1])
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    shuffled = assign(targets.map(lambda t: t[:, order] if t.shape[1] == 30 else t), pred_boxes, pred_scores)
    assert torch.equal(shuffled.positive, found.positive)
    assert torch.equal(shuffled.scores, found.scores)
    assert torch.equal(order[shuffled.box_index][found.positive], found.box_index[found.positive])


@BOTH
@pytest.mark.parametrize("counts", [[0, 0], [0]])
def test_no_boxes_at_all(assign, counts):
    found = assign(*case(counts))
    assert found.positive.shape == (len(counts), len(GRID.points))
    assert not found.positive.any()
    assert not found.scores.any()


@BOTH
def test_boxes_without_area_and_padding_get_no_point(assign):
    targets, pred_boxes, pred_scores = case([3])
    targets.boxes[0, 1] = torch.tensor([40.0, 40, 40, 90])
    targets.boxes[0, 2] = targets.boxes[0, 0]
    targets.valid[0, 2] = False
    found = assign(targets, pred_boxes, pred_scores)
    assert set(found.box_index[found.positive].tolist()) <= {0}
    assert found.scores.isfinite().all()


@BOTH
def test_types(assign):
    targets, pred_boxes, pred_scores = case([4, 2])
    double = assign(targets, pred_boxes.double(), pred_scores.double())
    assert double.scores.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        single = assign(targets, pred_boxes, pred_scores)
    assert single.scores.dtype == torch.float32
    assert torch.equal(single.positive, double.positive)
    assert not assign(targets, pred_boxes.requires_grad_(True), pred_scores).scores.requires_grad


@pytest.mark.parametrize("sizes", [[(1, 1)], [(1, 1), (2, 2)]])
def test_levels_with_fewer_points_than_candidates(sizes):
    grid = make_points(sizes, (32, 16)[: len(sizes)])
    targets = Targets.from_lists([[[4.0, 4, 30, 30]]], [[1]])
    pred_boxes = torch.tensor([4.0, 4, 30, 30]).expand(1, len(grid.points), 4)
    found = assign_atss(pred_boxes, targets, *grid)
    assert found.scores.isfinite().all()
    scores = torch.full((1, len(grid.points), 3), 0.5)
    assert assign_task_aligned(pred_boxes, scores, targets, grid.points).positive.any()


def test_crowd_regions():
    ignore = torch.tensor([[[0.0, 0, 40, 40], [60, 60, 128, 96]], [[0, 0, 0, 0], [0, 0, 0, 0]]])
    found = inside_ignored(GRID.points, ignore)
    for a, point in enumerate(GRID.points):
        assert found[0, a] == any(strictly_inside(point, box) for box in ignore[0])
    assert not found[1].any()
    assert torch.equal(inside_ignored(GRID.points, ignore, assign_bytes=1), found)
    assert not inside_ignored(GRID.points, torch.zeros(2, 0, 4)).any()


def test_a_prediction_that_is_not_finite_is_named_and_replaced():
    good, bad = torch.full((3, 5), 70.0), torch.zeros(3, 5, 2)
    grid = make_points([(1, 5)], [8])
    given = Predictions(good, bad, *grid)
    assert finite_predictions(given, ("class_logits", "box_logits")) == (given, "")
    bad[1, 2, 0] = float("nan")
    replaced, fault = finite_predictions(given, ("class_logits", "box_logits"))
    assert fault == "the predicted box_logits (3, 5, 2) hold 1 values that are NaN or infinite, in images [1] of the batch"
    assert replaced.box_logits.isfinite().all() and replaced.class_logits.max() == 10
    assert replaced.points is grid.points  # what no network computed stays
