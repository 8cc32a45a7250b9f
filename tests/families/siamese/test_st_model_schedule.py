"""ST-10 and what else depends on the epoch alone: learning rates, phases, frozen parts, groups, fields."""

import math

import pytest
import torch
from track_run import SMALL

from mmdet.core.freeze import apply_frozen, train_mode
from mmdet.core.schedules import by_epoch, spaced
from mmdet.errors import UsageError
from mmdet.exp import get_exp
from mmdet.families.siamese.exp import SiameseExp

# design/siamese.md, B9: warm-up, then 36 values from 1e-4 to 1e-6 in equal ratios.
RATES = [4.000e-5, 5.030e-5, 6.325e-5, 7.953e-5] + [1e-4 * 0.01 ** (k / 35) for k in range(36)]


def exp_of(**values):
    exp = SiameseExp()
    for name, value in values.items():
        exp.set(name, value, "test")
    exp.validate()
    return exp


def test_learning_rates_of_the_recipe():
    exp = get_exp("siamese_repvgg_a0")
    with torch.device("meta"):
        optimizer = exp.get_optimizer(exp.get_model())
    base = {g["name"]: g["base_lr"] for g in optimizer.param_groups}
    assert base["rest"] == pytest.approx(1e-4, rel=1e-12) and base["backbone"] == 0.1 * base["rest"]
    factor = exp.get_lr_schedule(7850)
    rates = [base["rest"] * factor(epoch * 7850) for epoch in range(40)]
    assert rates[:4] == pytest.approx([1e-4 * 0.4 * 2.5 ** (k / 4) for k in range(4)], rel=1e-6)
    assert rates == pytest.approx(RATES, rel=1e-4) and rates[4:] == pytest.approx(RATES[4:], rel=1e-6)
    assert rates[4] == pytest.approx(1e-4) and rates[39] == pytest.approx(1e-6)
    for epoch in (0, 3, 4, 39):
        assert factor(epoch * 7850) == factor(epoch * 7850 + 7849)
    assert factor(40 * 7850) == factor(40 * 7850 - 1)


def test_curves_by_hand():
    assert spaced("linear", 1.0, 0.2, 5) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert spaced("log", 1.0, 0.01, 3) == pytest.approx([1, 0.1, 0.01])
    assert spaced("cos", 1.0, 0.0, 3) == pytest.approx([1, 0.5, 0])
    assert spaced("step", 1.0, 0.01, 6, step=3) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1])
    assert spaced("multi-step", 1.0, 0.01, 5, milestones=(2, 4)) == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert spaced("log", 0.5, 0.1, 1) == [0.5] and spaced("cos", 1.0, 0.1, 0) == []
    with pytest.raises(ValueError, match="expected one of log, linear, cos, step, multi-step"):
        spaced("poly", 1, 0, 3)
    factor = by_epoch([3.0, 2.0], 4)
    assert [factor(s) for s in (0, 3, 4, 7, 100)] == [3, 3, 2, 2, 2]


@pytest.mark.parametrize("curve", ["log", "linear", "cos", "step", "multi-step"])
@pytest.mark.parametrize("epochs", [1, 3, 4, 5, 40])
def test_every_curve_stays_between_0_and_1_however_long_the_run(curve, epochs):
    exp = exp_of(lr_curve=curve, max_epoch=epochs, lr_milestones=(3, 30))
    factor = exp.get_lr_schedule(2)
    values = [factor(s) for s in range(2 * epochs + 2)]
    assert all(0 < v <= 1 and math.isfinite(v) for v in values)


def test_milestones_count_from_the_start_of_training():
    exp = exp_of(lr_curve="multi-step", lr_milestones=(10, 20), lr_final=0.01, max_epoch=30)
    factor = exp.get_lr_schedule(1)
    assert [factor(e) for e in (4, 9, 10, 19, 20, 29)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_frozen_parts_are_a_function_of_the_epoch():
    recipe = get_exp("siamese_repvgg_a0")
    assert recipe.frozen(0) == recipe.frozen(29) == recipe.frozen(30) == (r"backbone\.",)
    staged = exp_of(freeze_epochs=3, train_stages=("stage2", "stage3"))
    assert staged.frozen(2) == (r"backbone\.",) and staged.frozen(3) == (r"backbone\.stage0\.", r"backbone\.stage1\.")
    assert get_exp("siamese_tiny").frozen(0) == ()


def test_every_parameter_has_its_group_from_the_start():
    """So that a resume on either side of the unfreezing finds the same groups."""
    exp = exp_of(**{**SMALL, "freeze_epochs": 3, "train_stages": ("stage3",)})
    model = exp.get_model()
    optimizer = exp.get_optimizer(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    sizes = {g["name"]: len(g["params"]) for g in optimizer.param_groups}
    assert sizes["backbone"] == len(list(model.backbone.parameters())) and sum(sizes.values()) == len(list(model.parameters()))
    assert {g["weight_decay"] for g in optimizer.param_groups} == {1e-4}
    assert isinstance(exp_of(optimizer="sgd").get_optimizer(model), torch.optim.SGD)


def test_ten_frozen_steps_leave_the_backbone_as_it_is_then_it_moves():
    """Parameters and statistics bit for bit, although ``train()`` is called every epoch. The reference's statistics drift."""
    torch.manual_seed(0)
    exp = exp_of(**{**SMALL, "freeze_epochs": 2, "train_stages": ("stage2", "stage3"), "clip_norm": 0.0})
    model = exp.get_model()
    optimizer = exp.get_optimizer(model)
    batch = exp.largest_batch(type("Loader", (), {"world": 1}))
    batch.templates.random_(0, 256)
    batch.searches.random_(0, 256)
    before = {k: v.clone() for k, v in model.backbone.state_dict().items()}

    def steps(epoch, count):
        apply_frozen(model, exp.frozen(epoch))
        train_mode(model, exp.frozen(epoch))
        for _ in range(count):
            model(batch).total.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    head = model.head.cls_pred.weight.clone()
    steps(0, 5)
    steps(1, 5)
    assert all(torch.equal(v, before[k]) for k, v in model.backbone.state_dict().items())
    assert not torch.equal(head, model.head.cls_pred.weight)
    steps(2, 2)
    after = model.backbone.state_dict()
    for name, value in after.items():
        still = torch.equal(value, before[name])
        assert still == name.startswith(("stage0", "stage1")), name


def test_phases_are_a_function_of_the_epoch():
    criterion = get_exp("siamese_repvgg_a0").get_model().criterion
    assert not criterion.mines(31) and criterion.mines(32) and criterion.mines(33)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train_stages", ("stage4",), "some of stage0, stage1, stage2, stage3"),
        ("neg_radius", 5.0, "0 < neg_radius <= pos_radius=4.0"),
        ("search_size", 250, "a multiple of 8 px"),
        ("loss_weights", (0.0, 0.0, 0.0, 0.0), "not all of them 0"),
        ("warmup_epochs", 1.5, "whole epochs"),
        ("lr_final", 0.0, "more than 0"),
        ("num_blocks", (0, 1, 1, 1), "at least 1 each"),
    ],
)
def test_values_that_cannot_work_are_refused(field, value, message):
    with pytest.raises(UsageError, match=message):
        exp_of(**{field: value})


def test_a_curve_by_milestones_needs_some():
    with pytest.raises(UsageError, match="lr_milestones=.*ascending epochs, one at least"):
        exp_of(lr_curve="multi-step")
