"""Which point learns which box: SimOTA (arXiv 2107.08430, section 2.1), as in Megvii 6ddff48, yolo_head.py.

B images, M most boxes of an image, A points over all levels, C classes, K most candidate points of an image.

Only points near the centre of some box can become positive, so predictions are gathered at these candidates first and all
pairwise tensors are (images, M, K). K is that of the whole batch and images do not influence each other, so taking them in
chunks changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmdet.data.structures import Targets
from mmdet.models.assign import ASSIGN_BYTES, Assignment, image_chunks
from mmdet.models.boxes import at_least_float32, iou_pairwise
from mmdet.models.losses import full_precision

RADIUS = 1.5  # of the square around a box's centre, in strides of the level
TOP_IOUS = 10  # overlaps whose sum says how many points a box gets
IOU_WEIGHT = 3.0  # of the overlap in the cost
FAR_COST = 1e6  # added where the point is not near the box's own centre
PAIR_BYTES = 24  # of all tensors that live at once per (box, candidate) pair, float32; measured 18
CLASS_BYTES = 16  # likewise per (candidate, class) pair: three tensors, rounded up


class Candidates(NamedTuple):
    """The points of each image that lie near the centre of some box, in ascending order."""

    points: Tensor  # (B, K) int64; A on padding
    near_point: Tensor  # (B, M, N) int64, points around each box's centre, as slots in [0, K); K where there is none

    @property
    def num(self) -> int:
        return self.points.shape[1]


@torch.no_grad()
def assign_simota(
    pred_boxes: Tensor,
    class_logits: Tensor,
    obj_logits: Tensor,
    targets: Targets,
    strides: Tensor,
    level_shapes: Sequence[tuple[int, int]],
    assign_bytes: int = ASSIGN_BYTES,
) -> Assignment:
    """Simplified optimal transport: each box takes the points that are cheapest for it.

    Candidates are the points strictly inside a square of RADIUS strides around some box's centre. The cost of a pair is the
    binary cross-entropy of ``sqrt(class score x objectness)`` against the box's class, plus 3 times ``-log(IoU)``, plus a
    million where the point is no candidate of this very box. A box takes as many points as the sum of its ten greatest IoUs
    says, rounded down, at least one; a point that several boxes want goes to the box for which it is cheapest, of all boxes of
    the image. A box without area takes none. The target score is the IoU of the predicted box with the assigned one.

    Args:
        pred_boxes: (B, A, 4) xyxy px, finite.
        class_logits: (B, A, C), finite.
        obj_logits: (B, A), finite.
        targets: boxes (px) and labels of B images.
        strides: (A, 1) px.
        level_shapes: (h, w) in cells of each level, in the order of the points; points go row by row.
        assign_bytes: bound on the pairwise tensors of one chunk of images, bytes.
    """
    batch, num_points = pred_boxes.shape[:2]
    boxes = targets.boxes.to(torch.promote_types(targets.boxes.dtype, pred_boxes.dtype))
    positive = torch.zeros((batch, num_points + 1), dtype=torch.bool, device=boxes.device)  # the last column takes the padding
    box_index = torch.zeros_like(positive, dtype=torch.int64)
    scores = torch.zeros_like(positive, dtype=boxes.dtype)
    valid = targets.valid & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    with full_precision(pred_boxes):
        candidates = find_candidates(boxes, valid, strides, level_shapes)
        image_bytes = candidates.num * (boxes.shape[1] * PAIR_BYTES + class_logits.shape[2] * CLASS_BYTES)
        for rows in image_chunks(batch, image_bytes, assign_bytes) if candidates.num else ():
            points = candidates.points[rows]
            at = points.clamp(max=num_points - 1)
            image = torch.arange(len(points), device=points.device).unsqueeze(1)
            real = (points < num_points).unsqueeze(1) & valid[rows].unsqueeze(2)  # (b, M, K)
            overlaps = iou_pairwise(boxes[rows], pred_boxes[rows][image, at]).mul_(real)
            score_logits = class_logits[rows][image, at], obj_logits[rows][image, at]
            cost = pair_cost(overlaps, candidates.near_point[rows], *score_logits, targets.labels[rows])
            chosen, owner = _settle(overlaps, cost.masked_fill_(~real, torch.inf))
            overlap = overlaps.gather(1, owner.unsqueeze(1)).squeeze(1)
            positive[rows].scatter_(1, points, chosen)
            box_index[rows].scatter_(1, points, owner)
            scores[rows].scatter_(1, points, overlap * chosen)
    return Assignment(positive[:, :-1], box_index[:, :-1], scores[:, :-1])


def find_candidates(boxes: Tensor, valid: Tensor, strides: Tensor, level_shapes: Sequence[tuple[int, int]]) -> Candidates:
    """Candidates of boxes (B, M, 4) xyxy px where ``valid`` (B, M). A square of 1.5 strides either way holds at most three cells
    in a row, the middle one with the box's centre."""
    batch, num_points = len(boxes), len(strides)
    centers = (boxes[..., :2] + boxes[..., 2:]) / 2
    around = torch.arange(-1, 2, device=boxes.device)
    indexes, start = [], 0
    for height, width in level_shapes:
        stride = strides[start, 0]
        limit = torch.tensor([width, height], device=boxes.device)
        cells = (centers / stride).floor().long().unsqueeze(-1) + around  # (B, M, 2, 3)
        at, center, reach = (cells + 0.5) * stride, centers.unsqueeze(-1), RADIUS * stride
        inside = (at > center - reach) & (at < center + reach) & (cells >= 0) & (cells < limit.unsqueeze(1))
        inside = inside[..., 1, :, None] & inside[..., 0, None, :] & valid[..., None, None]  # (B, M, rows, columns)
        index = start + cells[..., 1, :, None] * width + cells[..., 0, None, :]
        indexes.append(torch.where(inside, index, num_points).flatten(2))
        start += height * width
    near = torch.cat(indexes, 2)  # (B, M, N); num_points where there is none
    mask = torch.zeros((batch, num_points + 1), dtype=torch.bool, device=boxes.device).scatter_(1, near.flatten(1), True)
    mask[:, -1] = False
    slots = mask.cumsum(1) - 1
    most = int(slots[:, -1].max()) + 1 if batch else 0
    num = max(most, TOP_IOUS) if most else 0  # always ten addends in the sum of overlaps
    points = torch.full((batch, num), num_points, device=boxes.device)
    image, point = mask.nonzero(as_tuple=True)
    points[image, slots[image, point]] = point
    slots = torch.where(mask, slots, num)
    return Candidates(points, slots.gather(1, near.flatten(1)).view_as(near))


