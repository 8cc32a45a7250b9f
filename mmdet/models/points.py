"""Anchor points: the centres of the feature maps' cells, in input pixels. A points over all levels, M boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PointGrid(NamedTuple):
    points: Tensor  # (A, 2) x, y px
    strides: Tensor  # (A, 1) px
    level_sizes: tuple[int, ...]  # number of points of each level, in order


def make_points(
    sizes: Sequence[tuple[int, int]],
    strides: Sequence[int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    offset: float = 0.5,
) -> PointGrid:
    """Points of feature maps of ``sizes`` (h, w) in cells, level after level, row-major: ``(index + offset) * stride`` px."""
    points, point_strides = [], []
    for (height, width), stride in zip(sizes, strides, strict=True):
        x = (torch.arange(width, device=device, dtype=dtype) + offset) * stride
        y = (torch.arange(height, device=device, dtype=dtype) + offset) * stride
        grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
        points.append(torch.stack([grid_x, grid_y], -1).reshape(-1, 2))
        point_strides.append(torch.full((height * width, 1), float(stride), device=device, dtype=dtype))
    return PointGrid(torch.cat(points), torch.cat(point_strides), tuple(h * w for h, w in sizes))


class PointCache:
    """``make_points`` that remembers the last ``capacity`` grids; it is no part of any checkpoint and knows no input size."""

    def __init__(self, strides: Sequence[int], offset: float = 0.5, capacity: int = 32) -> None:
        self.strides = tuple(strides)
        self.offset = offset
        self.capacity = capacity
        self._grids: dict[tuple, PointGrid] = {}

    def __call__(self, features: Sequence[Tensor]) -> PointGrid:
        """The grid of feature maps (B, C_l, H_l, W_l), in at least float32, on their device."""
        sizes = tuple((int(f.shape[-2]), int(f.shape[-1])) for f in features)
        device, dtype = features[0].device, torch.promote_types(features[0].dtype, torch.float32)
        # While tracing or exporting, tensors made here are symbols that must not outlive the trace.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return make_points(sizes, self.strides, device, dtype, self.offset)
        key = (sizes, device, dtype)
        if key not in self._grids:
            while len(self._grids) >= self.capacity:
                self._grids.pop(next(iter(self._grids)))
            # A grid that is first needed in an evaluation must serve the next training step too.
            with torch.inference_mode(False), torch.no_grad():
                self._grids[key] = make_points(sizes, self.strides, device, dtype, self.offset)
        return self._grids[key]

    def __deepcopy__(self, memo) -> PointCache:
        return PointCache(self.strides, self.offset, self.capacity)


def inside_boxes(points: Tensor, boxes: Tensor) -> Tensor:
    """Whether each point lies strictly inside each box: points (..., 2), boxes (..., 4), broadcast -> (...) bool.

    For all pairs pass points (A, 2) and boxes (..., M, 1, 4) -> (..., M, A). A box without area holds no point.
    """
    x, y = points[..., 0], points[..., 1]
    inside = (x > boxes[..., 0]) & (x < boxes[..., 2])
    return inside.logical_and_(y > boxes[..., 1]).logical_and_(y < boxes[..., 3])


def distances_to_boxes(points: Tensor, distances: Tensor) -> Tensor:
    """Points (..., 2) and distances left, top, right, bottom (..., 4), same unit -> boxes (..., 4) xyxy."""
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], -1)


def boxes_to_distances(points: Tensor, boxes: Tensor) -> Tensor:
    """Points (..., 2) and boxes (..., 4) -> distances left, top, right, bottom (..., 4); negative outside the box."""
    return torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1)
