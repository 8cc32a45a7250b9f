"""FCOS's criterion: formulas by hand, images without boxes, crowd regions, mix-up weights, and what it refuses."""

import math

import pytest
import torch
from spoilt import assert_spoilt
from torch import nn
from torchvision.ops import generalized_box_iou_loss

from mmdet.data.structures import Batch, Targets
from mmdet.families.fcos.head import FCOSHead, Predictions
from mmdet.families.fcos.loss import FCOSCriterion, box_loss, overlaps_of_distances
from mmdet.models.points import make_points

STRIDES, SIZE, CLASSES = (8, 16, 32), 64, 3


def predictions_of(batch=2, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    grid = make_points([(SIZE // s, SIZE // s) for s in STRIDES], STRIDES)
    count = len(grid.points)
    logits = torch.randn(batch, count, CLASSES, dtype=dtype, requires_grad=True)
    distances = (torch.rand(batch, count, 4) * 3).requires_grad_()
    quality = torch.randn(batch, count, dtype=dtype, requires_grad=True)
    return Predictions(logits, distances, quality, *grid)


def criterion(**given):
    return FCOSCriterion(CLASSES, level_bounds=(24, 48), **given)


def batch_of(boxes, labels, **given):
    return Batch(torch.zeros(len(boxes), 3, SIZE, SIZE), Targets.from_lists(boxes, labels, **given))


BOXES, LABELS = [[[5, 5, 40, 30], [20, 25, 60, 62]], [[2, 8, 22, 50]]], [[0, 2], [1]]


def test_box_losses_against_hand_computed_values():
    """Two boxes of 2 x 2 and 4 x 2 around one point: intersection 4, union 8, enclosing box 8."""
    a, b = torch.tensor([[1.0, 1, 1, 1]]), torch.tensor([[1.0, 1, 3, 1]])
    assert [v.item() for v in overlaps_of_distances(a, b)] == [4, 8, 8]
    iou = 5 / 9
    assert box_loss(a, b, "linear_iou").item() == pytest.approx(1 - iou)
    assert box_loss(a, b, "iou").item() == pytest.approx(-math.log(iou))
    assert box_loss(a, b, "giou").item() == pytest.approx(1 - iou, abs=1e-6)
    corner = torch.tensor([[3.0, 3, 1, 1]]), torch.tensor([[1.0, 1, 3, 3]])  # 4 x 4 each, 2 x 2 in common, 6 x 6 around
    assert box_loss(*corner, "giou").item() == pytest.approx(1 - 5 / 29 + (36 - 28) / 36, abs=1e-6)


def test_the_smoothing_is_all_that_parts_it_from_plain_giou():
    """Boxes of a thousand strides: the 1 does not show any more."""
    torch.manual_seed(0)
    a, b = torch.rand(2, 50, 4).mul(1000).add(500).unbind(0)
    corners = [torch.cat([-d[:, :2], d[:, 2:]], 1) for d in (a, b)]
    torch.testing.assert_close(box_loss(a, b, "giou"), generalized_box_iou_loss(*corners), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("quality", ["centerness", "iou"])
@pytest.mark.parametrize("kind", ["giou", "iou", "linear_iou"])
def test_a_perfect_prediction_has_no_box_loss(kind, quality):
    predictions, batch = predictions_of(), batch_of(BOXES, LABELS)
    judge = criterion(box_kind=kind, quality=quality)
    assigned = judge.assign(predictions, batch)
    image, point = assigned.positive.nonzero(as_tuple=True)
    boxes = batch.targets.boxes[image, assigned.box_index[image, point]]
    distances = torch.zeros_like(predictions.distances)
    here, stride = predictions.points[point], predictions.strides[point]
    distances[image, point] = torch.cat([here - boxes[:, :2], boxes[:, 2:] - here], 1) / stride
    out = judge(predictions._replace(distances=distances), batch)
    assert len(point) > 5 and out.losses["loss_box"].item() == pytest.approx(0, abs=1e-6)
    if quality == "iou":  # the branch should say 1 then
        logits = torch.full_like(predictions.centerness_logits, 30.0)
        out = judge(predictions._replace(distances=distances, centerness_logits=logits), batch)
        assert out.losses["loss_ctn"].item() == pytest.approx(0, abs=1e-5)


def test_quality_of_the_iou_kind_is_the_overlap_of_the_prediction():
    """One point, a prediction of 2 x 2 in a box of 4 x 2 strides: the target is 1/2 and the box loss has weight 1."""
    grid = make_points([(1, 1)], (8,))
    logits, quality = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    predictions = Predictions(logits, torch.tensor([[[1.0, 1, 1, 1]]]), quality, *grid)
    batch = batch_of([[[-4, -4, 28, 12]]], [[0]])
    judge = FCOSCriterion(1, level_bounds=(), radius=0, quality="iou", box_kind="linear_iou")
    out = judge(predictions, batch)
    assert out.losses["loss_box"].item() == pytest.approx(1 - 5 / 9)
    assert out.losses["loss_ctn"].item() == pytest.approx(math.log(2))
    weighted = FCOSCriterion(1, level_bounds=(), radius=0, box_kind="linear_iou")(predictions, batch)
    root = (8 / 24) ** 0.5  # centre-ness; the normaliser is at least 1
    assert weighted.losses["loss_box"].item() == pytest.approx((1 - 5 / 9) * root)


def test_class_loss_is_the_focal_loss_over_all_points():
    predictions, batch = predictions_of(), batch_of(BOXES, LABELS)
    judge = criterion()
    assigned = judge.assign(predictions, batch)
    total = 0.0
    for image in range(2):
        for point in range(len(predictions.points)):
            for c in range(CLASSES):
                p = predictions.class_logits[image, point, c].sigmoid().item()
                label = int(batch.targets.labels[image, assigned.box_index[image, point]])
                if assigned.positive[image, point] and label == c:
                    total += 0.25 * (1 - p) ** 2 * -math.log(p)
                else:
                    total += 0.75 * p**2 * -math.log(1 - p)
    out = judge(predictions, batch)
    assert out.losses["loss_cls"].item() == pytest.approx(total / int(assigned.positive.sum()), rel=1e-5)
    assert out.stats["num_pos"].item() == assigned.positive.sum().item() / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quality", ["centerness", "iou"])
def test_images_without_boxes(dtype, quality):
    """Case N04: none at all, then in one of two; the class loss stays above zero, every prediction has a finite gradient."""
    for boxes, labels in (([[], []], [[], []]), ([[], BOXES[1]], [[], LABELS[1]])):
        predictions = predictions_of(dtype=dtype)
        out = criterion(quality=quality)(predictions, batch_of(boxes, labels))
        out.total.backward()
        assert all(v.dtype == torch.float32 and torch.isfinite(v) for v in out.losses.values()) and out.losses["loss_cls"] > 0
        if not any(boxes):
            assert out.losses["loss_box"] == out.losses["loss_ctn"] == 0
        for name in ("class_logits", "distances", "centerness_logits"):
            assert torch.isfinite(getattr(predictions, name).grad).all(), name


def test_an_image_without_boxes_adds_only_background():
    """Its points change the class loss; positives and normaliser are those of the other image."""
    both = criterion()(predictions_of(), batch_of([BOXES[0], []], [LABELS[0], []]))
    predictions = predictions_of()
    rows = Predictions(*(t[:1] for t in predictions[:3]), *predictions[3:])
    alone = criterion()(rows, batch_of(BOXES[:1], LABELS[:1]))
    for name in ("loss_box", "loss_ctn"):
        torch.testing.assert_close(both.losses[name], alone.losses[name])
    assert both.losses["loss_cls"] > alone.losses["loss_cls"]


def test_points_in_a_crowd_carry_no_class_loss():
    """Case E05: no positive there and no negative either; a positive inside keeps its loss, the normaliser stays."""
    judge, crowd = criterion(), [[30, 0, 64, 64]]
    boxes, labels = [[[2, 2, 26, 60]]], [[1]]
    predictions = predictions_of(1)
    plain = judge(predictions, batch_of(boxes, labels))
    out = judge(predictions, batch_of(boxes, labels, ignore=[crowd]))
    assert torch.equal(out.stats["num_pos"], plain.stats["num_pos"])
    for name in ("loss_box", "loss_ctn"):
        torch.testing.assert_close(out.losses[name], plain.losses[name])
    out.losses["loss_cls"].backward()
    inside = predictions.points[:, 0] > 30
    gradient = predictions.class_logits.grad.abs().sum(2)[0]
    assert (gradient[inside] == 0).all() and (gradient[~inside] > 0).all()

    over_the_box = predictions_of(1)
    judge(over_the_box, batch_of(boxes, labels, ignore=[[[0, 0, 64, 64]]])).losses["loss_cls"].backward()
    positive = judge.assign(over_the_box, batch_of(boxes, labels)).positive[0]
    gradient = over_the_box.class_logits.grad.abs().sum(2)[0]
    assert ((gradient > 0) == positive).all()


def test_mixup_weights_multiply_the_losses_of_positives():
    predictions = predictions_of(1)
    boxes, labels = BOXES[:1], LABELS[:1]
    full = criterion()(predictions, batch_of(boxes, labels)).losses
    half = criterion()(predictions, batch_of(boxes, labels, weights=[[0.5, 0.5]])).losses
    for name in ("loss_box", "loss_ctn"):
        torch.testing.assert_close(half[name], full[name] / 2)
    assert half["loss_cls"] < full["loss_cls"]


def test_six_hundred_boxes_in_one_image():
    torch.manual_seed(0)
    corner = torch.rand(600, 2) * 40
    boxes = torch.cat([corner, corner + torch.rand(600, 2) * 22 + 2], 1)
    predictions = predictions_of(2)
    labels = torch.randint(0, CLASSES, (600,))
    whole = criterion()(predictions, batch_of([boxes, []], [labels, []]))
    parts = criterion(assign_bytes=10_000)(predictions, batch_of([boxes, []], [labels, []]))
    assert torch.equal(whole.total, parts.total) and torch.isfinite(whole.total)
    whole.total.backward()
    assert torch.isfinite(predictions.distances.grad).all() and predictions.distances.grad.any()


def test_labels_outside_the_classes_are_named():
    with pytest.raises(ValueError, match=r"labels \[3\] in the batch, but the model has 3 classes"):
        criterion()(predictions_of(1), batch_of([[[5, 5, 40, 30]]], [[3]]))


@pytest.mark.parametrize("name", ["class_logits", "distances", "centerness_logits"])
def test_predictions_that_are_not_finite_are_named_and_the_losses_are_nan(name):
    predictions = predictions_of()
    with torch.no_grad():
        getattr(predictions, name)[1, 3] = float("nan")
    out = criterion()(predictions, batch_of(BOXES, LABELS))
    assert_spoilt(out, rf"predicted {name} .* in images \[1\]", predictions[:3])


@pytest.mark.parametrize(("option", "value"), [("box_kind", "diou"), ("quality", "both")])
def test_unknown_kinds_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} must be one of .*got '{value}'"):
        criterion(**{option: value})


# -- the head ---------------------------------------------------------------------------------------------------------------


def test_decoding_by_hand():
    head = FCOSHead(32, 2, (8,))
    grid = make_points([(1, 2)], (8,))
    predictions = Predictions(
        torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]]]),
        torch.tensor([[[0.0, 0.5, 1, 2], [1, 1, 1, 1]]]),
        torch.zeros(1, 2),
        *grid,
    )
    boxes, scores = head.decode(predictions)
    torch.testing.assert_close(boxes, torch.tensor([[[4.0, 0, 12, 20], [4, -4, 20, 12]]]))
    torch.testing.assert_close(scores, torch.tensor([[[0.25, 0.375], [0.25, 0.25]]]))


@pytest.mark.parametrize("deform", [False, True])
def test_a_fresh_head_says_every_class_at_one_percent(deform):
    head = FCOSHead(64, 3, STRIDES, deform)
    out = head([torch.randn(2, 64, SIZE // s, SIZE // s) for s in STRIDES])
    assert out.level_sizes == (64, 16, 4) and out.class_logits.shape == (2, 84, 3) and out.distances.min() >= 0
    assert out.class_logits.sigmoid().mean().item() == pytest.approx(0.01, rel=0.2)
    assert [m.num_groups for m in head.modules() if isinstance(m, nn.GroupNorm)] == [32] * 8


def test_each_level_has_its_own_scale():
    head = FCOSHead(32, 1, STRIDES)
    with torch.no_grad():
        head.reg_pred.bias.fill_(1.0)
        for scale, value in zip(head.scales, (1.0, 2.0, 3.0)):
            scale.fill_(value)
        head.reg_pred.weight.zero_()
        out = head([torch.randn(1, 32, SIZE // s, SIZE // s) for s in STRIDES])
    parts = out.distances.split(list(out.level_sizes), 1)
    assert [part.unique().tolist() for part in parts] == [[1.0], [2.0], [3.0]]
