"""Assignment and criterion: against a loop over boxes, mix-up weights, crowd regions, precision, many boxes, wrong inputs."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spoilt import assert_spoilt

from mmdet.data.structures import Batch, Targets
from mmdet.families.ppyolo.anchors import Anchors, cell_table
from mmdet.families.ppyolo.assigner import assign_best_anchor, largest_overlaps
from mmdet.families.ppyolo.head import Predictions
from mmdet.families.ppyolo.loss import PPYOLOCriterion
from mmdet.models.boxes import iou_pairwise

SIZE = (96, 128)
STRIDES = (32, 16, 8)
SIZES = [(10, 13), (16, 30), (33, 23), (30, 61), (62, 45), (59, 119), (116, 90), (156, 198), (373, 326)]
MASKS = [(6, 7, 8), (3, 4, 5), (0, 1, 2)]
IOU_AWARE = pytest.mark.parametrize("iou_aware", [True, False])
BOXES = [[[10.0, 10, 60, 50], [30, 40, 120, 90]], [[0, 0, 128, 96]]]
LABELS = [[1, 3], [0]]


def anchors():
    return Anchors(SIZES, MASKS, STRIDES)


def criterion(num_classes=4, **options):
    return PPYOLOCriterion(num_classes, anchors(), **options)


def predictions(batch=2, num_classes=4, seed=0, dtype=torch.float32, iou_aware=True, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    channels = 3 * (5 + num_classes + iou_aware)
    shapes = [(batch, channels, size[0] // s, size[1] // s) for s in STRIDES]
    return Predictions(tuple(torch.randn(s, generator=generator).to(dtype).requires_grad_(True) for s in shapes))


def batch_of(boxes, labels, **more):
    return Batch(torch.zeros(len(boxes), 3, *SIZE), Targets.from_lists(boxes, labels, **more))


def random_batch(seed=0, counts=(7, 0, 30), **more):
    """Boxes of all sizes; a few reach over the border, a few have no area."""
    rng = np.random.default_rng(seed)
    boxes, labels = [], []
    for n in counts:
        center = rng.uniform(-4, 132, (n, 2)) * [1, 0.75]
        half = np.exp(rng.uniform(0, 5, (n, 2))) / 2
        rows = np.concatenate([center - half, center + half], 1)
        rows[n // 2 : n // 2 + 1, 2] = rows[n // 2 : n // 2 + 1, 0]
        boxes.append(rows.tolist())
        labels.append(rng.integers(0, 4, n).tolist())
    return batch_of(boxes, labels, **more)


# -- the definition, box by box ----------------------------------------------------------------------------------------------


def dense_targets(targets, num_classes=4):
    """The lineage's target tensors: per level (B, n, 6 + C, H, W) of x, y, log w, log h, emphasis, score, classes."""
    levels = [torch.zeros(len(targets.boxes), 3, 6 + num_classes, SIZE[0] // s, SIZE[1] // s) for s in STRIDES]
    for image, (boxes, labels, valid, weights) in enumerate(
        zip(targets.boxes, targets.labels, targets.valid, targets.weights, strict=True)
    ):
        for (x1, y1, x2, y2), label, ok, weight in zip(boxes.tolist(), labels, valid, weights, strict=True):
            w, h = x2 - x1, y2 - y1
            if not ok or w <= 0 or h <= 0 or weight <= 0:
                continue
            overlaps = [min(w, a) * min(h, b) / (w * h + a * b - min(w, a) * min(h, b)) for a, b in SIZES]
            best = int(np.argmax(overlaps))
            level = next(i for i, mask in enumerate(MASKS) if best in mask)
            stride = STRIDES[level]
            x, y = (x1 + x2) / 2 / stride, (y1 + y2) / 2 / stride
            column = min(max(int(np.floor(x)), 0), SIZE[1] // stride - 1)
            row = min(max(int(np.floor(y)), 0), SIZE[0] // stride - 1)
            cell = levels[level][image, MASKS[level].index(best), :, row, column]
            cell[:4] = torch.tensor([x - column, y - row, np.log(w / SIZES[best][0]), np.log(h / SIZES[best][1])])
            cell[4] = 2 - w * h / (SIZE[0] * SIZE[1])
            cell[5] = weight
            cell[6 + label] = 1
    return levels


def reference_losses(given, batch, iou_aware, threshold=0.7):
    """Every term from the dense tensors, each a sum over cells and a mean over images."""
    sums = dict.fromkeys(["loss_xy", "loss_wh", "loss_iou", "loss_iou_aware", "loss_obj", "loss_cls"], 0.0)
    for level, (raw, t) in enumerate(zip(given.maps, dense_targets(batch.targets), strict=True)):
        ious, p = (raw[:, :3], raw[:, 3:]) if iou_aware else (None, raw)
        p = p.reshape(len(raw), 3, -1, *raw.shape[2:])
        place = 1.05 * p[:, :, :2].sigmoid() - 0.025
        score, emphasis = t[:, :, 5], t[:, :, 4]
        sums["loss_xy"] += ((place - t[:, :, :2]).abs().sum(2) * emphasis * score).sum()
        sums["loss_wh"] += ((p[:, :, 2:4] - t[:, :, 2:4]).abs().sum(2) * emphasis * score).sum()
        boxes, wanted = (corners(level, xy, wh) for xy, wh in ((place, p[:, :, 2:4]), (t[:, :, :2], t[:, :, 2:4])))
        overlap = torch.diagonal(iou_pairwise(boxes.reshape(-1, 4), wanted.reshape(-1, 4))).reshape(score.shape)
        sums["loss_iou"] += 2.5 * ((1 - overlap**2) * emphasis * score).sum()
        if iou_aware:
            aware = F.binary_cross_entropy_with_logits(ious, overlap.detach(), reduction="none")
            sums["loss_iou_aware"] += (aware * score).sum()
        classes = F.binary_cross_entropy_with_logits(p[:, :, 5:], t[:, :, 6:], reduction="none").sum(2)
        sums["loss_cls"] += (classes * score).sum()
        usable = torch.where(batch.targets.valid[..., None], batch.targets.boxes, 0.0)
        largest = iou_pairwise(boxes.reshape(len(raw), -1, 4), usable).amax(2).reshape(score.shape)
        counted = torch.where(score > 0, score, (largest <= threshold).float())
        objects = F.binary_cross_entropy_with_logits(p[:, :, 4], (score > 0).float(), reduction="none")
        sums["loss_obj"] += (objects * counted).sum()
    return {k: v / len(batch) for k, v in sums.items() if iou_aware or k != "loss_iou_aware"}


def corners(level, place, shape):
    """(B, n, H, W, 4) px from places in cells and log sizes (B, n, 2, H, W)."""
    height, width = place.shape[3:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    center = (place + torch.stack([x, y])) * STRIDES[level]
    half = shape.exp() * torch.tensor([SIZES[i] for i in MASKS[level]]).reshape(1, 3, 2, 1, 1) / 2
    return torch.cat([center - half, center + half], 2).movedim(2, -1)


@IOU_AWARE
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(iou_aware, seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(seed, weights=[rng.uniform(0.1, 1, n) for n in (7, 0, 30)])
    given = predictions(3, seed=seed, iou_aware=iou_aware)
    out = criterion(iou_aware=iou_aware)(given, batch)
    expected = reference_losses(given, batch, iou_aware)
    assert out.losses.keys() == expected.keys()
    for name, value in out.losses.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    out.total.backward()
    ours = [m.grad.clone() for m in given.maps]
    for m in given.maps:
        m.grad = None
    sum(expected.values()).backward()
    for mine, m in zip(ours, given.maps, strict=True):
        torch.testing.assert_close(mine, m.grad, rtol=1e-4, atol=1e-5)


def test_later_boxes_overwrite_a_cell_and_both_classes_stay():
    """Two boxes of one shape around one centre, the second a little larger; a third one elsewhere."""
    boxes = [[[40.0, 40, 52, 54], [39, 39, 53, 55], [90, 20, 102, 34]]]
    batch = batch_of(boxes, [[1, 3, 0]], weights=[[0.25, 0.75, 1.0]])
    maps = predictions(1).maps
    found = assign_best_anchor(batch.targets, anchors(), cell_table(maps, anchors()), 4)
    assert len(found.cell) == 2
    shared = found.box.tolist().index(1)
    assert found.classes[shared].tolist() == [False, True, False, True]
    assert found.classes[1 - shared].tolist() == [True, False, False, False]
    assert (found.level[shared], found.slot[shared], found.row[shared], found.column[shared]) == (2, 0, 5, 5)
    assert found.cell[shared] == 3 * (3 * 4 + 6 * 8) + 5 * 16 + 5
    swapped = batch_of([boxes[0][1::-1]], [[3, 1]])
    again = assign_best_anchor(swapped.targets, anchors(), cell_table(maps, anchors()), 4)
    assert again.box.tolist() == [1]


def test_assignment_does_not_depend_on_the_neighbours():
    batch = random_batch(5, (6, 3, 12))
    table = cell_table(predictions(3).maps, anchors())
    together = assign_best_anchor(batch.targets, anchors(), table, 4)
    for image in range(3):
        alone = assign_best_anchor(batch.targets[image : image + 1], anchors(), table, 4)
        rows = together.image == image
        assert torch.equal(together.cell[rows], alone.cell)
        assert torch.equal(together.box[rows], alone.box)
        assert torch.equal(together.classes[rows], alone.classes)
    assert (together.cell.diff() >= 0).all()


@pytest.mark.parametrize("assign_bytes", [1, 40_000, 300_000, 10**9])
def test_parts_of_bounded_memory_change_nothing(assign_bytes):
    batch = random_batch(1, (7, 0, 40))
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(3, 200, 2, generator=generator) * 100
    boxes = torch.cat([corner, corner + 60 * torch.rand(3, 200, 2, generator=generator)], -1)
    whole = iou_pairwise(boxes, torch.where(batch.targets.valid[..., None], batch.targets.boxes, 0.0)).amax(2)
    assert torch.equal(largest_overlaps(boxes, batch.targets, assign_bytes), whole)
    assert whole[1].max() == 0
    given = predictions(3)
    base = criterion()(given, batch).losses
    for name, value in criterion(assign_bytes=assign_bytes)(given, batch).losses.items():
        assert torch.equal(value, base[name])


# -- terms ------------------------------------------------------------------------------------------------------------------


def test_terms_are_finite_and_total_is_their_sum():
    out = criterion()(predictions(), batch_of(BOXES, LABELS))
    assert all(v.shape == () and v > 0 and v.isfinite() for v in out.losses.values())
    assert out.total.item() == pytest.approx(sum(v.item() for v in out.losses.values()))
    assert out.stats["num_pos"].item() == 1.5
    assert not any(v.requires_grad for v in out.stats.values())


def test_loss_weights():
    base = criterion()(predictions(), batch_of(BOXES, LABELS)).losses
    other = criterion(weight_iou=5.0, weight_iou_aware=3.0)(predictions(), batch_of(BOXES, LABELS)).losses
    for name, factor in {"loss_iou": 2.0, "loss_iou_aware": 3.0, "loss_obj": 1.0, "loss_cls": 1.0, "loss_xy": 1.0}.items():
        torch.testing.assert_close(other[name], factor * base[name])


def test_batch_mean_is_the_mean_of_its_parts():
    """What DDP and gradient accumulation do: equal parts, each with its own mean."""
    batch, given = random_batch(2, (5, 9)), predictions(2)
    whole = criterion()(given, batch).losses
    halves = []
    for i in range(2):
        part = Predictions(tuple(m[i : i + 1] for m in given.maps))
        halves.append(criterion()(part, batch.split(2)[i]).losses)
    for name, value in whole.items():
        torch.testing.assert_close((halves[0][name] + halves[1][name]) / 2, value)


def test_mix_up_weights_are_target_scores():
    def losses(weight):
        return criterion()(predictions(1), batch_of([BOXES[1]], [LABELS[1]], weights=[[weight]])).losses

    full, half, none = losses(1.0), losses(0.5), losses(0.0)
    for name in ("loss_xy", "loss_wh", "loss_iou", "loss_iou_aware", "loss_cls"):
        torch.testing.assert_close(half[name], full[name] / 2)
        assert none[name] == 0
    assert half["loss_obj"] < full["loss_obj"]


def test_crowd_regions_carry_no_negative_loss():
    crowd = [[[0.0, 48, 64, 96]], []]
    given, plain_given = predictions(), predictions()
    out = criterion(ignore_threshold=1.0)(given, batch_of(BOXES, LABELS, ignore=crowd))
    out.losses["loss_obj"].backward()
    plain = criterion(ignore_threshold=1.0)(plain_given, batch_of(BOXES, LABELS))
    plain.losses["loss_obj"].backward()
    inside_total = 0
    for raw, free, stride in zip(given.maps, plain_given.maps, STRIDES, strict=True):
        height, width = raw.shape[2:]
        y, x = torch.meshgrid((torch.arange(height) + 0.5) * stride, (torch.arange(width) + 0.5) * stride, indexing="ij")
        inside = (x > 0) & (x < 64) & (y > 48) & (y < 96)
        objects = raw.grad[:, 3:].unflatten(1, (3, 9))[:, :, 4]
        without = free.grad[:, 3:].unflatten(1, (3, 9))[:, :, 4]
        assert (objects[0, :, inside] == 0).all()
        assert torch.equal(objects[0, :, ~inside], without[0, :, ~inside])
        assert torch.equal(objects[1], without[1])
        inside_total += inside.sum()
    assert inside_total > 0
    for name in ("loss_xy", "loss_iou", "loss_cls"):
        assert torch.equal(out.losses[name], plain.losses[name])


def test_a_positive_inside_a_crowd_region_still_learns():
    crowd = batch_of([[[10.0, 10, 60, 50]]], [[1]], ignore=[[[0.0, 0, 128, 96]]])
    given = predictions(1)
    out = criterion()(given, crowd)
    out.losses["loss_obj"].backward()
    silent = sum((m.grad[:, 3:].unflatten(1, (3, 9))[:, :, 4] != 0).sum() for m in given.maps)
    assert silent == 1
    assert out.losses["loss_cls"] > 0


@IOU_AWARE
@pytest.mark.parametrize("boxes", [[[], []], [[], BOXES[0]]], ids=["both_empty", "one_empty"])
def test_images_without_boxes(boxes, iou_aware):
    given = predictions(iou_aware=iou_aware)
    out = criterion(iou_aware=iou_aware)(given, batch_of(boxes, [LABELS[0][: len(b)] for b in boxes]))
    out.total.backward()
    assert out.losses["loss_obj"] > 0
    assert all(v.isfinite() for v in out.losses.values())
    if boxes == [[], []]:
        assert all(v == 0 for name, v in out.losses.items() if name != "loss_obj")
        assert out.stats["num_pos"] == 0
    assert all(m.grad is not None and m.grad.isfinite().all() for m in given.maps)


# -- precision --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_predictions_are_lifted_and_targets_stay(dtype, monkeypatch):
    """Case N03."""
    import mmdet.families.ppyolo.loss as module

    seen, original = {}, module.assign_best_anchor

    def spy(targets, *args):
        seen["boxes"], seen["labels"] = targets.boxes.clone(), targets.labels.clone()
        seen["found"] = original(targets, *args)
        return seen["found"]

    monkeypatch.setattr(module, "assign_best_anchor", spy)
    given = predictions(1, 3000, dtype=dtype, size=(640, 640))
    with torch.autocast("cpu", dtype):
        out = criterion(3000)(given, batch_of([[[20.0, 20, 639.3, 100]]], [[2049]]))
    out.total.backward()
    assert all(v.dtype == torch.float32 and v.isfinite() for v in out.losses.values())
    assert seen["boxes"][0, 0, 2].item() == pytest.approx(639.3, abs=1e-4)
    assert seen["labels"].tolist() == [[2049]]
    assert seen["found"].classes.nonzero().tolist() == [[0, 2049]]
    assert all(m.grad.isfinite().all() for m in given.maps)


def test_float64_stays():
    given = predictions(dtype=torch.float64)
    out = criterion()(given, batch_of(BOXES, LABELS))
    assert out.total.dtype == torch.float64
    torch.testing.assert_close(out.total.float(), criterion()(predictions(), batch_of(BOXES, LABELS)).total)


# -- what is wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "stride"), [(0, 32), (2, 8)])
def test_not_finite_predictions_are_named_and_the_losses_are_nan(level, stride):
    given = predictions()
    with torch.no_grad():
        given.maps[level][1, 3, 0, 0] = float("nan")
    out = criterion()(given, batch_of(BOXES, LABELS))
    assert_spoilt(out, rf"map of stride {stride} .*in images \[1\]", given.maps)


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range_stop(label):
    with pytest.raises(ValueError, match=rf"labels \[{label}\] in the batch, but the model has 4 classes"):
        criterion()(predictions(), batch_of(BOXES, [[1, label], [0]]))


MANY_BOXES = """
import resource, sys, torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1:]
from mmdet.data.structures import Batch, Targets
from mmdet.families.ppyolo.head import Predictions
from mmdet.families.ppyolo.anchors import Anchors
from mmdet.families.ppyolo.exp import COCO_ANCHORS
from mmdet.families.ppyolo.loss import PPYOLOCriterion

criterion = PPYOLOCriterion(4, Anchors(COCO_ANCHORS, [(6, 7, 8), (3, 4, 5), (0, 1, 2)]))
def run(boxes):
    images = torch.zeros(4, 3, 32, 32)
    corner = [torch.rand(boxes, 2) * 500 for _ in range(4)]
    rows = [torch.cat([c, c + 10 + torch.rand(len(c), 2) * 90], 1) for c in corner]
    targets = Targets.from_lists(rows, [torch.randint(4, (boxes,)) for _ in range(4)])
    maps = tuple(torch.zeros(4, 30, n, n, requires_grad=True) for n in (20, 40, 80))
    out = criterion(Predictions(maps), Batch(images, targets))
    out.total.backward()
    assert out.total.isfinite() and maps[2].grad.isfinite().all() and out.stats["num_pos"] > 100 * (boxes > 100)
run(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(600)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_600_boxes_in_each_image_stay_in_the_memory_bound():
    """Four images of 600 boxes at 640 px: 11.5 million pairs of boxes and cells in one image's finest level alone."""
    paths = [p for p in sys.path if p]
    command = [sys.executable, "-c", MANY_BOXES, *paths]
    extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert extra < 256 * 2**20
