"""Which point learns which box in FCOS (arXiv 1904.01355, section 3.1 and 3.2). B images, M most boxes of an image, A points.

A function without parameters, on all boxes of many points at once. Points do not influence each other, so they are taken in
chunks of images, and of points where a single image has too many boxes: no intermediate exceeds ``assign_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmdet.data.structures import Targets
from mmdet.models.assign import ASSIGN_BYTES, Assignment, targets_at
from mmdet.models.boxes import at_least_float32
from mmdet.models.losses import full_precision
from mmdet.models.points import boxes_to_distances

PAIR_BYTES = 24  # of all tensors that live at once per (box, point) pair, float32; rounded up


def level_ranges(bounds: Sequence[float], level_sizes: Sequence[int], like: Tensor) -> Tensor:
    """(A, 2) px, in type and on the device of ``like``: the range of distances that each point's level is for.

    ``bounds`` are the borders between neighbouring levels, one fewer than levels: -1 to the first, first to second, ..., last to
    infinity.
    """
    if len(bounds) + 1 != len(level_sizes):
        raise ValueError(f"{len(level_sizes)} levels need {len(level_sizes) - 1} borders between them, got {tuple(bounds)}")
    borders = (-1.0, *bounds, float("inf"))
    rows = [like.new_tensor(pair).expand(size, 2) for pair, size in zip(zip(borders, borders[1:]), level_sizes, strict=True)]
    return torch.cat(rows)


@torch.no_grad()
def assign_points(
    targets: Targets, points: Tensor, strides: Tensor, ranges: Tensor, radius: float = 1.5, assign_bytes: int = ASSIGN_BYTES
) -> Assignment:
    """The smallest box that a point is responsible for; the target score is the point's centre-ness in it.

    A point may learn a box when it lies strictly inside the box and, with ``radius`` > 0, less than ``radius`` of its level's
    strides from the box's centre in x and in y (center sampling), and when the greatest of its distances to the sides is
    strictly inside its level's range. Of several such boxes the one of smallest area wins, of equal ones the first.

    Args:
        targets: boxes of B images, xyxy px.
        points: (A, 2) px.
        strides: (A, 1) px.
        ranges: (A, 2) px, of ``level_ranges``.
        radius: in strides; 0: the whole box.
        assign_bytes: bound on the pairwise tensors of one chunk, bytes.
    """
    batch, num_boxes = targets.boxes.shape[:2]
    positive = torch.zeros((batch, len(points)), dtype=torch.bool, device=points.device)
    box_index = torch.zeros((batch, len(points)), dtype=torch.int64, device=points.device)
    boxes = at_least_float32(targets.boxes)
    if not num_boxes:
        dtype = torch.promote_types(boxes.dtype, points.dtype)  # that of a batch with boxes: ranks add up sums of both
        return Assignment(positive, box_index, torch.zeros_like(positive, dtype=dtype))
    with full_precision(boxes):
        # From the smallest box to the largest, so that the winner is the first that will do: no ties to break.
        area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
        order = area.masked_fill(~targets.valid, float("inf")).argsort(dim=1, stable=True)
        boxes = boxes.gather(1, order.unsqueeze(2).expand_as(boxes))
        valid = targets.valid.gather(1, order)
        number = torch.arange(num_boxes, device=boxes.device, dtype=torch.int32).reshape(-1, 1)
        for rows, cols in _chunks(batch, len(points), num_boxes, assign_bytes):
            may = _may_learn(boxes[rows].unsqueeze(2), points[cols], strides[cols, 0], ranges[cols], radius)
            may &= valid[rows].unsqueeze(2)
            first = torch.where(may, number, num_boxes).amin(1).long()  # (b, a)
            positive[rows, cols] = first < num_boxes
            box_index[rows, cols] = order[rows].gather(1, first.clamp(max=num_boxes - 1))
        scores = _centerness_of(targets, Assignment(positive, box_index, positive), points)
    return Assignment(positive, box_index, scores)


def centerness(distances: Tensor) -> Tensor:
    """Distances left, top, right, bottom (..., 4), positive -> centre-ness (...) in (0, 1] (arXiv 1904.01355, equation 3)."""
    left, top, right, bottom = distances.unbind(-1)
    across = torch.minimum(left, right) / torch.maximum(left, right)
    down = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    return (across * down).sqrt()


def _centerness_of(targets: Targets, assigned: Assignment, points: Tensor) -> Tensor:
    """(B, A) centre-ness in the assigned box, 0 where not positive."""
    boxes = at_least_float32(targets_at(targets.boxes, assigned))
    distances = boxes_to_distances(points, boxes)
    return centerness(torch.where(assigned.positive.unsqueeze(-1), distances, 1.0)) * assigned.positive


def _may_learn(boxes: Tensor, points: Tensor, strides: Tensor, ranges: Tensor, radius: float) -> Tensor:
    """boxes (b, M, 1, 4), points (a, 2), strides (a,), ranges (a, 2) -> (b, M, a) bool."""
    may, farthest = None, None
    for axis in (0, 1):
        position, low, high = points[:, axis], boxes[..., axis], boxes[..., axis + 2]
        reach = torch.maximum(position - low, high - position)
        farthest = reach if farthest is None else torch.maximum(farthest, reach, out=farthest)
        if radius > 0:
            middle, span = (low + high) / 2, radius * strides
            low, high = torch.maximum(low, middle - span), torch.minimum(high, middle + span)
        inside = (position > low).logical_and_(position < high)
        may = inside if may is None else may.logical_and_(inside)
    return may.logical_and_(farthest > ranges[:, 0]).logical_and_(farthest < ranges[:, 1])


def _chunks(batch: int, num_points: int, num_boxes: int, assign_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Slices of images and of points whose pairwise tensors fit in ``assign_bytes`` together; one point at least."""
    cells = max(1, assign_bytes // (num_boxes * PAIR_BYTES))
    images, span = max(1, cells // num_points), min(cells, num_points)
    for i in range(0, batch, images):
        for j in range(0, num_points, span):
            yield slice(i, i + images), slice(j, j + span)