def pair_cost(overlaps: Tensor, near_point: Tensor, class_logits: Tensor, obj_logits: Tensor, labels: Tensor) -> Tensor:
    """Cost (b, M, K) of candidates with overlaps (b, M, K), class logits (b, K, C) and objectness (b, K) for boxes with
    ``labels`` (b, M), whose own candidates are the slots ``near_point`` (b, M, N)."""
    objectness = at_least_float32(obj_logits).sigmoid().unsqueeze(2)
    score = at_least_float32(class_logits).sigmoid().mul_(objectness).sqrt_()
    log_not = (-score).log1p_().clamp_(min=-100)  # the bound of torch's binary cross-entropy
    background = -log_not.sum(2)  # cross-entropy against no class at all
    of_class = log_not.sub_(score.log_().clamp_(min=-100))  # what changes with class c
    image = torch.arange(len(labels), device=labels.device).unsqueeze(1)
    cost = of_class.transpose(1, 2)[image, labels] + background.unsqueeze(1)
    cost -= (overlaps + 1e-8).log_().mul_(IOU_WEIGHT)
    batch, num_boxes, num = overlaps.shape
    far = torch.ones((batch, num_boxes, num + 1), dtype=torch.bool, device=overlaps.device).scatter_(2, near_point, False)
    return cost.add_(far[..., :-1], alpha=FAR_COST)


def _settle(overlaps: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """overlaps and cost (b, M, K), the latter infinite where nothing may be chosen -> chosen (b, K), its box (b, K)."""
    counts = overlaps.topk(TOP_IOUS, dim=2).values.sum(2).int().clamp_(min=1)
    lowest, slots = cost.topk(TOP_IOUS, dim=2, largest=False)
    taken = (torch.arange(TOP_IOUS, device=cost.device) < counts.unsqueeze(2)) & lowest.isfinite()
    wanted = torch.zeros_like(cost, dtype=torch.bool).scatter_(2, slots, taken)
    claims = wanted.sum(1)
    owner = torch.where(claims > 1, cost.argmin(1), wanted.to(torch.uint8).argmax(1))
    return claims > 0, owner
