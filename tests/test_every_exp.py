"""Every shipped exp builds, trains a step and detects, at a small size, and keeps the promises of the docstrings."""

import ast

import pytest
import torch

from mmdet.data.structures import Batch, Detections, LossOutput, Targets
from mmdet.exp import exp_of_checkpoint, exp_state, get_exp
from mmdet.exp.detection import DetectionExp
from mmdet.exp.load import shipped_dir, shipped_names

SMALL = ["num_classes=3", "input_size=96", "test_size=96"]
# Sizes of one family differ in depth and width alone; the largest ones are only built (see test_it_builds).
# What is no detector is trained in its family's tests.
DETECTORS = [n for n in shipped_names() if isinstance(get_exp(n), DetectionExp)]
TRAINED = [n for n in DETECTORS if not n.endswith(("_l", "_x", "_m", "_r101vd"))]


def batch_of(size=96, epoch=0):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    targets = Targets.from_lists([[[10, 12, 50, 60], [40, 40, 90, 80]], []], [[0, 2], []])
    return Batch(images, targets, epoch=epoch)


@pytest.mark.parametrize("name", shipped_names())
def test_the_file_is_short_and_says_what_to_expect(name):
    source = (shipped_dir() / f"{name}.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source))
    parts = len(getattr(get_exp(name), "tasks", "1"))  # a file that describes several tasks may be as many times as long
    assert (
        source.count("\n") <= 30 * parts
        and f"python tools/train.py -f exps/{name}.py" in text
        and ("AP" in text or "AUC" in text)
    )


@pytest.mark.parametrize("name", shipped_names())
def test_it_builds(name):
    exp = get_exp(name)
    with torch.device("meta"):
        model = exp.get_model()
    assert sum(p.numel() for p in model.parameters()) > 3e5
    again = exp_of_checkpoint({"exp": exp_state(exp)})
    assert again.values() == exp.values()
    factor = exp.get_lr_schedule(10)
    assert all(0 <= factor(s) <= 1 for s in range(0, exp.max_epoch * 10, 97)) and factor(exp.max_epoch * 5) > 0
    assert name not in DETECTORS or all(w % 32 == h % 32 == 0 for h, w in exp.train_sizes())


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_and_detects(name):
    exp = get_exp(name, SMALL)
    model = exp.get_model().train()
    optimizer = exp.get_optimizer(model)
    grouped = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == len(list(model.parameters()))
    for epoch in (0, exp.max_epoch - 1):
        out = model(batch_of(epoch=epoch))
        assert isinstance(out, LossOutput) and out.total.shape == () and out.total.dtype == torch.float32
        assert all(v.shape == () and torch.isfinite(v) for v in {**out.losses, **out.stats}.values())
        model.zero_grad()
        out.total.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    exp.get_parallel().clip(model)
    optimizer.step()

    model.eval()
    batch = batch_of()
    with torch.no_grad():
        boxes, scores = model.decode(batch.images)
        found = model(Batch(batch.images))
    assert boxes.dtype == scores.dtype == torch.float32
    assert boxes.shape[0] == 2 and boxes.shape[2] == 4 and scores.shape == (2, boxes.shape[1], 3)
    assert scores.min() >= 0 and scores.max() <= 1
    for d in found:
        assert isinstance(d, Detections) and d.boxes.shape == (len(d), 4) and d.scores.shape == d.labels.shape == (len(d),)
        assert d.labels.dtype == torch.int64 and (d.scores.diff() <= 0).all() and len(d) <= exp.keep_top_k


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_images_without_boxes(name, amp):
    """Case N04: both images without boxes, then one; finite losses, box terms 0, a finite gradient everywhere."""
    exp = get_exp(name, SMALL)
    model = exp.get_model().train()
    images = batch_of().images
    for lists in (([[], []], [[], []]), ([[], [[5, 5, 60, 60]]], [[], [1]])):
        for epoch in (0, exp.max_epoch - 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp == "bf16"):
                out = model(Batch(images, Targets.from_lists(*lists), epoch=epoch))
            model.zero_grad()
            out.total.backward()
            assert all(torch.isfinite(v) and v.dtype == torch.float32 for v in out.losses.values())
            assert sum(v for k, v in out.losses.items() if k in ("loss_cls", "loss_obj")) > 0
            if not any(lists[0]):
                assert all(v == 0 for k, v in out.losses.items() if k not in ("loss_cls", "loss_obj"))
            assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
