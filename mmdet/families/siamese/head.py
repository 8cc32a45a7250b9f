"""The head: at every point the score that the target is there, and the distances to its sides."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, nn

from mmdet.families.siamese.layers import rep_stack
from mmdet.models.boxes import at_least_float32

MAX_DISTANCE = 1e4  # px; beyond it a distance says nothing (design/siamese.md, B2)
_LOG_MAX = math.log(MAX_DISTANCE)


class Predictions(NamedTuple):
    """What the network says, before any softmax."""

    logits: Tensor  # (B, 2, H', W'): not the target, the target
    ltrb: Tensor  # (B, 4, H', W') px of the search crop, at least float32: distances to left, top, right, bottom; above 0

    def scores(self) -> Tensor:
        """(B, H', W') in [0, 1], at least float32: that the target is there."""
        return at_least_float32(self.logits).softmax(1)[:, 1]


class LTRBHead(nn.Module):
    """Correlation beside search features (B, in, H', W') -> Predictions.

    Three blocks bring both together, then a tower each for class and box.

    Args:
        in_channels: of correlation and search features together.
        channels: C of towers.
        prior_distance: px, what a fresh head predicts for every distance; the crop's geometry makes it half the target's side.
        num_blocks: that bring correlation and features together.
        tower_blocks: of each tower.
    """

    def __init__(
        self, in_channels: int, channels: int, prior_distance: float, num_blocks: int = 3, tower_blocks: int = 4
    ) -> None:
        super().__init__()
        self.merge = rep_stack(in_channels, channels, num_blocks)
        self.cls_tower = rep_stack(channels, channels, tower_blocks)
        self.reg_tower = rep_stack(channels, channels, tower_blocks)
        self.cls_pred = nn.Conv2d(channels, 2, 3, padding=1)
        self.reg_pred = nn.Conv2d(channels, 4, 3, padding=1)
        for part in (self.cls_tower, self.reg_tower, self.cls_pred, self.reg_pred):
            for layer in part.modules():
                if isinstance(layer, nn.Conv2d):
                    nn.init.normal_(layer.weight, std=0.01)  # design/siamese.md, B2
        nn.init.zeros_(self.cls_pred.bias)
        nn.init.constant_(self.reg_pred.bias, math.log(prior_distance))

    def forward(self, x: Tensor) -> Predictions:
        x = self.merge(x)
        logits = self.cls_pred(self.cls_tower(x))
        exponent = self.reg_pred(self.reg_tower(x))
        # The exponent is clamped, not the distance: the gradient of exp(inf) is NaN.
        return Predictions(logits, at_least_float32(exponent).clamp(max=_LOG_MAX).exp())
