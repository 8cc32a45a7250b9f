"""A batch in parts: with the whole batch's normalisers their gradients add up to its own."""

import pytest
import torch
from frozen import freeze_norms

from mmdet.core.normalizers import image_normalizer, mean_normalizers, record_normalizers, use_normalizers
from mmdet.data.structures import Batch, Targets
from mmdet.exp import get_exp

# (N, 4) px and labels of five images: small and large boxes, one image without any.
BOXES = [
    [[4, 6, 60, 50], [40, 30, 90, 90]],
    [[10, 10, 30, 34]],
    [],
    [[2, 2, 94, 94], [50, 8, 70, 30], [8, 60, 28, 84]],
    [[30, 30, 66, 70]],
]
LABELS = [[0, 1], [2], [], [1, 0, 2], [2]]
EXPS = {
    "ppyoloe_s": ["width=0.25"],
    "yolox_nano": ["max_epoch=1"],  # the epoch with the L1 loss
    "ppyolo_r18vd": ["keep_prob=1"],  # DropBlock draws for the whole batch at once
    "fcos_r50": ["channels=64", "norm=batch", "freeze_at=0"],
}


def model_of(name, *words):
    torch.manual_seed(0)
    model = get_exp(f"exps/{name}.py", ["num_classes=3", *EXPS[name], *words]).get_model()
    return freeze_norms(model).double().train()


def batch_of(rows, epoch=0):
    images = torch.randn((5, 3, 96, 96), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    boxes = [torch.tensor(BOXES[i], dtype=torch.float32).reshape(-1, 4) for i in rows]
    targets = Targets.from_lists(boxes, [torch.tensor(LABELS[i], dtype=torch.int64) for i in rows])
    return Batch(images[list(rows)], targets, epoch=epoch)


def gradients(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("name", "words", "epoch"),
    [
        ("ppyoloe_s", (), 0),
        ("ppyoloe_s", ("static_assigner_epoch=0",), 0),
        ("yolox_nano", (), 0),
        ("ppyolo_r18vd", (), 0),
        ("fcos_r50", (), 0),
        ("fcos_r50", ("quality=iou",), 0),
    ],
)
def test_gradients_of_unequal_parts_add_up_to_the_batchs(name, words, epoch):
    model = model_of(name, *words)
    out = model(batch_of(range(5), epoch))
    out.total.backward()
    whole = gradients(model)

    parts = [batch_of(rows, epoch) for rows in ([0, 1], [2], [3, 4])]
    records, sums = [], {}
    for part in parts:
        with torch.no_grad(), record_normalizers() as record:
            model(part)
        records.append(record)
    for part in parts:
        with use_normalizers(records):
            losses = model(part)
        losses.total.backward()
        for key, value in losses.losses.items():
            sums[key] = sums.get(key, 0) + value.detach()
    added = gradients(model)

    assert (added - whole).norm() / whole.norm() < 1e-10
    for key, value in out.losses.items():
        torch.testing.assert_close(sums[key], value.detach(), rtol=1e-10, atol=0)
    for part in parts:  # what the recipe's own accumulation does, each part with its own normaliser, is something else
        (model(part).total * len(part.images) / 5).backward()
    assert name == "ppyolo_r18vd" or (gradients(model) - whole).norm() / whole.norm() > 1e-3


def test_hand_computed_values():
    with record_normalizers() as first:
        assert mean_normalizers(torch.tensor(0), torch.tensor(2.5)) == (1.0, 2.5)
        assert image_normalizer(3, torch.zeros(1)) == 3
    with record_normalizers() as second:
        mean_normalizers(torch.tensor(0.25), torch.tensor(4.0))
        image_normalizer(1, torch.zeros(1, dtype=torch.bfloat16))
    with use_normalizers([first, second]):
        assert mean_normalizers(torch.tensor(9.0), torch.tensor(9.0)) == (1.0, 6.5)  # at least 1, of the sum
        assert image_normalizer(9, torch.zeros(1)) == 4
    assert mean_normalizers(torch.tensor(9)) == (9.0,)


def test_other_calls_than_the_recorded_ones_are_an_error():
    with record_normalizers() as record:
        mean_normalizers(torch.tensor(2.0))
    with use_normalizers([record]):
        with pytest.raises(RuntimeError, match="other normalisers than"):
            mean_normalizers(torch.tensor(2.0), torch.tensor(3.0))
        with pytest.raises(RuntimeError, match="other normalisers than"):
            image_normalizer(2, torch.zeros(1))


def test_an_error_inside_leaves_nothing_behind():
    for context in (record_normalizers, lambda: use_normalizers([])):
        with pytest.raises(ZeroDivisionError), context():
            raise ZeroDivisionError
    assert mean_normalizers(torch.tensor(3.0)) == (3.0,)
