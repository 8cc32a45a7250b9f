"""The head of PP-YOLO and PP-YOLOv2: one 1x1 convolution per level. B images, A cells of all levels, C classes, n anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.families.ppyolo.anchors import Anchors
from mmdet.models.boxes import at_least_float32
from mmdet.models.layers import init_he

EPS = 1e-7  # scores of objects stay this far from 0 and 1 with the IoU branch (PaddleDetection 666f597, yolo_head.py)


class Predictions(NamedTuple):
    """What the head says: raw maps (B, n * (5 + C), H_l, W_l), coarse first.

    Of each anchor x, y, w, h, object, then the classes. With the IoU branch n channels come before all that.
    """

    maps: tuple[Tensor, ...]


class PPYOLOHead(nn.Module):
    """Maps (B, C_l, H_l, W_l), coarse first -> Predictions.

    Args:
        in_channels: of the maps.
        num_classes: C.
        anchors: sizes, levels and strides.
        iou_aware: a branch that predicts the IoU of each box (arXiv 1912.05992).
        iou_aware_factor: its exponent in the score; the object's is one minus that.
        scale_x_y: how far a centre may leave its cell.
        clip: decoded boxes end at the image's border.
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        num_classes: int,
        anchors: Anchors,
        iou_aware: bool = True,
        iou_aware_factor: float = 0.4,
        scale_x_y: float = 1.05,
        clip: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.anchors = anchors
        self.iou_aware = iou_aware
        self.iou_aware_factor = iou_aware_factor
        self.scale_x_y = scale_x_y
        self.clip = clip
        channels = anchors.per_level * (5 + num_classes + int(iou_aware))
        self.outputs = nn.ModuleList(nn.Conv2d(c, channels, 1) for c in in_channels)
        init_he(self)

    def forward(self, features: list[Tensor]) -> Predictions:
        return Predictions(tuple(output(x) for output, x in zip(self.outputs, features, strict=True)))

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """boxes (B, A, 4) xyxy px and scores (B, A, C) in [0, 1], object times class; at least float32."""
        levels = [self.decode_level(raw, level) for level, raw in enumerate(predictions.maps)]
        boxes, scores = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        return boxes, scores

    def decode_level(self, raw: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The same for the cells of one level."""
        rest, ious = self.anchors.split(at_least_float32(raw), self.iou_aware)
        boxes = self.anchors.decode(rest[:, :, :4], level, self.scale_x_y).flatten(1, 3)
        if self.clip:
            height, width = (side * self.anchors.strides[level] for side in raw.shape[-2:])
            x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
            boxes = torch.stack([x, y], -1).flatten(-2)
        scores = self._object_scores(rest[:, :, 4], ious).unsqueeze(2) * rest[:, :, 5:].sigmoid()
        return boxes, scores.movedim(2, -1).flatten(1, 3)

    def _object_scores(self, objects: Tensor, ious: Tensor | None) -> Tensor:
        """Logits (B, n, H, W) -> scores, as a weighted geometric mean with the predicted IoU where there is one."""
        if ious is None:
            return objects.sigmoid()
        factor = self.iou_aware_factor
        mixed = F.logsigmoid(objects) * (1 - factor) + F.logsigmoid(ious) * factor
        return mixed.exp().clamp(EPS, 1 - EPS)
