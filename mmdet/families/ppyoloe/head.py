"""The efficient task-aligned head of PP-YOLOE (arXiv 2203.16250, section 2.2).

B images, A points over all levels (strides 32, 16, 8 in this order), C classes, R largest distance in strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.boxes import at_least_float32
from mmdet.models.layers import ConvBNAct, init_he
from mmdet.models.points import PointCache, distances_to_boxes

PRIOR = 0.01  # score of every class at the start (arXiv 1708.02002, section 4.1): bias -log(99)


class Predictions(NamedTuple):
    """What the head says about every point."""

    class_logits: Tensor  # (B, A, C)
    box_logits: Tensor  # (B, A, 4, R + 1): distributions of the distances left, top, right, bottom, in strides
    points: Tensor  # (A, 2) x, y px
    strides: Tensor  # (A, 1) px
    level_sizes: tuple[int, ...]  # points of each level


def expected_distances(box_logits: Tensor, bins: Tensor) -> Tensor:
    """Mean of each side's distribution: (..., 4, R + 1) logits and (R + 1,) bins -> (..., 4), at least float32."""
    return F.softmax(at_least_float32(box_logits), -1) @ bins.to(torch.promote_types(box_logits.dtype, torch.float32))


class ESEAttention(nn.Module):
    """Channel attention from the pooled map, then a convolution: (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)
        self.conv = ConvBNAct(channels, channels)

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        return self.conv(x * self.fc(pooled).sigmoid())


class ETHead(nn.Module):
    """Maps (B, C_l, H_l, W_l), coarse first -> Predictions. ``proj`` (R + 1,) holds the bins 0..R; it is a constant and in no
    checkpoint."""

    def __init__(
        self, in_channels: Sequence[int], num_classes: int, strides: Sequence[int] = (32, 16, 8), reg_max: int = 16
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.reg_max = reg_max
        self.strides = tuple(strides)
        self.points = PointCache(strides)
        self.stem_cls = nn.ModuleList(ESEAttention(c) for c in in_channels)
        self.stem_reg = nn.ModuleList(ESEAttention(c) for c in in_channels)
        self.pred_cls = nn.ModuleList(nn.Conv2d(c, num_classes, 3, padding=1) for c in in_channels)
        self.pred_reg = nn.ModuleList(nn.Conv2d(c, 4 * (reg_max + 1), 3, padding=1) for c in in_channels)
        self.register_buffer("proj", torch.arange(reg_max + 1, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The recipe's start: every class at PRIOR, every side's distribution flat, attention near one half."""
        init_he(self)
        for stem in (*self.stem_cls, *self.stem_reg):
            nn.init.normal_(stem.fc.weight, std=0.001)
        for layers, bias in ((self.pred_cls, -math.log((1 - PRIOR) / PRIOR)), (self.pred_reg, 1.0)):
            for layer in layers:
                nn.init.zeros_(layer.weight)
                nn.init.constant_(layer.bias, bias)

    def forward(self, features: list[Tensor]) -> Predictions:
        class_maps, box_maps = [], []
        for i, x in enumerate(features):
            pooled = x.mean((2, 3), keepdim=True)
            class_maps.append(self.pred_cls[i](self.stem_cls[i](x, pooled) + x).flatten(2).transpose(1, 2))
            box_maps.append(self.pred_reg[i](self.stem_reg[i](x, pooled)).flatten(2).transpose(1, 2))
        box_logits = torch.cat(box_maps, 1).unflatten(2, (4, self.reg_max + 1))
        return Predictions(torch.cat(class_maps, 1), box_logits, *self.points(features))

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """boxes (B, A, 4) xyxy px and scores (B, A, C) in [0, 1], at least float32; boxes are not clipped to the image."""
        distances = expected_distances(predictions.box_logits, self.proj) * predictions.strides
        return distances_to_boxes(predictions.points, distances), at_least_float32(predictions.class_logits).sigmoid()
