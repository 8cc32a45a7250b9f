"""Which point learns which box: ATSS for the first epochs of PP-YOLOE, task-aligned assignment after them.

B images, M most boxes of an image, A points over all levels, C classes, K candidates of a box. Both assigners are functions
without parameters, work on all boxes of a chunk of images at once, and never copy the targets to a smaller type. A chunk is as
many images as keep the pairwise tensors (images, M, A) inside ``assign_bytes`` together; images do not influence each other, so
the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmdet.data.structures import Targets
from mmdet.models.assign import ASSIGN_BYTES, Assignment, image_chunks
from mmdet.models.boxes import at_least_float32, iou_aligned, iou_pairwise
from mmdet.models.losses import full_precision
from mmdet.models.points import inside_boxes

PAIR_BYTES = 32  # of all tensors that live at once per (box, point) pair, float32; measured, rounded up
EPS = 1e-9  # in the denominator of the aligned metric (PaddleDetection 666f597, task_aligned_assigner.py)


@torch.no_grad()
def assign_atss(
    pred_boxes: Tensor,
    targets: Targets,
    points: Tensor,
    strides: Tensor,
    level_sizes: tuple[int, ...],
    topk: int = 9,
    cell: float = 5.0,
    assign_bytes: int = ASSIGN_BYTES,
) -> Assignment:
    """Adaptive training sample selection (arXiv 1912.02424): the points nearest to a box's centre, thresholded by overlap.

    Candidates of a box are the ``topk`` nearest points of each level (all of a smaller level). Each point stands for a square
    anchor of ``cell`` strides. Positive is a candidate strictly inside the box whose anchor's IoU is above mean + unbiased
    standard deviation of the candidates' IoUs. A point wanted by several boxes goes to the box of greatest IoU with its anchor.
    A box may end without a point. The target score is the IoU of the predicted box with the assigned one.

    Args:
        pred_boxes: (B, A, 4) xyxy px, finite.
        targets: boxes of B images, xyxy px.
        points: (A, 2) px.
        strides: (A, 1) px.
        level_sizes: points of each level; their sum is A.
        topk: candidates of a box per level.
        cell: side of a point's anchor, in strides.
        assign_bytes: bound on the pairwise tensors of one chunk of images, bytes.
    """
    half = at_least_float32(strides) * cell / 2
    anchors = torch.cat([points - half, points + half], -1)

    def chunk(boxes: Tensor, valid: Tensor, rows: slice) -> Assignment:
        candidates = _nearest_points(boxes, points, level_sizes, topk)  # (b, M, K)
        overlaps = iou_aligned(boxes.unsqueeze(2), anchors[candidates])
        spread = overlaps.std(-1, keepdim=True) if candidates.shape[-1] > 1 else torch.zeros_like(overlaps)
        chosen = overlaps > overlaps.mean(-1, keepdim=True) + spread
        chosen &= inside_boxes(points[candidates], boxes.unsqueeze(2)) & valid.unsqueeze(-1)
        wanted = torch.zeros((*boxes.shape[:2], len(points)), dtype=torch.bool, device=boxes.device)
        wanted.scatter_(2, candidates, chosen)
        positive, box_index = _settle(wanted, iou_pairwise(boxes, anchors))
        scores = iou_aligned(_rows(boxes, box_index), pred_boxes[rows])
        return Assignment(positive, box_index, scores * positive)

    with full_precision(pred_boxes):
        return _over_chunks(chunk, targets, pred_boxes, assign_bytes)


@torch.no_grad()
def assign_task_aligned(
    pred_boxes: Tensor,
    pred_scores: Tensor,
    targets: Targets,
    points: Tensor,
    topk: int = 13,
    alpha: float = 1.0,
    beta: float = 6.0,
    assign_bytes: int = ASSIGN_BYTES,
) -> Assignment:
    """Task alignment learning (arXiv 2108.07755): points whose class score and box agree best with the ground truth.

    The metric is ``score ** alpha * IoU ** beta``. Positive are a box's ``topk`` best points among those strictly inside it with
    a metric above zero; a point wanted by several boxes goes to the box of greatest IoU with its prediction. The target score
    is the metric, scaled per box so that its greatest value is the box's greatest IoU.

    Args:
        pred_boxes: (B, A, 4) xyxy px, finite.
        pred_scores: (B, A, C) in [0, 1], finite.
        targets: boxes (px) and labels of B images.
        points: (A, 2) px.
        topk: most positives of a box.
        alpha: exponent of the class score.
        beta: exponent of the IoU.
        assign_bytes: bound on the pairwise tensors of one chunk of images, bytes.
    """

    def chunk(boxes: Tensor, valid: Tensor, rows: slice) -> Assignment:
        overlaps = iou_pairwise(boxes, pred_boxes[rows])  # (b, M, A)
        metric = _rows(pred_scores[rows].transpose(1, 2), targets.labels[rows])
        metric = metric.pow_(alpha).mul_(overlaps.pow(beta))
        metric *= inside_boxes(points, boxes.unsqueeze(2)) & valid.unsqueeze(-1)
        best, candidates = metric.topk(min(topk, len(points)), dim=-1)
        wanted = torch.zeros_like(metric, dtype=torch.bool).scatter_(2, candidates, best > 0)
        del metric
        positive, box_index = _settle(wanted, overlaps)
        overlap = overlaps.gather(1, box_index.unsqueeze(1)).squeeze(1) * positive  # (b, A)
        label = targets.labels[rows].gather(1, box_index)
        score = pred_scores[rows].gather(2, label.unsqueeze(2)).squeeze(2)
        aligned = score.pow(alpha) * overlap.pow(beta)
        zeros = torch.zeros_like(boxes[..., 0])
        best_metric = zeros.scatter_reduce(1, box_index, aligned, "amax").gather(1, box_index)
        best_overlap = zeros.scatter_reduce(1, box_index, overlap, "amax").gather(1, box_index)
        return Assignment(positive, box_index, aligned / (best_metric + EPS) * best_overlap)

    with full_precision(pred_boxes):
        return _over_chunks(chunk, targets, pred_boxes, assign_bytes)


def _over_chunks(chunk: Callable[..., Assignment], targets: Targets, pred_boxes: Tensor, assign_bytes: int) -> Assignment:
    """Joins ``chunk(boxes, valid, rows)`` over slices of images; no boxes at all means no positives."""
    (batch, num_points), num_boxes = pred_boxes.shape[:2], targets.boxes.shape[1]
    boxes = targets.boxes.to(torch.promote_types(targets.boxes.dtype, pred_boxes.dtype))
    if not num_boxes:
        nothing = torch.zeros((batch, num_points), dtype=torch.int64, device=pred_boxes.device)
        return Assignment(nothing.bool(), nothing, nothing.to(boxes.dtype))
    slices = _chunks(batch, num_boxes * num_points, assign_bytes)
    parts = [chunk(boxes[rows], targets.valid[rows], rows) for rows in slices]
    return parts[0] if len(parts) == 1 else Assignment(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _chunks(batch: int, pairs: int, assign_bytes: int) -> list[slice]:
    """Slices of images whose pairwise tensors fit in ``assign_bytes`` together; one image at least."""
    return image_chunks(batch, pairs * PAIR_BYTES, assign_bytes)


def _nearest_points(boxes: Tensor, points: Tensor, level_sizes: tuple[int, ...], topk: int) -> Tensor:
    """Indexes (B, M, K) of the ``topk`` points of each level nearest to the centres of boxes (B, M, 4)."""
    centers = (boxes[..., :2] + boxes[..., 2:]) / 2
    nearest, start = [], 0
    for size in level_sizes:
        level = points[start : start + size]
        distances = torch.hypot(centers[..., 0, None] - level[:, 0], centers[..., 1, None] - level[:, 1])
        nearest.append(distances.topk(min(topk, size), dim=-1, largest=False).indices + start)
        start += size
    return torch.cat(nearest, -1)


def _settle(wanted: Tensor, overlaps: Tensor) -> tuple[Tensor, Tensor]:
    """wanted (B, M, A) bool and overlaps (B, M, A) -> positive (B, A) and each point's box (B, A).

    A point that several boxes want goes to the box with the greatest overlap of all boxes of the image, even one that did not
    want it (PaddleDetection's rule).
    """
    claims = wanted.sum(1, keepdim=True)
    box_index = torch.where(claims > 1, overlaps, wanted.to(overlaps.dtype)).argmax(1)
    return claims.squeeze(1) > 0, box_index


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values (B, R, D) at rows (B, N) -> (B, N, D)."""
    batch = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[batch, index]
