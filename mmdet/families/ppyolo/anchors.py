"""Anchors and cells: where the head's channels lie in the image.

B images, L levels (coarse first), n anchors of a level, K anchors of all levels, H and W cells of a level. A is the number of
cell-and-anchor pairs of all levels, in the order level, anchor, row, column (that of the reference's files); one such pair is
called a cell for short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmdet.models.boxes import at_least_float32
from mmdet.models.points import make_points


class Anchors(nn.Module):
    """Sizes of the anchors and the levels that they belong to; constants, in no checkpoint.

    Args:
        sizes: (width, height) px of the K anchors.
        masks: for each level, coarse first, the indexes of its n anchors; every anchor belongs to one level.
        strides: px, of each level.

    Raises:
        ValueError: the three do not fit together.
    """

    def __init__(
        self, sizes: Sequence[tuple[float, float]], masks: Sequence[Sequence[int]], strides: Sequence[int] = (32, 16, 8)
    ) -> None:
        super().__init__()
        if sorted(i for mask in masks for i in mask) != list(range(len(sizes))):
            raise ValueError(f"anchor masks {masks} must name each of the {len(sizes)} anchors once")
        if len(masks) != len(strides) or len({len(mask) for mask in masks}) != 1:
            raise ValueError(f"{len(strides)} levels need as many anchor masks of equal length, got {masks}")
        self.masks = tuple(map(tuple, masks))
        self.strides = tuple(strides)
        self.per_level = len(self.masks[0])
        places = {index: (level, slot) for level, mask in enumerate(masks) for slot, index in enumerate(mask)}
        self.register_buffer("sizes", torch.tensor(sizes, dtype=torch.float32), persistent=False)  # (K, 2)
        self.register_buffer("places", torch.tensor([places[i] for i in range(len(sizes))]), persistent=False)  # level, slot
        by_level = torch.stack([torch.tensor([sizes[i] for i in mask], dtype=torch.float32) for mask in masks])
        self.register_buffer("by_level", by_level, persistent=False)  # (L, n, 2)

    def split(self, raw: Tensor, iou_aware: bool) -> tuple[Tensor, Tensor | None]:
        """A raw map (B, n * (5 + C) [+ n], H, W) -> (B, n, 5 + C, H, W), and (B, n, H, W) of the IoU branch, which comes first
        where there is one. No copies."""
        n = self.per_level
        ious = raw[:, :n] if iou_aware else None
        rest = raw[:, n:] if iou_aware else raw
        return rest.unflatten(1, (n, rest.shape[1] // n)), ious

    def decode(self, logits: Tensor, level: int, scale_x_y: float) -> Tensor:
        """Box logits x, y, w, h of a level (B, n, 4, H, W) -> boxes (B, n, H, W, 4) xyxy px, at least float32, not clipped."""
        logits = at_least_float32(logits)
        height, width = logits.shape[-2:]
        stride = self.strides[level]
        column = torch.arange(width, device=logits.device, dtype=logits.dtype)
        row = torch.arange(height, device=logits.device, dtype=logits.dtype).unsqueeze(1)
        x = (in_cell(logits[:, :, 0], scale_x_y) + column) * stride
        y = (in_cell(logits[:, :, 1], scale_x_y) + row) * stride
        sizes = self.by_level[level].to(logits.dtype).reshape(1, -1, 2, 1, 1)
        half_width, half_height = (logits[:, :, 2:4].exp() * sizes / 2).unbind(2)
        return torch.stack([x - half_width, y - half_height, x + half_width, y + half_height], -1)

    def centers(self, raw: Tensor, level: int) -> Tensor:
        """Centres of a level's (H, W) places (H * W, 2) px, row by row."""
        return make_points([tuple(raw.shape[-2:])], [self.strides[level]], raw.device).points


def in_cell(logits: Tensor, scale_x_y: float) -> Tensor:
    """Grid-sensitive place of the centre in its cell (arXiv 2004.10934, section 3.3): ``scale_x_y`` above 1 reaches the rim."""
    return scale_x_y * logits.sigmoid() - (scale_x_y - 1) / 2


class CellTable(NamedTuple):
    """The cells of an input size. Each tensor (L,) int64."""

    start: Tensor  # first cell of the level
    height: Tensor  # rows
    width: Tensor  # columns
    stride: Tensor  # px
    total: int  # A
    size: tuple[int, int]  # (H, W) of the input, px


def cell_table(maps: Sequence[Tensor], anchors: Anchors) -> CellTable:
    """Of the raw maps (B, ., H_l, W_l), coarse first."""
    rows, total = [], 0
    for raw, stride in zip(maps, anchors.strides, strict=True):
        height, width = raw.shape[-2:]
        rows.append((total, height, width, stride))
        total += anchors.per_level * height * width
    columns = torch.tensor(rows, device=maps[0].device).unbind(1)
    return CellTable(*columns, total, (rows[0][1] * rows[0][3], rows[0][2] * rows[0][3]))
