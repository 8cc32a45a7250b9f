"""Parameter groups by rule, clipping (case N01) and schedules against the reference curves."""

import json

import pytest
import torch
from shared import SHARED, needs_shared
from torch import nn

from mmdet.core.optim import ParamRule, build_param_groups, group_parameters
from mmdet.core.parallel import Parallel
from mmdet.core.schedules import warmup_cosine, warmup_multistep


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Linear(4, 2))


def test_first_match_wins_and_every_parameter_is_in_one_group():
    rules = (ParamRule("norm", norm=True, decay_factor=0.0), ParamRule("slow", pattern=r"^0\.", lr_factor=0.1))
    groups = build_param_groups(small(), rules, lr=0.2, weight_decay=1e-3)
    assert {g["name"]: len(g["params"]) for g in groups} == {"norm": 4, "slow": 2, "rest": 2}
    by_name = {g["name"]: g for g in groups}
    assert by_name["slow"]["base_lr"] == pytest.approx(0.02) and by_name["norm"]["weight_decay"] == 0
    assert sum(len(p) for p in group_parameters(small(), rules).values()) == 8


def test_a_shared_parameter_is_counted_once():
    model = small()
    model.append(model[3])
    assert sum(len(p) for p in group_parameters(model, ()).values()) == 8


def test_clipping_sees_unscaled_gradients():
    """Case N01: loss 3w, lr 0.1, clip 1, loss scale 65536 -> w = -0.1; the trainer unscales before it clips."""
    w = nn.Parameter(torch.zeros(()))
    model = nn.Module()
    model.w = w
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(3 * w).backward()
    scaler.unscale_(optimizer)
    norms = Parallel(clip_norm=1.0).clip(model)
    scaler.step(optimizer)
    assert norms["all"].item() == pytest.approx(3.0)
    assert w.item() == pytest.approx(-0.1, abs=1e-6)


def test_clipping_per_group_and_without_limit():
    model = small()
    rules = (ParamRule("norm", norm=True),)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    free = Parallel().clip(model)
    assert free["all"].item() == pytest.approx(sum(p.numel() for p in model.parameters()) ** 0.5)
    assert all((p.grad == 1).all() for p in model.parameters())
    norms = Parallel(clip_norm=2.0, clip_groups=lambda m: group_parameters(m, rules)).clip(model)
    assert norms["norm"].item() == pytest.approx(4.0)
    after = torch.cat([p.grad.flatten() for p in (*model[1].parameters(), *model[2].parameters())]).norm()
    assert after.item() == pytest.approx(2.0, rel=1e-4)


@needs_shared
def test_schedules_equal_the_reference_curves():
    curves = json.loads((SHARED / "golden/pure/lr.miemie.json").read_text())["scalars"]
    checked = 0
    for name, points in curves.items():
        if not name.startswith("warm_cosinedecay"):
            continue
        words = dict(w.split("=") for w in name.split()[1:] if "=" in w)
        lr, warm = float(words["lr"]), float(words["warm"]) * 100
        factor = warmup_cosine(warm, float(words["cos"]) * 100, float(words.get("start", 0)))
        for step, value in points:
            assert lr * factor(step) == pytest.approx(value, rel=1e-9, abs=1e-15), (name, step)
        checked += 1
    assert checked >= 2


def test_multistep():
    factor = warmup_multistep(10, [20, 30], start=1 / 3)
    assert [factor(s) for s in (0, 10, 19, 20, 30)] == pytest.approx([1 / 3, 1, 1, 0.1, 0.01])
