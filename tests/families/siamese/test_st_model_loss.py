"""ST-07: losses and weights by hand, the complete IoU against an independent float64 version, finite gradients."""

import math

import numpy as np
import pytest
import torch

from mmdet.families.siamese.head import Predictions
from mmdet.families.siamese.labels import LabelSettings
from mmdet.families.siamese.loss import LossWeights, SiameseCriterion, masked_softmax
from mmdet.families.siamese.structures import PairBatch
from mmdet.models.boxes import ciou_aligned, iou_aligned
from mmdet.models.losses import ciou_loss
from mmdet.models.points import boxes_to_distances, make_points

POINTS = make_points([(16, 16)], [8]).points


def criterion_of(**options):
    values = {"self_epoch": 2, **options}
    return SiameseCriterion(8, LabelSettings(), LossWeights(0.666, 0.333, 1.2), LossWeights(0.75, 0.25, 1.2), **values)


def batch_of(boxes, positive, epoch=0, step=0):
    count = len(boxes)
    images = torch.zeros(count, 3, 128, 128, dtype=torch.uint8)
    none = torch.zeros(count, 0, 4)
    return PairBatch(
        images[:, :, :64, :64],
        images,
        torch.tensor(boxes, dtype=torch.float32),
        torch.tensor(positive),
        none,
        none[..., 0].bool(),
        [""] * count,
        epoch=epoch,
        step=step,
    )


def predictions_of(batch, generator=None, scale=1.0):
    """Random predictions; without a generator, the truth at every point, cut at a small distance."""
    count = len(batch)
    if generator is not None:
        logits = scale * torch.randn(count, 2, 16, 16, generator=generator)
        return Predictions(logits, 1 + 30 * torch.rand(count, 4, 16, 16, generator=generator))
    exact = boxes_to_distances(POINTS, batch.boxes.unsqueeze(1).expand(-1, 256, -1))
    return Predictions(torch.zeros(count, 2, 16, 16), exact.transpose(1, 2).unflatten(2, (16, 16)))


# -- complete IoU -------------------------------------------------------------------------------------------------------------


def ciou_reference(a, b):
    """One pair, in double precision, from centres and sizes (arXiv 1911.08287)."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = (((r[0] + r[2]) / 2, (r[1] + r[3]) / 2, r[2] - r[0], r[3] - r[1]) for r in (a, b))
    overlap = max(0.0, min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2)) * max(
        0.0, min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2)
    )
    iou = overlap / (aw * ah + bw * bh - overlap)
    wide = max(ax + aw / 2, bx + bw / 2) - min(ax - aw / 2, bx - bw / 2)
    high = max(ay + ah / 2, by + bh / 2) - min(ay - ah / 2, by - bh / 2)
    v = 4 / math.pi**2 * (math.atan(bw / bh) - math.atan(aw / ah)) ** 2
    alpha = v / (1 - iou + v) if v else 0.0
    return iou - ((ax - bx) ** 2 + (ay - by) ** 2) / (wide**2 + high**2) - alpha * v


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-8)])
def test_ciou_equals_an_independent_one_on_1000_boxes(dtype, bound):
    draw = np.random.default_rng(0)
    corners, sizes = draw.uniform(0, 100, (2, 1000, 2)), draw.uniform(8, 120, (2, 1000, 2))
    a, b = (torch.tensor(np.concatenate([c, c + s], 1), dtype=dtype) for c, s in zip(corners, sizes, strict=True))
    expected = [ciou_reference(x, y) for x, y in zip(a.double().tolist(), b.double().tolist(), strict=True)]
    found = ciou_aligned(a, b)
    assert found.dtype == dtype and (found.double() - torch.tensor(expected, dtype=torch.float64)).abs().max() <= bound
    torch.testing.assert_close(ciou_loss(a, b), 1 - found)
    torch.testing.assert_close(ciou_aligned(b, a), found)


def test_ciou_by_hand():
    """Boxes of one centre are punished for their overlap alone; the reference's version took off 512 / 8192 here."""
    big, small = torch.tensor([[0.0, 0, 64, 64]]), torch.tensor([[16.0, 16, 48, 48]])
    assert ciou_aligned(big, small).item() == pytest.approx(0.25, abs=1e-6)
    apart = torch.tensor([[64.0, 0, 128, 64]])
    assert ciou_aligned(big, apart).item() == pytest.approx(-(64**2) / (128**2 + 64**2), abs=1e-6)
    wide = torch.tensor([[0.0, 16, 64, 48]])
    v = 4 / math.pi**2 * (math.pi / 4 - math.atan(2)) ** 2
    assert ciou_aligned(big, wide).item() == pytest.approx(0.5 - v * v / (0.5 + v), abs=1e-6)


