"""The criterion: crowd regions, mix-up weights, empty images, precision, many boxes, wrong inputs."""

import subprocess
import sys

import pytest
import torch
from spoilt import assert_spoilt

from mmdet.data.structures import Batch, Targets
from mmdet.families.ppyoloe.head import Predictions
from mmdet.families.ppyoloe.loss import PPYOLOECriterion
from mmdet.models.points import make_points

PHASES = pytest.mark.parametrize("epoch", [0, 5], ids=["atss", "task_aligned"])
SIZE = 128
GRID = make_points([(4, 4), (8, 8), (16, 16)], (32, 16, 8))


def criterion(num_classes=4, **options):
    return PPYOLOECriterion(num_classes, static_assigner_epoch=5, **options)


def predictions(batch=2, num_classes=4, seed=0, dtype=torch.float32, grid=GRID):
    generator = torch.Generator().manual_seed(seed)
    class_logits = torch.randn(batch, len(grid.points), num_classes, generator=generator).to(dtype)
    box_logits = torch.randn(batch, len(grid.points), 4, 17, generator=generator).to(dtype)
    return Predictions(class_logits.requires_grad_(True), box_logits.requires_grad_(True), *grid)


def batch_of(boxes, labels, epoch, **more):
    return Batch(torch.zeros(len(boxes), 3, SIZE, SIZE), Targets.from_lists(boxes, labels, **more), epoch=epoch)


BOXES = [[[10.0, 10, 60, 50], [30, 40, 120, 120]], [[0, 0, 128, 128]]]
LABELS = [[1, 3], [0]]


@PHASES
def test_terms_are_finite_and_total_is_their_sum(epoch):
    out = criterion()(predictions(), batch_of(BOXES, LABELS, epoch))
    assert set(out.losses) == {"loss_cls", "loss_iou", "loss_dfl"}
    assert all(v.shape == () and v > 0 for v in out.losses.values())
    assert out.total.item() == pytest.approx(sum(v.item() for v in out.losses.values()))
    assert {"loss_l1", "num_pos", "score_sum"} <= set(out.stats)
    assert not any(v.requires_grad for v in out.stats.values())


@PHASES
def test_loss_weights(epoch):
    base = criterion()(predictions(), batch_of(BOXES, LABELS, epoch)).losses
    other = criterion(weight_cls=2.0, weight_iou=5.0, weight_dfl=1.0)(predictions(), batch_of(BOXES, LABELS, epoch)).losses
    for name in base:
        torch.testing.assert_close(other[name], 2 * base[name])


@PHASES
@pytest.mark.parametrize("boxes", [[[], []], [[], BOXES[0]]], ids=["both_empty", "one_empty"])
@pytest.mark.parametrize("amp", [False, True])
def test_images_without_boxes(epoch, boxes, amp, ppyoloe_exp):
    model = ppyoloe_exp(num_classes=4, static_assigner_epoch=5).get_model()
    batch = Batch(
        torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8),
        Targets.from_lists(boxes, [LABELS[0][: len(b)] for b in boxes]),
        epoch=epoch,
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = model(batch)
    out.total.backward()
    assert out.losses["loss_cls"] > 0
    assert all(v.isfinite() and v.dtype == torch.float32 for v in out.losses.values())
    if boxes == [[], []]:
        assert out.losses["loss_iou"] == out.losses["loss_dfl"] == out.stats["loss_l1"] == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@PHASES
def test_crowd_regions_carry_no_negative_loss(epoch):
    crowd = [[[0.0, 64, 64, 128]], []]
    with_crowd = batch_of(BOXES, LABELS, epoch, ignore=crowd)
    given = predictions()
    out = criterion()(given, with_crowd)
    assigned = criterion().assign(given, with_crowd)
    out.losses["loss_cls"].backward()
    x, y = GRID.points.T
    inside = (x > 0) & (x < 64) & (y > 64) & (y < 128)
    silent = given.class_logits.grad.abs().sum(-1) == 0
    assert torch.equal(silent[0], inside & ~assigned.positive[0])
    assert not silent[1].any()
    plain = criterion()(predictions(), batch_of(BOXES, LABELS, epoch))
    assert out.losses["loss_cls"] < plain.losses["loss_cls"]
    assert torch.equal(out.stats["score_sum"], plain.stats["score_sum"])
    assert torch.equal(out.losses["loss_iou"], plain.losses["loss_iou"])


