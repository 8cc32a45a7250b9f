"""The criterion: late L1, ignore regions, mix-up weights, empty images, values that are not finite; and the box codes."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared
from spoilt import assert_spoilt
from yolox_reference import xyxy

from mmdet.data.structures import Batch, Targets
from mmdet.families.yolox.head import DecoupledHead, Predictions, decode_boxes, encode_boxes
from mmdet.families.yolox.loss import YOLOXCriterion
from mmdet.models.losses import squared_iou_loss
from mmdet.models.points import make_points

SHAPES = ((8, 8), (4, 4), (2, 2))
GRID = make_points(SHAPES, (8, 16, 32))  # 64 x 64 px, A = 84
TERMS = {"loss_iou", "loss_obj", "loss_cls", "loss_l1"}


def predictions(batch=2, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = [torch.randn(batch, 84, *n, generator=generator).requires_grad_() for n in ((classes,), (), (4,))]
    return Predictions(*make, GRID.points, GRID.strides, SHAPES)


def batch_of(boxes, labels, epoch=0, **options):
    return Batch(torch.zeros(len(boxes), 3, 64, 64), Targets.from_lists(boxes, labels, **options), epoch=epoch)


ONE = [[[10.0, 12, 40, 50]], []], [[1], []]
criterion = YOLOXCriterion(3, l1_from_epoch=5)


def test_l1_comes_with_its_epoch():
    pred = predictions()
    early, late = (criterion(pred, batch_of(*ONE, epoch=epoch)) for epoch in (4, 5))
    assert set(early.losses) == TERMS - {"loss_l1"}  # a term that is 0 for hundreds of epochs would be reported as a fault
    assert set(late.losses) == TERMS and late.losses["loss_l1"] > 0
    for name in TERMS - {"loss_l1"}:
        assert torch.equal(early.losses[name], late.losses[name])


def test_by_hand():
    """One positive point; every term by its formula."""
    pred, batch = predictions(), batch_of(*ONE, epoch=9)
    assigned = criterion.assign(pred, batch)
    ((image, point),) = assigned.positive.nonzero().tolist()
    out = criterion(pred, batch)
    target, stride, grid = torch.tensor([10.0, 12, 40, 50]), GRID.strides[point], GRID.points[point] / GRID.strides[point] - 0.5
    code = pred.box_codes[image, point]
    center, side = (code[:2] + grid) * stride, code[2:].exp() * stride
    box = torch.cat([center - side / 2, center + side / 2])
    corner = torch.minimum(box[2:], target[2:]) - torch.maximum(box[:2], target[:2])
    common = corner.clamp(min=0).prod()
    iou = common / (side.prod() + 30 * 38 - common)
    assert out.losses["loss_iou"].item() == pytest.approx(5 * (1 - iou.item() ** 2), rel=1e-5)
    quality = torch.tensor([0, iou.item(), 0])
    p = pred.class_logits[image, point].sigmoid()
    assert out.losses["loss_cls"].item() == pytest.approx(
        -(quality * p.log() + (1 - quality) * (1 - p).log()).sum().item(), rel=1e-5
    )
    o = pred.obj_logits.sigmoid()
    expected = -(1 - o).log().sum() + (1 - o[image, point]).log() - o[image, point].log()
    assert out.losses["loss_obj"].item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = torch.cat([torch.tensor([25.0, 31]) / stride - grid, (torch.tensor([30.0, 38]) / stride).log()])
    assert out.losses["loss_l1"].item() == pytest.approx((code - wanted).abs().sum().item(), rel=1e-5)
    assert out.stats["num_fg"] == 1


def test_weights_of_the_terms():
    pred, batch = predictions(), batch_of(*ONE, epoch=9)
    base = criterion(pred, batch).losses
    doubled = YOLOXCriterion(3, 5, weight_iou=10.0, weight_obj=2.0, weight_cls=2.0, weight_l1=2.0)(pred, batch).losses
    for name in TERMS:
        assert doubled[name].item() == pytest.approx(2 * base[name].item())


def test_e05_points_in_crowd_regions_carry_no_loss_unless_positive():
    pred = predictions(1)
    x, y = GRID.points.unbind(1)
    for region, box in (([0, 0, 64, 30], [20, 40, 40, 60]), ([0, 0, 64, 64], [20, 40, 40, 60])):
        batch = batch_of([[box]], [[1]], epoch=9, ignore=[[region]])
        positive = criterion.assign(pred, batch).positive[0]
        inside = (x > region[0]) & (x < region[2]) & (y > region[1]) & (y < region[3])
        assert positive.any() and (inside & ~positive).any()
        (grad,) = torch.autograd.grad(criterion(pred, batch).total, pred.obj_logits)
        assert (grad[0, inside & ~positive] == 0).all() and (grad[0, ~inside | positive] != 0).all()
        normal = criterion(pred, batch_of([[box]], [[1]], epoch=9))
        for name in TERMS - {"loss_obj"}:
            assert torch.equal(normal.losses[name], criterion(pred, batch).losses[name])


def test_mix_up_weights_scale_the_losses_of_their_positives():
    pred = predictions(1)
    lists = [[[10.0, 12, 40, 50]]], [[1]]
    full, half = (criterion(pred, batch_of(*lists, epoch=9, weights=[[w]])) for w in (1.0, 0.5))
    for name in TERMS - {"loss_obj"}:
        assert half.losses[name].item() == pytest.approx(full.losses[name].item() / 2)
    grads = [torch.autograd.grad(out.losses["loss_obj"], pred.obj_logits, retain_graph=True)[0] for out in (full, half)]
    positive = criterion.assign(pred, batch_of(*lists)).positive
    torch.testing.assert_close(grads[1][positive], grads[0][positive] / 2)
    assert torch.equal(grads[1][~positive], grads[0][~positive])


def test_images_without_boxes():
    pred = predictions()
    out = criterion(pred, batch_of([[], []], [[], []], epoch=9))
    assert all(out.losses[name] == 0 for name in TERMS - {"loss_obj"}) and out.losses["loss_obj"] > 0
    grads = torch.autograd.grad(out.total, pred[:3])
    assert all(g.isfinite().all() for g in grads) and not grads[0].any() and not grads[2].any()


@pytest.mark.parametrize(("part", "name"), [(0, "class_logits"), (1, "obj_logits"), (2, "boxes")])
def test_what_is_not_finite_is_named_and_the_losses_are_nan(part, name):
    pred = predictions()
    with torch.no_grad():
        pred[part][1, 7] = float("nan") if part < 2 else 200.0  # exp(200) is no float32
    assert_spoilt(criterion(pred, batch_of(*ONE)), rf"predicted {name} .*in images \[1\]", pred[:3])


def test_a_label_of_another_set_is_named():
    with pytest.raises(ValueError, match=r"labels \[3\] in the batch, but the model has 3 classes"):
        criterion(predictions(), batch_of([[[1, 2, 30, 40]], []], [[3], []]))


def test_half_precision_predictions_give_float32_losses():
    pred = predictions()
    low = pred._replace(**{k: getattr(pred, k).bfloat16() for k in ("class_logits", "obj_logits", "box_codes")})
    with torch.autocast("cpu", torch.bfloat16):
        out = criterion(low, batch_of(*ONE, epoch=9))
    assert all(v.dtype == torch.float32 and v.isfinite() for v in out.losses.values())
    double = pred._replace(**{k: getattr(pred, k).double() for k in ("class_logits", "obj_logits", "box_codes")})
    assert criterion(double, batch_of(*ONE, epoch=9)).losses["loss_l1"].dtype == torch.float64


def test_codes_and_boxes_are_inverse():
    boxes = torch.tensor([[10.0, 12, 40, 50], [0, 0, 1, 64]])
    codes = encode_boxes(boxes, GRID.points[[3, 70]], GRID.strides[[3, 70]])
    torch.testing.assert_close(decode_boxes(codes, GRID.points[[3, 70]], GRID.strides[[3, 70]]), boxes, atol=1e-4, rtol=1e-5)
    assert encode_boxes(torch.tensor([5.0, 5, 5, 5]), GRID.points[0], GRID.strides[0]).isfinite().all()


@needs_shared
def test_squared_iou_loss_equals_the_reference():
    boxes, given = (np.load(SHARED / f"golden/pure/iou.{peer}.npz") for peer in ("miemie", "yolox"))
    a, b = (torch.from_numpy(boxes[key]) for key in "ab")
    codes = torch.cat([(a[:, :2] + a[:, 2:]) / 2, a[:, 2:] - a[:, :2]], 1).requires_grad_()  # the reference's form
    loss = squared_iou_loss(xyxy(codes), b)
    np.testing.assert_allclose(loss.detach(), given["IOUloss_iou"], rtol=1e-4, atol=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), codes)
    # Where edges coincide the gradient of minimum and maximum is a matter of taste.
    free = (a[:, None, :].unflatten(2, (2, 2)) != b[:, None, :].unflatten(2, (2, 2)).flip(2)).flatten(1).all(1) & (a != b).all(1)
    assert free.sum() >= 6
    np.testing.assert_allclose(grad[free], given["IOUloss_iou_grad"][free.numpy()], rtol=1e-3, atol=1e-6)


def test_the_head_starts_at_its_prior():
    head = DecoupledHead((8, 8, 8), 5, channels=16)
    features = [torch.zeros(1, 8, s, s) for s in (8, 4, 2)]
    _, scores = head.decode(head.eval()(features))
    torch.testing.assert_close(scores, torch.full((1, 84, 5), 1e-4), rtol=1e-3, atol=0)
