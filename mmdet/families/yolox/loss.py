"""The criterion of YOLOX. B images, M most boxes of an image, A points, C classes, P positive points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.core.normalizers import mean_normalizers
from mmdet.data.structures import Batch, LossOutput
from mmdet.families.yolox.assigner import assign_simota
from mmdet.families.yolox.head import Predictions, decode_boxes, encode_boxes
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
from mmdet.models.losses import full_precision, squared_iou_loss


class YOLOXCriterion(nn.Module):
    """``(Predictions, Batch) -> LossOutput`` with ``loss_iou``, ``loss_obj``, ``loss_cls`` and, from epoch ``l1_from_epoch`` on,
    ``loss_l1`` (weights and normaliser applied).

    All are sums divided by the number of positives over all ranks, at least 1, over the number of ranks: 1 - IoU^2 and the L1
    distance of the box codes, of the positives; binary cross-entropy of their
    classes against the IoU at the assigned class; binary cross-entropy of the objectness of all points. A target's mix-up weight
    multiplies the losses of its positives. A point inside an ignore region that is not positive carries no loss.
    Statistic: ``num_fg``, positives (at least one) per box of the batch.

    Where a prediction is not finite, all losses are NaN, and ``nonfinite`` names it.

    Raises:
        ValueError: a label lies outside [0, C).
    """

    def __init__(
        self,
        num_classes: int,
        l1_from_epoch: int,
        weight_iou: float = 5.0,
        weight_obj: float = 1.0,
        weight_cls: float = 1.0,
        weight_l1: float = 1.0,
        assign_bytes: int = ASSIGN_BYTES,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.l1_from_epoch = l1_from_epoch
        self.weight_iou, self.weight_obj, self.weight_cls, self.weight_l1 = weight_iou, weight_obj, weight_cls, weight_l1
        self.assign_bytes = assign_bytes

    def forward(self, predictions: Predictions, batch: Batch) -> LossOutput:
        with full_precision(predictions.class_logits):
            boxes = decode_boxes(predictions.box_codes, predictions.points, predictions.strides)
            logits = {"class_logits": predictions.class_logits.detach(), "obj_logits": predictions.obj_logits.detach()}
            names = ("class_logits", "obj_logits", "box_codes")
            predictions, fault = finite_predictions(predictions, names, {**logits, "boxes": boxes.detach()})
            if fault:
                boxes = decode_boxes(predictions.box_codes, predictions.points, predictions.strides)
            check_labels(batch.targets, self.num_classes)
            assigned = self.assign(predictions, batch, boxes)
            (normalizer,) = mean_normalizers(assigned.positive.sum())
            iou, cls, l1 = self._positive_losses(predictions, assigned, batch, boxes)
            obj = self._objectness_loss(predictions, assigned, batch)
        losses = {
            "loss_iou": self.weight_iou * iou / normalizer,
            "loss_obj": self.weight_obj * obj / normalizer,
            "loss_cls": self.weight_cls * cls / normalizer,
        }
        if l1 is not None:
            losses["loss_l1"] = self.weight_l1 * l1 / normalizer
        num_fg = assigned.positive.sum().clamp(min=1) / batch.targets.valid.sum().clamp(min=1)
        return spoil(LossOutput(losses, {"num_fg": num_fg}), fault)

    def assign(self, predictions: Predictions, batch: Batch, boxes: Tensor | None = None) -> Assignment:
        """SimOTA on the batch; ``boxes`` (B, A, 4) px saves decoding them again."""
        if boxes is None:
            boxes = decode_boxes(predictions.box_codes, predictions.points, predictions.strides)
        grid = predictions.strides, predictions.level_shapes
        logits = predictions.class_logits.detach(), predictions.obj_logits.detach()
        return assign_simota(boxes.detach(), *logits, batch.targets, *grid, assign_bytes=self.assign_bytes)

    def _positive_losses(
        self, predictions: Predictions, assigned: Assignment, batch: Batch, boxes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sums over the positives of the IoU, class and (where it counts) L1 losses, each (). Without positives the sums are over
        nothing, which is zero and still gives every parameter a gradient."""
        at = assigned.positive.nonzero(as_tuple=True)
        points, strides = predictions.points[at[1]], predictions.strides[at[1]]
        target = targets_at(batch.targets.boxes, assigned)[at].to(boxes.dtype)
        weight = targets_at(batch.targets.weights, assigned)[at].to(boxes.dtype)
        iou = squared_iou_loss(boxes[at], target) * weight

        logits = at_least_float32(predictions.class_logits[at])  # (P, C)
        label = targets_at(batch.targets.labels, assigned)[at]
        quality = torch.zeros_like(logits).scatter_(1, label.unsqueeze(1), assigned.scores[at].unsqueeze(1).to(logits.dtype))
        cls = F.binary_cross_entropy_with_logits(logits, quality, reduction="none").sum(1) * weight

        if batch.epoch < self.l1_from_epoch:
            return iou.sum(), cls.sum(), None
        codes = at_least_float32(predictions.box_codes[at])
        l1 = (codes - encode_boxes(target, points, strides)).abs().sum(1) * weight
        return iou.sum(), cls.sum(), l1.sum()

    def _objectness_loss(self, predictions: Predictions, assigned: Assignment, batch: Batch) -> Tensor:
        """Sum over all points of the objectness loss, ()."""
        logits, targets = at_least_float32(predictions.obj_logits), batch.targets
        loss = F.binary_cross_entropy_with_logits(logits, assigned.positive.to(logits.dtype), reduction="none")
        counted = ~inside_ignored(predictions.points, targets.ignore, self.assign_bytes)
        weight = torch.where(assigned.positive, targets_at(targets.weights, assigned), counted.to(targets.weights.dtype))
        return (loss * weight).sum()