def test_the_weight_of_the_shape_term_gets_no_gradient():
    """The slope is that of IoU - distance - weight * shape with the weight held at its value."""
    box, target, step = [0.0, 0.0, 60.0, 64.0], [2.0, 16.0, 66.0, 48.0], 1e-6

    def shape(b):
        return 4 / math.pi**2 * (math.atan(64 / 32) - math.atan((b[2] - b[0]) / (b[3] - b[1]))) ** 2

    def rest(b):
        v, value = shape(b), ciou_reference(b, target)
        iou = iou_aligned(torch.tensor([b], dtype=torch.float64), torch.tensor([target], dtype=torch.float64)).item()
        return value + v / (1 - iou + v) * v, v / (1 - iou + v)

    weight, slopes = rest(box)[1], []
    for side in range(4):
        up, down = ([x + d * (i == side) for i, x in enumerate(box)] for d in (step, -step))
        slopes.append((rest(up)[0] - weight * shape(up) - rest(down)[0] + weight * shape(down)) / (2 * step))
    a = torch.tensor([box], dtype=torch.float64, requires_grad=True)
    ciou_aligned(a, torch.tensor([target], dtype=torch.float64)).sum().backward()
    assert a.grad[0].tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("box", [(3.0, 3, 3, 3), (3, 3, 3, 9), (5, 5, 2, 2), (3, 3, 9, 9)])
def test_boxes_without_area_give_finite_gradients(box):
    a = torch.tensor([box], dtype=torch.float32, requires_grad=True)
    ciou_aligned(a, torch.tensor([[3.0, 3, 9, 9]])).sum().backward()
    assert a.grad.isfinite().all()


# -- weights ------------------------------------------------------------------------------------------------------------------


def test_masked_softmax():
    values = torch.tensor([[0.0, math.log(3), 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    torch.testing.assert_close(masked_softmax(values, mask), torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]))


def test_weights_of_an_image_sum_to_1_and_follow_their_rules():
    criterion = criterion_of()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, 2, (4, 256), generator=generator)
    labels[2][labels[2] == 1] = -1
    scores, overlaps = torch.rand(4, 256, generator=generator), torch.rand(4, 256, generator=generator)
    positive = torch.tensor([True, True, False, True])
    pos, neg, reg = criterion.point_weights(labels, scores, overlaps, positive, weighted=True)
    for weights, sums in ((pos, [1, 1, 0, 1]), (neg, [1, 1, 1, 1]), (reg, [1, 1, 0, 1])):
        torch.testing.assert_close(weights.sum(1), torch.tensor(sums, dtype=torch.float32))
    i, j = (labels[0] == 1).nonzero().flatten()[:2]
    assert (pos[0, i] / pos[0, j]).item() == pytest.approx(math.exp((overlaps[0, i] - overlaps[0, j]).item() / 0.4), rel=1e-4)
    assert (reg[0, i] / reg[0, j]).item() == pytest.approx(math.exp((scores[0, i] - scores[0, j]).item() / 0.4), rel=1e-4)
    i, j = (labels[0] == 0).nonzero().flatten()[:2]
    gap = (scores - overlaps)[0, i] - (scores - overlaps)[0, j]
    assert (neg[0, i] / neg[0, j]).item() == pytest.approx(math.exp(gap.item() / 0.4), rel=1e-4)
    i, j = (labels[2] == 0).nonzero().flatten()[:2]  # a negative pair: overlaps are of no account
    assert (neg[2, i] / neg[2, j]).item() == pytest.approx(math.exp((scores[2, i] - scores[2, j]).item() / 0.4), rel=1e-4)
    even = criterion.point_weights(labels, scores, overlaps, positive, weighted=False)
    assert all(((w == 0) | (w == w.amax(1, keepdim=True))).all() for w in even)


