"""Which cell learns which box, and which cells are too close to a box to learn that there is none.

B images, M most boxes of an image, A cells of all levels, C classes, G boxes in use, P positive cells. Letters of levels and
anchors as in ``anchors.py``. Everything is computed for all boxes at once on the targets' device; nothing of size (B, A, C) is
made, and the pairwise overlaps of boxes and cells are taken in parts that fit in ``assign_bytes``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmdet.data.structures import Targets
from mmdet.families.ppyolo.anchors import Anchors, CellTable
from mmdet.models.assign import ASSIGN_BYTES, image_chunks
from mmdet.models.boxes import iou_pairwise

PAIR_BYTES = 16  # of all tensors that live at once per (cell, box) pair in ``largest_overlaps``, float32; measured 12, rounded up


class Positives(NamedTuple):
    """The cells that learn a box, ordered by cell, so level by level. All but ``classes`` are int64 (P,)."""

    image: Tensor
    cell: Tensor  # in [0, A)
    level: Tensor
    slot: Tensor  # the anchor's number in its level
    row: Tensor
    column: Tensor
    box: Tensor  # row of Targets
    classes: Tensor  # (P, C) bool


@torch.no_grad()
def assign_best_anchor(targets: Targets, anchors: Anchors, table: CellTable, num_classes: int) -> Positives:
    """Each box goes to one cell: the one under its centre, with the anchor of all levels whose shape overlaps most.

    Of several boxes in one cell it learns the last one, and the classes of all of them. Boxes without area or with weight 0 are
    left out.

    Args:
        targets: boxes of B images, xyxy px, labels in [0, C).
        anchors: their sizes and levels.
        table: the cells of the input size.
        num_classes: C.
    """
    sides = targets.boxes[..., 2:] - targets.boxes[..., :2]
    image, number = (targets.valid & (sides > 0).all(-1) & (targets.weights > 0)).nonzero(as_tuple=True)  # (G,)
    boxes, sides = targets.boxes[image, number], sides[image, number]
    level, slot = anchors.places[_shape_overlaps(sides, anchors.sizes).argmax(1)].unbind(1)
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2 / table.stride[level].unsqueeze(1)
    column = torch.minimum(centers[:, 0].floor().long().clamp(min=0), table.width[level] - 1)
    row = torch.minimum(centers[:, 1].floor().long().clamp(min=0), table.height[level] - 1)
    cell = table.start[level] + (slot * table.height[level] + row) * table.width[level] + column

    batch = len(targets.boxes)
    keys, owner = (cell * batch + image).unique(return_inverse=True)
    last = torch.full_like(keys, -1).scatter_reduce(0, owner, number, "amax")
    classes = torch.zeros((len(keys), num_classes), dtype=torch.bool, device=keys.device)
    classes[owner, targets.labels[image, number]] = True
    # Boxes of a cell agree in level, slot, row and column: any of them may write.
    place = keys.new_zeros((4, len(keys)))
    place[:, owner] = torch.stack([level, slot, row, column])
    return Positives(keys % batch, keys // batch, *place, last, classes)


def _shape_overlaps(sides: Tensor, anchors: Tensor) -> Tensor:
    """IoU of boxes of (width, height) (G, 2) with anchors (K, 2), all with one centre: (G, K)."""
    common = torch.minimum(sides.unsqueeze(1), anchors).prod(-1)
    return common / (sides.prod(-1, keepdim=True) + anchors.prod(-1) - common)


@torch.no_grad()
def largest_overlaps(pred_boxes: Tensor, targets: Targets, assign_bytes: int = ASSIGN_BYTES) -> Tensor:
    """Greatest IoU of each predicted box (B, A, 4) with any box of its image -> (B, A); 0 without boxes. The size of the parts
    does not change the result."""
    batch, count = pred_boxes.shape[:2]
    boxes = torch.where(targets.valid.unsqueeze(-1), targets.boxes, 0.0).to(pred_boxes.dtype)
    largest = pred_boxes.new_zeros((batch, count))
    at_once = max(1, assign_bytes // max(1, count * PAIR_BYTES))
    for rows in image_chunks(batch, count * min(at_once, boxes.shape[1]) * PAIR_BYTES, assign_bytes):
        for part in boxes[rows].split(at_once, dim=1):
            if part.shape[1]:
                torch.maximum(largest[rows], iou_pairwise(pred_boxes[rows], part).amax(2), out=largest[rows])
    return largest
