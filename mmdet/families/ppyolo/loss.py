"""The criterion of PP-YOLO and PP-YOLOv2. B images, A cells of all levels, C classes, P positive cells."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.core.normalizers import image_normalizer
from mmdet.data.structures import Batch, LossOutput, Targets
from mmdet.families.ppyolo.anchors import Anchors, CellTable, cell_table, in_cell
from mmdet.families.ppyolo.assigner import Positives, assign_best_anchor, largest_overlaps
from mmdet.families.ppyolo.head import Predictions
from mmdet.models.assign import ASSIGN_BYTES, check_labels, finite_predictions, inside_ignored, spoil
from mmdet.models.boxes import at_least_float32, iou_aligned
from mmdet.models.losses import full_precision


class _Learned(NamedTuple):
    """The P positive cells: what they predict and what they should."""

    logits: Tensor  # (P, 5 + C): x, y, w, h, object, classes
    ious: Tensor | None  # (P,) logits
    boxes: Tensor  # (P, 4) xyxy px
    weight: Tensor  # (P,) target score
    emphasis: Tensor  # (P,) greater for small boxes


class PPYOLOCriterion(nn.Module):
    """``(Predictions, Batch) -> LossOutput``: ``loss_xy``, ``loss_wh``, ``loss_iou``, ``loss_obj``, ``loss_cls`` and, with the
    IoU branch, ``loss_iou_aware``.

    Every term is a sum over the cells of an image and a mean over images. The normaliser is therefore the number of images:
    ranks and micro-batches hold equally many, so the mean of their gradients is the gradient of the mean over all of them, and
    nothing has to be reduced over ranks.

    A positive cell learns place and shape of its box, its classes, the IoU of its prediction, and that there is an object; all
    of that counts as much as the box's mix-up weight says. Every other cell learns that there is none, unless its prediction
    overlaps some box by more than ``ignore_threshold`` or its centre lies in an ignore region. Statistic: ``num_pos``, positive
    cells per image.

    Where a prediction is not finite, all losses are NaN, and ``nonfinite`` names its level.

    Raises:
        ValueError: a label lies outside [0, C).
    """

    def __init__(
        self,
        num_classes: int,
        anchors: Anchors,
        iou_aware: bool = True,
        scale_x_y: float = 1.05,
        ignore_threshold: float = 0.7,
        weight_iou: float = 2.5,
        weight_iou_aware: float = 1.0,
        assign_bytes: int = ASSIGN_BYTES,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.anchors = anchors
        self.iou_aware = iou_aware
        self.scale_x_y = scale_x_y
        self.ignore_threshold = ignore_threshold
        self.weight_iou, self.weight_iou_aware = weight_iou, weight_iou_aware
        self.assign_bytes = assign_bytes

    def forward(self, predictions: Predictions, batch: Batch) -> LossOutput:
        targets = batch.targets
        with full_precision(predictions.maps[0]):
            watched = {f"map of stride {s}": m.detach() for s, m in zip(self.anchors.strides, predictions.maps, strict=True)}
            predictions, fault = finite_predictions(predictions, ("maps",), watched)
            maps = predictions.maps
            check_labels(targets, self.num_classes)
            table = cell_table(maps, self.anchors)
            positives = assign_best_anchor(targets, self.anchors, table, self.num_classes)
            learned = self._learned(maps, positives, targets, table)
            sums = self._box_losses(learned, positives, table)
            classes = F.binary_cross_entropy_with_logits(
                learned.logits[:, 5:], positives.classes.to(learned.logits.dtype), reduction="none"
            )
            sums["loss_obj"] = self._object_loss(maps, positives, targets, learned.weight, table)
            sums["loss_cls"] = (classes.sum(1) * learned.weight).sum()
        images = image_normalizer(len(batch), maps[0])
        losses = {name: value / images for name, value in sums.items()}
        num_pos = torch.tensor(len(positives.cell) / len(batch), device=maps[0].device)
        return spoil(LossOutput(losses, {"num_pos": num_pos}), fault)

    def _learned(self, maps: tuple[Tensor, ...], positives: Positives, targets: Targets, table: CellTable) -> _Learned:
        logits, ious = [], []
        counts = positives.level.bincount(minlength=len(maps)).tolist()
        places = (p.split(counts) for p in (positives.image, positives.slot, positives.row, positives.column))
        for raw, image, slot, row, column in zip(maps, *places, strict=True):
            rest, level_ious = self.anchors.split(raw, self.iou_aware)
            logits.append(at_least_float32(rest[image, slot, :, row, column]))
            if level_ious is not None:
                ious.append(at_least_float32(level_ious[image, slot, row, column]))
        at = positives.image, positives.box
        dtype = logits[0].dtype
        boxes, weight = targets.boxes[at].to(dtype), targets.weights[at].to(dtype)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1) / (table.size[0] * table.size[1])
        return _Learned(torch.cat(logits), torch.cat(ious) if ious else None, boxes, weight, 2 - area)

    def _box_losses(self, learned: _Learned, positives: Positives, table: CellTable) -> dict[str, Tensor]:
        """Sums over the batch, each (). Without positives they are 0 and still give every parameter a gradient."""
        stride = table.stride[positives.level].unsqueeze(1)
        cell = torch.stack([positives.column, positives.row], 1)
        anchor = self.anchors.by_level[positives.level, positives.slot].to(learned.logits.dtype)
        sides = learned.boxes[:, 2:] - learned.boxes[:, :2]
        place = in_cell(learned.logits[:, :2], self.scale_x_y)
        wanted_place = (learned.boxes[:, :2] + learned.boxes[:, 2:]) / 2 / stride - cell
        shape, wanted_shape = learned.logits[:, 2:4], (sides / anchor).log()
        center, half = (place + cell) * stride, shape.exp() * anchor / 2
        overlap = iou_aligned(torch.cat([center - half, center + half], 1), learned.boxes)

        weight = learned.weight * learned.emphasis
        sums = {
            "loss_xy": ((place - wanted_place).abs().sum(1) * weight).sum(),
            "loss_wh": ((shape - wanted_shape).abs().sum(1) * weight).sum(),
            "loss_iou": self.weight_iou * ((1 - overlap**2) * weight).sum(),
        }
        if learned.ious is not None:
            aware = F.binary_cross_entropy_with_logits(learned.ious, overlap.detach(), reduction="none")
            sums["loss_iou_aware"] = self.weight_iou_aware * (aware * learned.weight).sum()
        return sums

    def _object_loss(
        self, maps: tuple[Tensor, ...], positives: Positives, targets: Targets, weight: Tensor, table: CellTable
    ) -> Tensor:
        """Sum over all cells of the batch, ()."""
        batch = len(maps[0])
        positive = torch.zeros((batch, table.total), dtype=torch.bool, device=maps[0].device)
        positive[positives.image, positives.cell] = True
        score = torch.zeros((batch, table.total), dtype=weight.dtype, device=maps[0].device)
        score[positives.image, positives.cell] = weight
        total, start = weight.sum() * 0, 0
        for level, raw in enumerate(maps):
            rest, _ = self.anchors.split(raw, self.iou_aware)
            logits = at_least_float32(rest[:, :, 4]).flatten(1)
            cells = slice(start, start + logits.shape[1])
            start = cells.stop
            pred_boxes = self.anchors.decode(rest[:, :, :4].detach(), level, self.scale_x_y).flatten(1, 3)
            negative = largest_overlaps(pred_boxes, targets, self.assign_bytes) <= self.ignore_threshold
            ignored = inside_ignored(self.anchors.centers(raw, level), targets.ignore, self.assign_bytes)
            negative &= ~ignored.repeat(1, self.anchors.per_level)
            counted = torch.where(positive[:, cells], score[:, cells], negative.to(score.dtype))
            loss = F.binary_cross_entropy_with_logits(logits, positive[:, cells].to(logits.dtype), reduction="none")
            total = total + (loss * counted).sum()
        return total