# -- the criterion ------------------------------------------------------------------------------------------------------------


def loss_by_hand(batch, predictions, labels, weighted, factors):
    """Image by image in double precision."""
    totals = {"pos": 0.0, "neg": 0.0, "iou": 0.0}
    counts = dict.fromkeys(totals, 0)
    for i in range(len(batch)):
        log_p = predictions.logits[i].double().flatten(1).log_softmax(0)
        ltrb = predictions.ltrb[i].double().flatten(1).T
        boxes = torch.cat([POINTS - ltrb[:, :2], POINTS + ltrb[:, 2:]], 1)
        target = batch.boxes[i].double()
        overlaps = iou_aligned(boxes, target.expand(256, 4))
        score = log_p[1].exp()
        shown = overlaps if batch.positive[i] else torch.zeros_like(overlaps)
        for name, label, x in (("pos", 1, shown), ("iou", 1, score), ("neg", 0, score - shown)):
            rows = (labels[i] == label).nonzero().flatten()
            if len(rows):
                w = (x[rows] / 0.4).softmax(0) if weighted else torch.full((len(rows),), 1 / len(rows))
                each = {
                    "pos": -log_p[1],
                    "neg": -log_p[0],
                    "iou": 1 - torch.tensor([ciou_reference(b, target.tolist()) for b in boxes.tolist()]),
                }[name]
                totals[name] += float((w.double() * each[rows]).sum())
                counts[name] += 1
    return {f"loss_{n}": factors[n] * totals[n] / max(counts[n], 1) for n in totals}


@pytest.mark.parametrize(("epoch", "weighted"), [(0, False), (1, True), (2, True)])
def test_losses_by_hand(epoch, weighted):
    criterion = criterion_of()
    boxes = [(40, 44, 80, 84), (30, 30, 90, 70), (50, 50, 60, 60)]
    batch = batch_of(boxes, [True, True, False], epoch=epoch, step=3)
    predictions = predictions_of(batch, torch.Generator().manual_seed(1))
    seen = []
    make = criterion.make_labels
    criterion.make_labels = lambda *args: seen.append(make(*args)) or seen[-1]
    out = criterion(predictions, batch)
    factors = {"pos": 0.75, "neg": 0.25, "iou": 1.2} if epoch == 2 else {"pos": 0.666, "neg": 0.333, "iou": 1.2}
    expected = loss_by_hand(batch, predictions, seen[0], weighted, factors)
    assert {k: v.item() for k, v in out.losses.items()} == pytest.approx(expected, rel=1e-5)
    assert out.total.item() == pytest.approx(sum(expected.values()), rel=1e-5)
    assert set(out.stats) == {"l1", "overlap", "num_pos", "num_neg"}


def test_two_points_by_hand():
    """One positive and one negative point with scores 0.8 and 0.4, overlap 0.5 at the positive."""
    criterion = criterion_of()
    batch = batch_of([(4, 4, 12, 12)], [True])
    labels = torch.full((1, 256), -1)
    labels[0, 0], labels[0, 1] = 1, 0
    criterion.make_labels = lambda *args: labels
    logits = torch.zeros(1, 2, 16, 16)
    logits[0, 1, 0, 0], logits[0, 1, 0, 1] = math.log(0.8 / 0.2), math.log(0.4 / 0.6)
    ltrb = torch.ones(1, 4, 16, 16)
    ltrb[0, :, 0, 0] = torch.tensor([0.0, 0.0, 8.0, 4.0])  # from (4, 4): 8 x 4 of the 8 x 8
    out = criterion(Predictions(logits, ltrb), batch)
    v = 4 / math.pi**2 * (math.pi / 4 - math.atan(2)) ** 2
    ciou = 0.5 - 2**2 / (8**2 + 8**2) - v * v / (0.5 + v)
    expected = {"loss_pos": -0.666 * math.log(0.8), "loss_neg": -0.333 * math.log(0.6), "loss_iou": 1.2 * (1 - ciou)}
    assert {k: v.item() for k, v in out.losses.items()} == pytest.approx(expected, abs=1e-6)
    assert out.stats["overlap"].item() == pytest.approx(0.5, abs=1e-6)
    assert out.stats["l1"].item() == pytest.approx(4 - 0.5, abs=1e-5)


