"""The criterion of PP-YOLOE. B images, M most boxes of an image, A points, C classes, P positive points, R largest distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmdet.core.normalizers import mean_normalizers, summed_ranks
from mmdet.data.structures import Batch, LossOutput, Targets
from mmdet.families.ppyoloe.assigner import assign_atss, assign_task_aligned
from mmdet.families.ppyoloe.head import Predictions, expected_distances
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
from mmdet.models.losses import distribution_focal_loss, focal_loss, full_precision, giou_loss, varifocal_loss
from mmdet.models.points import boxes_to_distances, distances_to_boxes


class PPYOLOECriterion(nn.Module):
    """``(Predictions, Batch) -> LossOutput`` with ``loss_cls``, ``loss_iou``, ``loss_dfl`` (weights and normaliser applied).

    Until ``static_assigner_epoch`` (``batch.epoch`` below it) points are assigned by ATSS, afterwards task-aligned. All three
    losses are divided by the sum of the target scores over all ranks, at least 1, over the number of ranks. A target's mix-up
    weight multiplies the losses of its positives. Points inside an ignore region that are not positive carry no class loss.
    Statistics: ``loss_l1`` (mean distance of the corners, strides), ``num_pos`` (positives per image), ``score_sum`` (over the
    batch of all ranks: ranks are averaged in the log).

    Where a prediction is not finite, all losses are NaN, and ``nonfinite`` names it.

    Raises:
        ValueError: a label lies outside [0, C).
    """

    def __init__(
        self,
        num_classes: int,
        static_assigner_epoch: int,
        reg_max: int = 16,
        class_loss: str = "varifocal",
        weight_cls: float = 1.0,
        weight_iou: float = 2.5,
        weight_dfl: float = 0.5,
        assign_bytes: int = ASSIGN_BYTES,
    ) -> None:
        super().__init__()
        if class_loss not in ("varifocal", "focal"):
            raise ValueError(f"class_loss must be 'varifocal' or 'focal', got {class_loss!r}")
        self.num_classes = num_classes
        self.static_assigner_epoch = static_assigner_epoch
        self.reg_max = reg_max
        self.class_loss = class_loss
        self.weight_cls, self.weight_iou, self.weight_dfl = weight_cls, weight_iou, weight_dfl
        self.assign_bytes = assign_bytes
        self.register_buffer("bins", torch.arange(reg_max + 1, dtype=torch.float32), persistent=False)

    def forward(self, predictions: Predictions, batch: Batch) -> LossOutput:
        with full_precision(predictions.class_logits):
            predictions, fault = finite_predictions(predictions, ("class_logits", "box_logits"))
            logits = at_least_float32(predictions.class_logits)
            check_labels(batch.targets, self.num_classes)
            assigned = self.assign(predictions, batch)
            (normalizer,) = mean_normalizers(assigned.scores.sum())
            loss_cls = self._class_loss(logits, assigned, batch.targets, predictions.points) / normalizer
            iou, dfl, l1 = self._box_losses(predictions, assigned, batch.targets)
        losses = {
            "loss_cls": self.weight_cls * loss_cls,
            "loss_iou": self.weight_iou * iou / normalizer,
            "loss_dfl": self.weight_dfl * dfl / normalizer,
        }
        num_pos = assigned.positive.sum() / len(batch)
        score_sum = assigned.scores.sum() * summed_ranks()
        return spoil(LossOutput(losses, {"loss_l1": l1, "num_pos": num_pos, "score_sum": score_sum}), fault)

    @torch.no_grad()
    def assign(self, predictions: Predictions, batch: Batch) -> Assignment:
        """The assignment that the batch's epoch calls for."""
        distances = expected_distances(predictions.box_logits, self.bins) * predictions.strides
        pred_boxes = distances_to_boxes(predictions.points, distances)
        if batch.epoch < self.static_assigner_epoch:
            grid = predictions.points, predictions.strides, predictions.level_sizes
            return assign_atss(pred_boxes, batch.targets, *grid, assign_bytes=self.assign_bytes)
        pred_scores = at_least_float32(predictions.class_logits).sigmoid()
        return assign_task_aligned(pred_boxes, pred_scores, batch.targets, predictions.points, assign_bytes=self.assign_bytes)

    def _class_loss(self, logits: Tensor, assigned: Assignment, targets: Targets, points: Tensor) -> Tensor:
        """Sum over everything of the class loss, ()."""
        label = targets_at(targets.labels, assigned)
        positive = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, label.unsqueeze(2), assigned.positive.unsqueeze(2))
        quality = positive * assigned.scores.unsqueeze(-1).to(logits.dtype)
        if self.class_loss == "varifocal":
            loss = varifocal_loss(logits, quality, positive)
        else:
            loss = focal_loss(logits, quality)
        counted = assigned.positive | ~inside_ignored(points, targets.ignore, self.assign_bytes)
        mixed = targets_at(targets.weights, assigned).to(logits.dtype).unsqueeze(-1)
        return (loss * torch.where(positive, mixed, counted.to(logits.dtype).unsqueeze(-1))).sum()

    def _box_losses(self, predictions: Predictions, assigned: Assignment, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of the GIoU and distribution focal losses, and the mean L1 distance, each ().

        Without positives the sums are over nothing, which is zero and still gives every parameter a gradient.
        """
        image, point = assigned.positive.nonzero(as_tuple=True)
        stride = predictions.strides[point]
        anchor = predictions.points[point] / stride
        box_logits = at_least_float32(predictions.box_logits[image, point])  # (P, 4, R + 1)
        boxes = distances_to_boxes(anchor, expected_distances(box_logits, self.bins))
        target = targets_at(targets.boxes, assigned)[image, point] / stride
        weight = (assigned.scores * targets_at(targets.weights, assigned))[image, point]
        # The largest distance stays below the last bin (PaddleDetection 666f597, ppyoloe_head.py: reg_max - 0.01).
        distances = boxes_to_distances(anchor, target).clamp(0, self.reg_max - 0.01)
        iou = (giou_loss(boxes, target) * weight).sum()
        dfl = (distribution_focal_loss(box_logits, distances) * weight).sum()
        return iou, dfl, (boxes.detach() - target).abs().sum() / max(4 * len(point), 1)
