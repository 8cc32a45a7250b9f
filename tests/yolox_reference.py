"""YOLOX models with the reference's name-seeded weights."""

import json

import numpy as np
import torch
from shared import SHARED, name_seeded

from mmdet.core.checkpoint import load_pretrained
from mmdet.exp import get_exp

SIZES = ("yolox_nano", "yolox_tiny", "yolox_s", "yolox_m", "yolox_l", "yolox_x", "yolov3")


def published_names(name) -> list:
    """``[name, shape, dtype]`` of every tensor of Megvii's file, in order."""
    return json.loads((SHARED / f"golden/names/{name}.json").read_text())["names"]


def reference_state(name) -> dict:
    """A state_dict in Megvii's layout with the reference's weights."""
    rules, state = name_seeded(), {}
    for key, shape, _ in published_names(name):
        values = rules.fill(key, shape)
        state[key] = torch.zeros(shape) if values is None else torch.from_numpy(np.array(values).reshape(shape))
    return state


def reference_model(name, **fields):
    """The shipped exp's model, filled."""
    model = get_exp(name, fields).get_model()
    load_pretrained(model, reference_state(name), strict=True)
    return model


def reference_images() -> torch.Tensor:
    """(2, 3, 160, 160) float32."""
    return torch.from_numpy(name_seeded().image((2, 3, 160, 160), seed=0))


def golden(name):
    """(arrays, description) of a pair of reference files."""
    return np.load(SHARED / f"golden/{name}.npz"), json.loads((SHARED / f"golden/{name}.json").read_text())


def xyxy(boxes_cxcywh: torch.Tensor) -> torch.Tensor:
    """Boxes (..., 4)."""
    center, side = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:4]
    return torch.cat([center - side / 2, center + side / 2], -1)