def test_a_perfect_prediction_has_no_box_loss():
    batch = batch_of([(40, 44, 80, 84), (4, 4, 124, 100), (-20, 30, 40, 90)], [True] * 3)
    out = criterion_of()(predictions_of(batch), batch)
    assert out.losses["loss_iou"] <= 1e-5 and out.stats["overlap"] > 1 - 1e-5 and out.stats["l1"] == 0


@pytest.mark.parametrize("logit", [-100.0, 100.0])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_gradients_are_finite_for_extreme_logits(logit, epoch):
    batch = batch_of([(40, 44, 80, 84), (50, 50, 60, 60)], [True, False], epoch=epoch)
    logits = torch.full((2, 2, 16, 16), -logit)
    logits[:, 1] = logit
    exponent = torch.full((2, 4, 16, 16), logit).requires_grad_()
    logits.requires_grad_()
    out = criterion_of()(Predictions(logits, exponent.clamp(max=math.log(1e4)).exp()), batch)
    out.total.backward()
    assert out.total.isfinite() and logits.grad.isfinite().all() and exponent.grad.isfinite().all()


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("epoch", [0, 2])
def test_pairs_of_one_kind_only(positive, epoch):
    """All negative: the terms of positives are 0, with a gradient of 0 for every parameter's sake."""
    batch = batch_of([(40, 44, 80, 84)] * 3, [positive] * 3, epoch=epoch)
    predictions = predictions_of(batch, torch.Generator().manual_seed(0))
    logits, ltrb = (t.requires_grad_() for t in predictions)
    out = criterion_of()(Predictions(logits, ltrb), batch)
    out.total.backward()
    assert all(v.isfinite() for v in out.losses.values()) and out.losses["loss_neg"] > 0
    assert (out.losses["loss_pos"] > 0) == positive == (out.losses["loss_iou"] > 0)
    assert ltrb.grad is not None and logits.grad.isfinite().all()


def test_the_pair_losses_do_not_depend_on_their_company():
    """Images share nothing but the divisor: two batches of equally many give the mean of their losses."""
    boxes, positive = [(40, 44, 80, 84), (20, 20, 60, 70), (50, 50, 90, 90), (30, 40, 100, 90)], [True, False, True, False]
    whole = batch_of(boxes, positive, epoch=2)
    predictions = predictions_of(whole, torch.Generator().manual_seed(0))
    criterion = criterion_of()
    total = criterion(predictions, whole).total
    parts = [
        criterion(Predictions(predictions.logits[i : i + 2], predictions.ltrb[i : i + 2]), part).total
        for i, part in zip((0, 2), whole.split(2), strict=True)
    ]
    torch.testing.assert_close(total, sum(parts) / 2)


def test_half_precision_predictions_give_float32_losses():
    batch = batch_of([(40, 44, 80, 84)], [True])
    predictions = predictions_of(batch, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = criterion_of()(Predictions(predictions.logits.bfloat16(), predictions.ltrb), batch)
    assert all(v.dtype == torch.float32 for v in {**out.losses, **out.stats}.values())


@pytest.mark.parametrize("epoch", [0, 2])
def test_predictions_that_are_no_numbers_become_losses_that_are_none(epoch):
    """Nobody raises on one process alone: the Trainer sees the NaN, and all leave the step out."""
    batch = batch_of([(40, 44, 80, 84)], [True], epoch=epoch)
    predictions = predictions_of(batch, torch.Generator().manual_seed(0))
    predictions.logits[0, 0, 8, 8] = predictions.logits[0, 1, 7, 7] = torch.nan
    assert not criterion_of()(Predictions(predictions.logits * torch.nan, predictions.ltrb), batch).total.isfinite()


def test_validation_compares_epochs():
    """Labels of the first phase, equal weights, the same at every epoch and step."""
    boxes, positive = [(40, 44, 80, 84), (20, 20, 60, 70)], [True, False]
    criterion = criterion_of()
    values = []
    for epoch, step in ((0, 0), (1, 17), (3, 40)):
        batch = batch_of(boxes, positive, epoch=epoch, step=step)
        predictions = predictions_of(batch, torch.Generator().manual_seed(0))
        values.append({k: v.item() for k, v in criterion(predictions, batch, validating=True).losses.items()})
    assert values[0] == values[1] == values[2]
