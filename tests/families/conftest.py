"""PP-YOLOE with the reference's name-seeded weights."""

import json

import numpy as np
import pytest
import torch
from shared import SHARED, name_seeded

from mmdet.core.checkpoint import load_pretrained
from mmdet.families.ppyoloe.exp import PPYOLOEExp, PPYOLOEPlusExp

SIZES = {"s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}


@pytest.fixture
def ppyoloe_exp():
    """``make(size, plus=False, **fields) -> Exp``."""

    def make(size="s", plus=False, **fields):
        exp = PPYOLOEPlusExp() if plus else PPYOLOEExp()
        depth, width = SIZES[size]
        for name, value in {"depth": depth, "width": width, **fields}.items():
            exp.set(name, value, "test")
        return exp

    return make


@pytest.fixture
def golden():
    """``read("ppyoloe/x.train.miemie") -> (arrays, scalars, facts)``; a dot in the stem is part of the name."""

    def read(name):
        path = SHARED / "golden" / f"{name}.json"
        described = json.loads(path.read_text())
        arrays = np.load(SHARED / "golden" / f"{name}.npz")
        return arrays, described["scalars"], described["facts"]

    return read


@pytest.fixture
def names_file():
    """``read("ppyoloe_crn_s.miemie")``: a names file as it stands."""
    return lambda name: json.loads((SHARED / f"golden/names/{name}.json").read_text())


@pytest.fixture
def reference_state(names_file):
    """``make("ppyoloe_crn_s")``: a state_dict in miemiedetection's layout with the reference's weights."""

    def make(name):
        rules = name_seeded()
        state = {}
        for key, shape, _ in names_file(f"{name}.miemie")["names"]:
            values = rules.fill(key, shape)
            state[key] = torch.zeros(shape) if values is None else torch.from_numpy(np.array(values).reshape(shape))
        return state

    return make


@pytest.fixture
def reference_model(ppyoloe_exp, reference_state):
    """``make(plus) -> (name, model)``: the s model, filled."""

    def make(plus):
        name = "ppyoloe_plus_crn_s" if plus else "ppyoloe_crn_s"
        model = ppyoloe_exp("s", plus).get_model()
        load_pretrained(model, reference_state(name), strict=True)
        return name, model

    return make


@pytest.fixture
def reference_images():
    """(2, 3, 160, 160) float32."""
    return torch.from_numpy(name_seeded().image((2, 3, 160, 160), seed=0))
