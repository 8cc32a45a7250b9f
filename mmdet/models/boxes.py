"""Overlaps of boxes. A box is xyxy in any unit, continuous: its width is ``x2 - x1``. N and M boxes, ``...`` leading dimensions.

All functions work in at least float32 (float64 stays float64). A box without area has IoU 0 with everything, never NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in ``promote_types(dtype, float32)``: half types and integers go up, float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]).clamp(min=0) * (boxes[..., 3] - boxes[..., 1]).clamp(min=0)


def _intersection_and_union(a: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of broadcastable boxes (..., 4). Coordinate by coordinate and in place: for all pairs of many boxes the time goes into
    memory, not arithmetic."""
    width = torch.minimum(a[..., 2], b[..., 2]).sub_(torch.maximum(a[..., 0], b[..., 0])).clamp_(min=0)
    height = torch.minimum(a[..., 3], b[..., 3]).sub_(torch.maximum(a[..., 1], b[..., 1])).clamp_(min=0)
    intersection = width.mul_(height)
    return intersection, (_areas(a) + _areas(b)).sub_(intersection).add_(eps)


def iou_aligned(a: Tensor, b: Tensor, eps: float = 1e-9) -> Tensor:
    """IoU of boxes (..., 4) and (..., 4), paired or broadcast -> (...). ``eps`` is added to the union."""
    intersection, union = _intersection_and_union(at_least_float32(a), at_least_float32(b), eps)
    return intersection.div_(union)


def iou_pairwise(a: Tensor, b: Tensor, eps: float = 1e-9) -> Tensor:
    """IoU of every box of (..., N, 4) with every box of (..., M, 4) -> (..., N, M)."""
    return iou_aligned(a.unsqueeze(-2), b.unsqueeze(-3), eps)


def giou_aligned(a: Tensor, b: Tensor, eps: float = 1e-10) -> Tensor:
    """Generalised IoU (arXiv 1902.09630, algorithm 1) of boxes (..., 4) and (..., 4) -> (...) in [-1, 1]."""
    a, b = at_least_float32(a), at_least_float32(b)
    intersection, union = _intersection_and_union(a, b, eps)
    width = torch.maximum(a[..., 2], b[..., 2]) - torch.minimum(a[..., 0], b[..., 0])
    height = torch.maximum(a[..., 3], b[..., 3]) - torch.minimum(a[..., 1], b[..., 1])
    enclosing = width * height + eps
    return intersection / union - (enclosing - union) / enclosing


def giou_pairwise(a: Tensor, b: Tensor, eps: float = 1e-10) -> Tensor:
    """Generalised IoU of every box of (..., N, 4) with every box of (..., M, 4) -> (..., N, M)."""
    return giou_aligned(a.unsqueeze(-2), b.unsqueeze(-3), eps)


def ciou_aligned(a: Tensor, b: Tensor, eps: float = 1e-9) -> Tensor:
    """Complete IoU (arXiv 1911.08287, equations 8 to 11) of boxes (..., 4) and (..., 4) -> (...), at most 1.

    IoU less the squared distance of the centres over the squared diagonal of the enclosing box, less a term for the difference of
    the aspect ratios. That term's weight counts as a constant for gradients, as in the paper's own code. Symmetric in ``a`` and
    ``b``.
    """
    a, b = at_least_float32(a), at_least_float32(b)
    intersection, union = _intersection_and_union(a, b, eps)
    iou = intersection / union
    size_a, size_b = a[..., 2:] - a[..., :2], b[..., 2:] - b[..., :2]
    offset = (a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) / 2
    corners = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    distance = offset.square().sum(-1) / (corners.square().sum(-1) + eps)
    angle_a, angle_b = (torch.atan(size[..., 0] / (size[..., 1] + eps)) for size in (size_a, size_b))
    shape = (4 / math.pi**2) * (angle_a - angle_b).square()
    with torch.no_grad():
        weight = shape / (1 - iou + shape + eps)
    return iou - distance - weight * shape
