"""Element-wise losses. Each works in at least float32 with autocast off and returns one value per element, unreduced.

Class losses take logits, so that no logarithm of a rounded probability is ever taken. Their weights depend on the prediction
and the gradient flows through them, as in the reference implementations: nothing is detached.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdet.models.boxes import at_least_float32, ciou_aligned, giou_aligned, iou_aligned


def full_precision(tensor: Tensor) -> torch.autocast:
    """A context in which autocast is off for the tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False)


def varifocal_loss(logits: Tensor, targets: Tensor, positive: Tensor, alpha: float = 0.75, gamma: float = 2.0) -> Tensor:
    """Varifocal loss (arXiv 2008.13367, equation 2), (...) -> (...).

    Args:
        logits: (...) class logits.
        targets: (...) target scores in [0, 1]; 0 where not positive.
        positive: (...) bool, true at the assigned class of a positive point; there the weight is the target itself.
        alpha: weight of the negatives.
        gamma: exponent of the predicted score in the negatives' weight.
    """
    with full_precision(logits):
        logits, targets = at_least_float32(logits), at_least_float32(targets)
        weight = torch.where(positive, targets, alpha * logits.sigmoid().pow(gamma))
        return weight * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def focal_loss(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Focal loss (arXiv 1708.02002, equation 5) with soft targets, (...) -> (...).

    The modulating factor is ``|score - target| ** gamma``; ``alpha`` weighs target 1 against target 0, ``alpha <= 0`` turns
    that off.
    """
    with full_precision(logits):
        logits, targets = at_least_float32(logits), at_least_float32(targets)
        weight = (logits.sigmoid() - targets).abs().pow(gamma)
        if alpha > 0:
            weight = weight * (alpha * targets + (1 - alpha) * (1 - targets))
        return weight * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def giou_loss(boxes: Tensor, targets: Tensor, eps: float = 1e-10) -> Tensor:
    """``1 - GIoU`` of paired boxes (N, 4), any common unit -> (N,) in [0, 2]."""
    with full_precision(boxes):
        return 1 - giou_aligned(boxes, targets, eps)


def ciou_loss(boxes: Tensor, targets: Tensor, eps: float = 1e-9) -> Tensor:
    """``1 - CIoU`` of paired boxes (N, 4), any common unit -> (N,), 0 or more."""
    with full_precision(boxes):
        return 1 - ciou_aligned(boxes, targets, eps)


def squared_iou_loss(boxes: Tensor, targets: Tensor, eps: float = 1e-16) -> Tensor:
    """``1 - IoU ** 2`` of paired boxes (N, 4), any common unit -> (N,) in [0, 1]."""
    with full_precision(boxes):
        return 1 - iou_aligned(boxes, targets, eps) ** 2


def distribution_focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Distribution focal loss (arXiv 2006.04388, equation 6), mean over the four sides.

    Args:
        logits: (N, 4, R + 1), bins 0..R of each side's distance.
        targets: (N, 4) distances in bins, in [0, R).

    Returns:
        (N,)
    """
    with full_precision(logits):
        log_probability = F.log_softmax(at_least_float32(logits), -1)
        targets = targets.to(log_probability.dtype)
        left = targets.floor()
        right_weight = targets - left
        index = left.long().unsqueeze(-1)
        log_left = log_probability.gather(-1, index).squeeze(-1)
        log_right = log_probability.gather(-1, index + 1).squeeze(-1)
        return -(log_left * (1 - right_weight) + log_right * right_weight).mean(-1)
