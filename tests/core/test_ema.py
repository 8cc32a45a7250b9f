"""The averages equal the reference values and closed forms."""

import math

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared
from torch import nn

from mmdet.core.ema import EMA, exponential_decay, threshold_decay


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def run(ema, model, values):
    ema.attach(model)
    seen = []
    for value in values:
        model.p.data.fill_(value)
        model.count += 1
        ema.update(model)
        seen.append(ema._average["p"].item())
    return seen


VALUES = [math.sin(0.01 * k) for k in range(1, 2001)]


@needs_shared
@pytest.mark.parametrize("kind", ["threshold", "normal", "exponential"])
def test_equal_to_reference(kind):
    data = np.load(SHARED / "golden/pure/ema.miemie.npz")
    decay = {"threshold": threshold_decay(0.9998), "normal": lambda s: 0.9998, "exponential": exponential_decay(0.9998)}[kind]
    np.testing.assert_allclose([decay(s) for s in range(2000)], data[f"ppdet_{kind}_decay"], rtol=0, atol=1e-12)
    ema = EMA(decay, start="zero", correct=kind != "exponential")
    np.testing.assert_allclose(run(ema, One(), VALUES), data[f"ppdet_{kind}_raw_value"], atol=2e-6)
    wanted = {"threshold": -0.01013195514678955, "normal": 0.017285363748669624, "exponential": 0.9056037664413452}[kind]
    if kind != "exponential":
        assert ema.averaged()["p"].item() == pytest.approx(wanted, abs=2e-6)


@needs_shared
def test_equal_to_the_reference_that_starts_from_a_copy():
    data = np.load(SHARED / "golden/pure/ema.miemie.npz")
    model = One()
    ema = EMA.of_type("exponential", 0.9998)
    seen = run(ema, model, VALUES)
    np.testing.assert_allclose(seen, data["yolox_ema_value_0.9998"], atol=5e-6)


def test_ten_steps_in_closed_form():
    ema = EMA(lambda s: 0.9, start="copy")
    values = [float(v) for v in range(1, 11)]
    seen = run(ema, One(), values)
    wanted = 0.0
    for v in values:
        wanted = 0.9 * wanted + 0.1 * v
    assert seen[-1] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("start", ["copy", "zero"])
def test_reading_changes_nothing_and_integers_follow_the_model(start):
    model = One()
    ema = EMA(threshold_decay(0.999), start=start, correct=start == "zero")
    run(ema, model, [1.0, 2.0, 3.0])
    before = ema._average["p"].clone()
    module = ema.module(model)
    assert module.p.item() == pytest.approx(ema.averaged()["p"].item())
    assert module.count.item() == 3 and not module.training
    assert model.p.item() == 3.0 and torch.equal(ema._average["p"], before)


def test_state_restores_exactly():
    model, other = One(), One()
    ema, again = (EMA.of_type("threshold", 0.9998) for _ in range(2))
    run(ema, model, VALUES[:50])
    again.attach(other)
    again.load_state_dict(ema.state_dict(model))
    assert again.updates == 50 and torch.equal(again._average["p"], ema._average["p"])


def test_cycle_starts_again():
    model = One()
    ema = EMA.of_type("threshold", 0.9998, cycle_epochs=2)
    run(ema, model, [5.0] * 10)
    ema.start_epoch(model, 1)
    assert ema.updates == 10
    ema.start_epoch(model, 2)
    assert ema.updates == 0 and ema.module(model).p.item() == 5.0
