"""The criterion of FCOS. B images, M most boxes of an image, A points, C classes, P positive points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.core.normalizers import mean_normalizers
from mmdet.data.structures import Batch, LossOutput, Targets
from mmdet.families.fcos.assigner import assign_points, level_ranges
from mmdet.families.fcos.head import Predictions
from mmdet.models.assign import (
    ASSIGN_BYTES,
    Assignment,
    check_labels,
    finite_predictions,
    inside_ignored,
    spoil,
    targets_at,
)
from mmdet.models.boxes import at_least_float32
from mmdet.models.losses import focal_loss, full_precision
from mmdet.models.points import boxes_to_distances

QUALITIES = ("centerness", "iou")
BOX_LOSSES = ("giou", "iou", "linear_iou")


def overlaps_of_distances(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Intersection, union and area of the enclosing box, each (P,), of boxes given by their distances left, top, right, bottom
    (P, 4), 0 or more, from the same point."""
    inner, outer = torch.minimum(a, b), torch.maximum(a, b)
    intersection, enclosing, area_a, area_b = ((d[:, 0] + d[:, 2]) * (d[:, 1] + d[:, 3]) for d in (inner, outer, a, b))
    return intersection, area_a + area_b - intersection, enclosing


def box_loss(distances: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Loss of distances (P, 4) against targets (P, 4), in strides -> (P,).

    "giou": 1 - GIoU, "iou": -log IoU, "linear_iou": 1 - IoU. The 1 in numerator and denominator of the IoU smooths it; it is
    part of the recipe (PaddleDetection 666f597, fcos_loss.py), whatever the kind.
    """
    intersection, union, enclosing = overlaps_of_distances(distances, targets)
    iou = (intersection + 1.0) / (union + 1.0)
    if kind == "iou":
        return -iou.log()
    if kind == "linear_iou":
        return 1.0 - iou
    enclosing = enclosing + 1e-7  # fcos_loss.py
    return 1.0 - iou + (enclosing - union) / enclosing


class FCOSCriterion(nn.Module):
    """``(Predictions, Batch) -> LossOutput`` with ``loss_cls``, ``loss_box``, ``loss_ctn`` (normalisers applied).

    Focal class loss over all points and binary cross-entropy of the centre-ness over the positives, both divided by the number
    of positives; box loss weighted by the centre-ness, divided by its sum. Numbers of positives and sums are over all ranks, at
    least 1, over the number of ranks. With ``quality="iou"`` the centre-ness output learns the IoU of its own predicted box
    instead, and the box loss is not weighted. A target's mix-up weight multiplies the losses of its positives. Points inside an
    ignore region that are not positive carry no class loss. Statistics: ``num_pos`` (positives per image), ``ctn_sum``.

    Args:
        num_classes: C.
        level_bounds: px, see ``level_ranges``.
        radius: of center sampling, in strides; 0: off.
        box_kind: "giou", "iou" or "linear_iou".
        quality: "centerness" or "iou".
        alpha, gamma: of the focal loss.
        assign_bytes: bound on the assigner's intermediate tensors.

    Where a prediction is not finite, all losses are NaN, and ``nonfinite`` names it.

    Raises:
        ValueError: a label lies outside [0, C).
    """

    def __init__(
        self,
        num_classes: int,
        level_bounds: Sequence[float] = (64, 128, 256, 512),
        radius: float = 1.5,
        box_kind: str = "giou",
        quality: str = "centerness",
        alpha: float = 0.25,
        gamma: float = 2.0,
        assign_bytes: int = ASSIGN_BYTES,
    ) -> None:
        super().__init__()
        if box_kind not in BOX_LOSSES:
            raise ValueError(f"box_kind must be one of {BOX_LOSSES}, got {box_kind!r}")
        if quality not in QUALITIES:
            raise ValueError(f"quality must be one of {QUALITIES}, got {quality!r}")
        self.num_classes = num_classes
        self.level_bounds = tuple(level_bounds)
        self.radius = radius
        self.box_kind, self.quality = box_kind, quality
        self.alpha, self.gamma = alpha, gamma
        self.assign_bytes = assign_bytes

    def forward(self, predictions: Predictions, batch: Batch) -> LossOutput:
        with full_precision(predictions.class_logits):
            predictions, fault = finite_predictions(predictions, ("class_logits", "distances", "centerness_logits"))
            logits = at_least_float32(predictions.class_logits)
            check_labels(batch.targets, self.num_classes)
            assigned = self.assign(predictions, batch)
            num_pos, ctn_sum = assigned.positive.sum(), assigned.scores.sum()
            per_positive, per_centerness = mean_normalizers(num_pos, ctn_sum)
            loss_cls = self._class_loss(logits, assigned, batch.targets, predictions.points)
            loss_box, loss_ctn = self._positive_losses(predictions, assigned, batch.targets)
        losses = {
            "loss_cls": loss_cls / per_positive,
            "loss_box": loss_box / (per_centerness if self.quality == "centerness" else per_positive),
            "loss_ctn": loss_ctn / per_positive,
        }
        return spoil(LossOutput(losses, {"num_pos": num_pos / len(batch), "ctn_sum": ctn_sum}), fault)

    @torch.no_grad()
    def assign(self, predictions: Predictions, batch: Batch) -> Assignment:
        """Each point's box; the score is its centre-ness."""
        points = at_least_float32(predictions.points)
        ranges = level_ranges(self.level_bounds, predictions.level_sizes, points)
        return assign_points(batch.targets, points, predictions.strides, ranges, self.radius, self.assign_bytes)

    def _class_loss(self, logits: Tensor, assigned: Assignment, targets: Targets, points: Tensor) -> Tensor:
        """Sum over everything, ()."""
        label = targets_at(targets.labels, assigned).unsqueeze(2)
        wanted = torch.zeros_like(logits).scatter_(2, label, assigned.positive.unsqueeze(2).to(logits.dtype))
        loss = focal_loss(logits, wanted, self.alpha, self.gamma)
        counted = assigned.positive | ~inside_ignored(points, targets.ignore, self.assign_bytes)
        mixed = targets_at(targets.weights, assigned).to(logits.dtype).unsqueeze(2)
        return (loss * torch.where(wanted > 0, mixed, counted.to(logits.dtype).unsqueeze(2))).sum()

    def _positive_losses(self, predictions: Predictions, assigned: Assignment, targets: Targets) -> tuple[Tensor, Tensor]:
        """Sums of the box loss and of the centre-ness loss, each ().

        Without positives the sums are over nothing, which is zero and still gives every parameter a gradient.
        """
        image, point = assigned.positive.nonzero(as_tuple=True)
        boxes = at_least_float32(targets_at(targets.boxes, assigned)[image, point])
        wanted = boxes_to_distances(predictions.points[point], boxes) / predictions.strides[point]
        distances = at_least_float32(predictions.distances[image, point])
        mixed = targets_at(targets.weights, assigned)[image, point]
        per_box = box_loss(distances, wanted, self.box_kind) * mixed
        quality = assigned.scores[image, point]
        if self.quality == "centerness":
            per_box = per_box * quality
        else:
            intersection, union, _ = overlaps_of_distances(distances.detach(), wanted)
            quality = intersection / union
        logits = at_least_float32(predictions.centerness_logits[image, point])
        per_quality = F.binary_cross_entropy_with_logits(logits, quality.to(logits.dtype), reduction="none") * mixed
        return per_box.sum(), per_quality.sum()
