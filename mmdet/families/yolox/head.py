"""The decoupled head of YOLOX (arXiv 2107.08430, section 2.1).

B images, A points over all levels (strides 8, 16, 32 in this order), C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmdet.families.yolox.layers import Act, conv3x3
from mmdet.models.boxes import at_least_float32
from mmdet.models.layers import ConvBNAct
from mmdet.models.points import PointCache

PRIOR = 0.01  # objectness and score of every class at the start (arXiv 1708.02002, section 4.1): bias -log(99)


class Predictions(NamedTuple):
    """What the head says about every point."""

    class_logits: Tensor  # (B, A, C)
    obj_logits: Tensor  # (B, A)
    box_codes: Tensor  # (B, A, 4): centre from the cell's corner, in strides; log of width and height, in strides
    points: Tensor  # (A, 2) x, y px, centres of the cells
    strides: Tensor  # (A, 1) px
    level_shapes: tuple[tuple[int, int], ...]  # (h, w) of each level in cells


def decode_boxes(box_codes: Tensor, points: Tensor, strides: Tensor) -> Tensor:
    """Codes (..., 4) at points (..., 2) px and strides (..., 1) px -> boxes (..., 4) xyxy px, at least float32; not clipped."""
    codes = at_least_float32(box_codes)
    centers = codes[..., :2] * strides + (points - strides / 2)
    half = codes[..., 2:].exp() * strides / 2
    return torch.cat([centers - half, centers + half], -1)


def encode_boxes(boxes: Tensor, points: Tensor, strides: Tensor, eps: float = 1e-8) -> Tensor:
    """Boxes (..., 4) xyxy px -> the codes that decode to them; ``eps`` keeps the logarithm of an empty side finite."""
    centers = (boxes[..., :2] + boxes[..., 2:]) / 2
    sides = boxes[..., 2:] - boxes[..., :2]
    return torch.cat([centers / strides - (points / strides - 0.5), (sides / strides + eps).log()], -1)


class DecoupledHead(nn.Module):
    """Maps (B, C_l, H_l, W_l), fine first -> Predictions. Classes, and boxes with objectness, have branches of their own."""

    def __init__(
        self,
        in_channels: Sequence[int],
        num_classes: int,
        channels: int = 256,
        strides: Sequence[int] = (8, 16, 32),
        depthwise: bool = False,
        act: Act = nn.SiLU,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.strides = tuple(strides)
        self.points = PointCache(strides)

        def branch() -> nn.Sequential:
            return nn.Sequential(*[conv3x3(channels, channels, depthwise=depthwise, act=act) for _ in range(2)])

        def predictor(out_channels: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Conv2d(channels, out_channels, 1) for _ in in_channels)

        self.stems = nn.ModuleList(ConvBNAct(c, channels, act=act) for c in in_channels)
        self.cls_convs = nn.ModuleList(branch() for _ in in_channels)
        self.reg_convs = nn.ModuleList(branch() for _ in in_channels)
        self.cls_preds = predictor(num_classes)
        self.reg_preds = predictor(4)
        self.obj_preds = predictor(1)
        self.reset_priors()

    def reset_priors(self) -> None:
        """Every class and the objectness start at PRIOR."""
        for layer in (*self.cls_preds, *self.obj_preds):
            nn.init.constant_(layer.bias, -math.log((1 - PRIOR) / PRIOR))

    def forward(self, features: list[Tensor]) -> Predictions:
        classes, objectness, codes = [], [], []
        for i, x in enumerate(features):
            x = self.stems[i](x)
            box_features = self.reg_convs[i](x)
            classes.append(_rows(self.cls_preds[i](self.cls_convs[i](x))))
            objectness.append(_rows(self.obj_preds[i](box_features)))
            codes.append(_rows(self.reg_preds[i](box_features)))
        points, strides, _ = self.points(features)
        shapes = tuple((int(f.shape[-2]), int(f.shape[-1])) for f in features)
        logits = torch.cat(classes, 1), torch.cat(objectness, 1).squeeze(2)
        return Predictions(*logits, torch.cat(codes, 1), points, strides, shapes)

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """boxes (B, A, 4) xyxy px and scores (B, A, C) = objectness x class in [0, 1], at least float32."""
        objectness = at_least_float32(predictions.obj_logits).sigmoid().unsqueeze(2)
        scores = at_least_float32(predictions.class_logits).sigmoid() * objectness
        return decode_boxes(predictions.box_codes, predictions.points, predictions.strides), scores


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H * W, C)."""
    return x.flatten(2).transpose(1, 2)
