"""SimOTA: reference values, brute force by the definition, chunks, odd inputs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from shared import SHARED, needs_shared
from yolox_reference import xyxy

from mmdet.data.structures import Targets
from mmdet.families.yolox import assigner
from mmdet.families.yolox.assigner import assign_simota, find_candidates, pair_cost
from mmdet.models.boxes import iou_pairwise
from mmdet.models.points import make_points

SHAPES = ((12, 16), (6, 8), (3, 4))  # 96 x 128 px
GRID = make_points(SHAPES, (8, 16, 32))
CLASSES = 6


def case(counts, seed=0):
    """Predicted boxes, class logits, objectness logits, and targets with ``counts`` boxes per image."""
    generator, num_points = torch.Generator().manual_seed(seed), len(GRID.points)

    def boxes(*shape):
        corner = torch.rand(*shape, 2, generator=generator) * torch.tensor([128.0, 96]) * 0.85
        return torch.cat([corner, corner + 4 + torch.rand(*shape, 2, generator=generator) * 50], -1)

    truth = [boxes(n) for n in counts]
    labels = [torch.randint(CLASSES, (n,), generator=generator) for n in counts]
    near = boxes(len(counts), num_points)
    # Half of the predictions are boxes around their own point, so that overlaps are large where they should be.
    around = torch.cat([GRID.points - 1.2 * GRID.strides, GRID.points + 1.2 * GRID.strides], 1)
    near[:, ::2] = around[::2] + torch.randn(len(counts), len(around[::2]), 4, generator=generator)
    logits = torch.randn(len(counts), num_points, CLASSES, generator=generator)
    return near, logits, torch.randn(len(counts), num_points, generator=generator), Targets.from_lists(truth, labels)


def assign(pred_boxes, class_logits, obj_logits, targets, **options):
    return assign_simota(pred_boxes, class_logits, obj_logits, targets, GRID.strides, SHAPES, **options)


def by_definition(pred_boxes, class_logits, obj_logits, boxes, labels):
    """Point -> (box, IoU) of one image."""
    centers, reach = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2, 1.5 * GRID.strides
    near = (((GRID.points - centers).abs() < reach).all(-1)) & ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1, keepdim=True)
    candidates = near.any(0).nonzero().flatten()
    if not len(candidates):
        return {}
    overlaps = iou_pairwise(boxes, pred_boxes[candidates])
    score = (class_logits[candidates].sigmoid() * obj_logits[candidates, None].sigmoid()).sqrt()
    cost = torch.stack(
        [F.binary_cross_entropy(score, F.one_hot(c, CLASSES).float().expand_as(score), reduction="none").sum(1) for c in labels]
    )
    cost = cost - 3 * (overlaps + 1e-8).log() + 1e6 * ~near[:, candidates]
    wanted = torch.zeros_like(cost, dtype=torch.bool)
    for m in range(len(boxes)):
        top = min(10, len(candidates))
        count = max(int(overlaps[m].topk(top).values.sum()), 1)
        wanted[m, cost[m].topk(count, largest=False).indices] = True
    owner = {}
    for k, point in enumerate(candidates.tolist()):
        claims = wanted[:, k].nonzero().flatten().tolist()
        if claims:
            box = claims[0] if len(claims) == 1 else int(cost[:, k].argmin())
            owner[point] = box, overlaps[box, k].item()
    return owner


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_definition(seed):
    inputs = case([7, 0, 25, 1], seed)
    found, targets = assign(*inputs), inputs[-1]
    shared = 0
    for i in range(4):
        valid = targets.valid[i]
        truth = targets.boxes[i][valid], targets.labels[i][valid]
        owner = by_definition(*(t[i] for t in inputs[:3]), *truth) if valid.any() else {}
        positive = found.positive[i].nonzero().flatten().tolist()
        assert positive == sorted(owner)
        assert found.box_index[i, positive].tolist() == [owner[a][0] for a in positive]
        expected = torch.tensor([owner[a][1] for a in positive])
        torch.testing.assert_close(found.scores[i, positive], expected, rtol=1e-5, atol=1e-6)
        assert not found.scores[i][~found.positive[i]].any()
        shared += len(positive) > valid.sum()
    assert shared >= 1


@needs_shared
def test_reference_values():
    given = {name: torch.from_numpy(value) for name, value in np.load(SHARED / "golden/pure/simota.yolox.npz").items()}
    boxes = [xyxy(given[f"gt_cxcywh_img{i}"]) for i in range(2)]
    targets = Targets.from_lists(boxes, [given[f"gt_class_img{i}"].long() for i in range(2)])
    shapes, strides = ((20, 20), (10, 10), (5, 5)), given["expanded_strides"].reshape(-1, 1)
    predictions = xyxy(given["bbox_preds"]), given["cls_preds"], given["obj_preds"].squeeze(2)
    found = assign_simota(*predictions, targets, strides, shapes)
    candidates = find_candidates(targets.boxes, targets.valid, strides, shapes)
    for i in range(2):
        positive = found.positive[i].nonzero().flatten()
        assert torch.equal(positive, given[f"fg_index_img{i}"].long())
        assert torch.equal(found.box_index[i, positive], given[f"matched_gt_img{i}"].long())
        torch.testing.assert_close(found.scores[i, positive], given[f"pred_iou_img{i}"], rtol=0, atol=1e-5)
        at = candidates.points[i][candidates.points[i] < 525]
        assert len(at) == given[f"cost_img{i}"].shape[1]
        overlaps = iou_pairwise(boxes[i][None], predictions[0][i : i + 1, at])
        torch.testing.assert_close(overlaps[0], given[f"pair_iou_img{i}"], rtol=0, atol=1e-5)
        near = candidates.near_point[i : i + 1, targets.valid[i]].clamp(max=len(at))
        logits = predictions[1][i : i + 1, at], predictions[2][i : i + 1, at]
        cost = pair_cost(overlaps, near, *logits, targets.labels[i : i + 1, targets.valid[i]])
        torch.testing.assert_close(cost[0], given[f"cost_img{i}"], rtol=1e-5, atol=1e-4)


def test_chunks_change_nothing(monkeypatch):
    inputs = case([5, 0, 40, 3, 17])
    whole, sizes = assign(*inputs), []
    original = assigner.image_chunks
    monkeypatch.setattr(assigner, "image_chunks", lambda *args: sizes.append(original(*args)) or sizes[-1])
    num = find_candidates(inputs[3].boxes, inputs[3].valid, GRID.strides, SHAPES).num
    for images in (1, 2, 3):
        budget = images * num * (40 * assigner.PAIR_BYTES + CLASSES * assigner.CLASS_BYTES)
        for a, b in zip(whole, assign(*inputs, assign_bytes=budget), strict=True):
            assert torch.equal(a, b)
        assert len(sizes[-1]) == -(-5 // images)
    for a, b in zip(whole, assign(*inputs, assign_bytes=1), strict=True):
        assert torch.equal(a, b)


def test_images_do_not_influence_each_other_and_box_order_does_not_matter():
    *predictions, targets = case([9, 30])
    found = assign(*predictions, targets)
    alone = assign(*(t[:1] for t in predictions), targets[:1].map(lambda t: t[:, :9]))
    assert torch.equal(alone.positive, found.positive[:1])
    assert torch.equal(alone.scores, found.scores[:1])
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    shuffled = assign(*predictions, targets.map(lambda t: t[:, order] if t.shape[1] == 30 else t))
    assert torch.equal(shuffled.positive, found.positive)
    assert torch.equal(shuffled.scores, found.scores)
    assert torch.equal(order[shuffled.box_index][found.positive], found.box_index[found.positive])


@pytest.mark.parametrize("counts", [[0, 0], [0]])
def test_no_boxes_at_all(counts):
    found = assign(*case(counts))
    assert found.positive.shape == found.box_index.shape == found.scores.shape == (len(counts), len(GRID.points))
    assert not found.positive.any() and not found.scores.any()


def test_boxes_without_area_padding_and_boxes_outside_get_no_point():
    *predictions, targets = case([4])
    targets.boxes[0, 1] = torch.tensor([40.0, 40, 40, 90])
    targets.boxes[0, 2] = targets.boxes[0, 0]
    targets.valid[0, 2] = False
    targets.boxes[0, 3] = torch.tensor([400.0, 400, 440, 440])
    found = assign(*predictions, targets)
    owners = set(found.box_index[found.positive].tolist())
    assert 0 in owners and not owners & {1, 2} and found.scores.isfinite().all()
    far = targets.map(lambda t: t[:, 3:])
    assert not assign(*predictions, far).positive.any()


def test_every_box_near_the_image_gets_a_point_where_no_other_is():
    """The corner cells: fewer candidates than a box may take."""
    *predictions, _ = case([1])
    for corner in ((0, 0), (124, 0), (0, 92), (124, 92)):
        targets = Targets.from_lists([[[*corner, corner[0] + 4, corner[1] + 4]]], [[2]])
        found = assign(*predictions, targets)
        assert 1 <= found.positive.sum() <= 10


def test_types():
    *predictions, targets = case([4, 2])
    double = assign(*(t.double() for t in predictions), targets)
    assert double.scores.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        single = assign(*predictions, targets)
        half = assign(predictions[0], predictions[1].bfloat16(), predictions[2].bfloat16(), targets)
    assert single.scores.dtype == half.scores.dtype == torch.float32
    assert torch.equal(single.positive, double.positive) and half.positive.any()
    wanting = [t.requires_grad_(True) for t in predictions]
    assert not assign(*wanting, targets).scores.requires_grad