@PHASES
def test_mix_up_weights_multiply_the_positives(epoch):
    def losses(weight):
        batch = batch_of([BOXES[1]], [LABELS[1]], epoch, weights=[[weight]])
        return criterion()(predictions(1), batch).losses

    full, half, none = losses(1.0), losses(0.5), losses(0.0)
    for name in ("loss_iou", "loss_dfl"):
        torch.testing.assert_close(half[name], full[name] / 2)
        assert none[name] == 0
    torch.testing.assert_close(half["loss_cls"], (full["loss_cls"] + none["loss_cls"]) / 2)


@PHASES
def test_half_precision_predictions_are_lifted_and_targets_stay(epoch, monkeypatch):
    seen = {}
    name = "assign_atss" if epoch < 5 else "assign_task_aligned"
    import mmdet.families.ppyoloe.loss as module

    original = getattr(module, name)

    def spy(*args, **options):
        seen["boxes"] = next(a for a in args if isinstance(a, Targets)).boxes.clone()
        seen["labels"] = next(a for a in args if isinstance(a, Targets)).labels.clone()
        return original(*args, **options)

    monkeypatch.setattr(module, name, spy)
    batch = batch_of([[[20.0, 20, 639.3, 100]]], [[2049]], epoch)
    given = predictions(1, 3000, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = criterion(3000)(given, batch)
    out.total.backward()
    assert all(v.dtype == torch.float32 and v.isfinite() for v in out.losses.values())
    assert seen["boxes"][0, 0, 2].item() == pytest.approx(639.3, abs=1e-4)
    assert seen["labels"].tolist() == [[2049]]
    assert given.class_logits.grad.isfinite().all()


@PHASES
def test_float64_stays(epoch):
    grid = make_points([(4, 4), (8, 8), (16, 16)], (32, 16, 8), dtype=torch.float64)
    given = predictions(dtype=torch.float64, grid=grid)
    out = criterion().double()(given, batch_of(BOXES, LABELS, epoch))
    assert out.total.dtype == torch.float64
    torch.testing.assert_close(out.total.float(), criterion()(predictions(), batch_of(BOXES, LABELS, epoch)).total)


def test_focal_is_selectable():
    out = criterion(class_loss="focal")(predictions(), batch_of(BOXES, LABELS, 0))
    assert out.losses["loss_cls"] > 0
    with pytest.raises(ValueError, match="class_loss must be 'varifocal' or 'focal', got 'bce'"):
        criterion(class_loss="bce")


@PHASES
@pytest.mark.parametrize("field", ["class_logits", "box_logits"])
def test_not_finite_predictions_are_named_and_the_losses_are_nan(epoch, field):
    given = predictions()
    with torch.no_grad():
        getattr(given, field)[1, 3] = float("inf")
    out = criterion()(given, batch_of(BOXES, LABELS, epoch))
    assert_spoilt(out, rf"{field}.*in images \[1\]", given[:2])


@PHASES
@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range_stop(epoch, label):
    with pytest.raises(ValueError, match=rf"labels \[{label}\] in the batch, but the model has 4 classes"):
        criterion()(predictions(), batch_of(BOXES, [[1, label], [0]], epoch))


MANY_BOXES = """
import resource, sys, torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[2:]
from mmdet.data.structures import Batch, Targets
from mmdet.families.ppyoloe.head import Predictions
from mmdet.families.ppyoloe.loss import PPYOLOECriterion
from mmdet.models.points import make_points

grid = make_points([(20, 20), (40, 40), (80, 80)], (32, 16, 8))
def run(boxes):
    images = torch.zeros(4, 3, 32, 32)
    count = torch.full((4,), boxes).tolist()
    corner = [torch.rand(n, 2) * 500 for n in count]
    rows = [torch.cat([c, c + 10 + torch.rand(len(c), 2) * 130], 1) for c in corner]
    targets = Targets.from_lists(rows, [torch.randint(4, (n,)) for n in count])
    logits = torch.zeros(4, 8400, 4, requires_grad=True), torch.zeros(4, 8400, 4, 17, requires_grad=True)
    out = PPYOLOECriterion(4, 5)(Predictions(*logits, *grid), Batch(images, targets, epoch=int(sys.argv[1])))
    out.total.backward()
    assert out.total.isfinite() and logits[1].grad.isfinite().all() and out.stats["num_pos"] > 100 * (boxes > 100)
run(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(600)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@PHASES
def test_600_boxes_in_each_image_stay_in_the_memory_bound(epoch):
    """Four images of 600 boxes at 640 px; more than one image would not fit into the bound at once."""
    paths = [p for p in sys.path if p]
    command = [sys.executable, "-c", MANY_BOXES, str(epoch), *paths]
    extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert extra < 256 * 2**20
