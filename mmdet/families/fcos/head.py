"""The head of FCOS: one head for all levels (arXiv 1904.01355, section 3; centre-ness on the regression branch as in its
improved version, arXiv 2006.09214, section 3.1). B images, A points over all levels, fine first, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.boxes import at_least_float32
from mmdet.models.deform import deformable, offset_conv, zero_init
from mmdet.models.points import PointCache, distances_to_boxes

PRIOR = 0.01  # score of every class at the start (arXiv 1708.02002, section 4.1): bias -log(99)
NUM_CONVS = 4
NUM_GROUPS = 32  # of the group norms (design/recipes.md, 3.4)


class Predictions(NamedTuple):
    """What the head says about every point."""

    class_logits: Tensor  # (B, A, C)
    distances: Tensor  # (B, A, 4) left, top, right, bottom, in strides, 0 or more, at least float32
    centerness_logits: Tensor  # (B, A)
    points: Tensor  # (A, 2) x, y px
    strides: Tensor  # (A, 1) px
    level_sizes: tuple[int, ...]  # points of each level


class ConvGN(nn.Module):
    """3x3 convolution with bias, group norm, ReLU: (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int, deform: bool = False) -> None:
        super().__init__()
        self.conv_offset = offset_conv(channels) if deform else None
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(NUM_GROUPS, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if self.conv_offset is None else deformable(x, self.conv, self.conv_offset)
        return F.relu(self.norm(x), inplace=True)


class FCOSHead(nn.Module):
    """Maps (B, channels, H_l, W_l), fine first -> Predictions. ``scales`` holds a learned factor of the distances per level.

    Args:
        channels: of every map; a multiple of 32.
        num_classes: C.
        strides: of the levels, px.
        deform: deformable convolutions in both towers.
    """

    def __init__(
        self, channels: int, num_classes: int, strides: Sequence[int] = (8, 16, 32, 64, 128), deform: bool = False
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.strides = tuple(strides)
        self.points = PointCache(strides)
        self.cls_convs = nn.Sequential(*(ConvGN(channels, deform) for _ in range(NUM_CONVS)))
        self.reg_convs = nn.Sequential(*(ConvGN(channels, deform) for _ in range(NUM_CONVS)))
        self.cls_pred = nn.Conv2d(channels, num_classes, 3, padding=1)
        self.reg_pred = nn.Conv2d(channels, 4, 3, padding=1)
        self.ctn_pred = nn.Conv2d(channels, 1, 3, padding=1)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in strides)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 0.01 (RetinaNet's, arXiv 1708.02002, section 4.1), every class at PRIOR."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        for layer in (*self.cls_convs, *self.reg_convs):
            if layer.conv_offset is not None:
                zero_init(layer.conv_offset)
        nn.init.constant_(self.cls_pred.bias, -math.log((1 - PRIOR) / PRIOR))

    def forward(self, features: list[Tensor]) -> Predictions:
        class_maps, distance_maps, centerness_maps = [], [], []
        for x, scale in zip(features, self.scales, strict=True):
            class_maps.append(_rows(self.cls_pred(self.cls_convs(x))))
            box = self.reg_convs(x)
            distance_maps.append(F.relu(at_least_float32(_rows(self.reg_pred(box))) * scale))
            centerness_maps.append(_rows(self.ctn_pred(box)).squeeze(2))
        maps = (torch.cat(parts, 1) for parts in (class_maps, distance_maps, centerness_maps))
        return Predictions(*maps, *self.points(features))

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """boxes (B, A, 4) xyxy px and scores (B, A, C) in [0, 1], class score times centre-ness, at least float32; boxes are not
        clipped to the image."""
        boxes = distances_to_boxes(predictions.points, predictions.distances * predictions.strides)
        quality = at_least_float32(predictions.centerness_logits).sigmoid().unsqueeze(-1)
        return boxes, at_least_float32(predictions.class_logits).sigmoid() * quality


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H * W, C)."""
    return x.flatten(2).transpose(1, 2)
