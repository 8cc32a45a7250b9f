"""The criterion of the tracker. Letters: see structures.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.core.normalizers import mean_normalizers
from mmdet.data.structures import LossOutput
from mmdet.families.siamese.draw import Draw
from mmdet.families.siamese.head import Predictions
from mmdet.families.siamese.labels import LabelSettings, mine_negatives, phase_one_labels, phase_two_labels
from mmdet.families.siamese.structures import PairBatch
from mmdet.models.boxes import at_least_float32, iou_aligned
from mmdet.models.losses import ciou_loss, full_precision
from mmdet.models.points import PointCache, boxes_to_distances, distances_to_boxes

VALIDATION_SEED = 10_000  # of the labels in a validation pass, the same after every epoch (design/siamese.md, B12)


@dataclass(frozen=True)
class LossWeights:
    """Factors of the loss terms."""

    pos: float
    neg: float
    iou: float
    l1: float = 0.0


def masked_softmax(values: Tensor, mask: Tensor) -> Tensor:
    """Softmax of each row of ``values`` (B, N) over the true elements of ``mask``, 0 elsewhere; a row without any is 0."""
    weights = values.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.where(mask, weights, 0.0)


class SiameseCriterion(nn.Module):
    """``(Predictions, PairBatch) -> LossOutput`` with ``loss_pos``, ``loss_neg``, ``loss_iou`` (and ``loss_l1`` where it counts).

    Each image's positives share a weight of 1, and so do its negatives; a term is the mean over the images that have any, over
    all ranks. Overlaps and weights are those of design/siamese.md, B7, with two differences: the CIoU is the published one, and
    predicted boxes are not cut at the crop's border, where a distance would get no gradient any more.

    Args:
        stride: px between points.
        settings: how points are labelled.
        first: factors of the loss terms before ``self_epoch``.
        second: the same from then on.
        self_epoch: from this epoch on negatives are mined from the model's own scores.
        weighted: points of an image differ in weight, by score and overlap, from the second epoch on.
        temperature: of those weights.
        seed: of the run; labels are drawn from it.
    """

    def __init__(
        self,
        stride: int,
        settings: LabelSettings,
        first: LossWeights,
        second: LossWeights,
        self_epoch: int,
        weighted: bool = True,
        temperature: float = 0.4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.settings, self.first, self.second = settings, first, second
        self.self_epoch, self.weighted, self.temperature, self.seed = self_epoch, weighted, temperature, seed
        self._points = PointCache((stride,))

    def mines(self, epoch: int) -> bool:
        """Whether negatives are mined in ``epoch``, counted from 0."""
        return epoch >= self.self_epoch

    def forward(self, predictions: Predictions, batch: PairBatch, validating: bool = False) -> LossOutput:
        with full_precision(predictions.logits):
            log_probs = at_least_float32(predictions.logits).flatten(2).log_softmax(1)  # (B, 2, N)
            ltrb = at_least_float32(predictions.ltrb).flatten(2).transpose(1, 2)  # (B, N, 4)
            points = self._points([predictions.logits]).points
            targets = batch.boxes.to(ltrb.dtype).unsqueeze(1).expand_as(ltrb)
            boxes = distances_to_boxes(points, ltrb)
            with torch.no_grad():
                scores, overlaps = log_probs[:, 1].exp(), iou_aligned(boxes, targets)
                labels = self.make_labels(points, batch, scores, overlaps, validating)
                weighted = self.weighted and batch.epoch > 0 and not validating
                pos, neg, reg = self.point_weights(labels, scores, overlaps, batch.positive, weighted)
            terms = {
                "pos": (pos, -log_probs[:, 1]),
                "neg": (neg, -log_probs[:, 0]),
                "iou": (reg, ciou_loss(boxes, targets)),
                "l1": (reg, F.smooth_l1_loss(ltrb, boxes_to_distances(points, targets), reduction="none").sum(-1)),
            }
            return self._sum(terms, batch, labels, overlaps, validating)

    def make_labels(self, points: Tensor, batch: PairBatch, scores: Tensor, overlaps: Tensor, validating: bool = False) -> Tensor:
        """(B, N) int64 in {-1, 0, 1}: a function of the batch (its epoch, step and positions too), the seed, and in the second
        phase of the predictions."""
        if validating:
            return phase_one_labels(points, batch, self.settings, Draw(VALIDATION_SEED, 0, batch.positions))
        draw = Draw(self.seed, batch.step, batch.positions)
        if not self.mines(batch.epoch):
            return phase_one_labels(points, batch, self.settings, draw)
        labels = phase_two_labels(points, batch, self.settings, draw)
        return mine_negatives(labels, scores, overlaps, batch.positive, self.settings, draw)

    def point_weights(
        self, labels: Tensor, scores: Tensor, overlaps: Tensor, positive: Tensor, weighted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (B, N) of points for the positives' class, the negatives' class and the box; an image's sum to 1, or to 0.

        Where ``weighted``, well-placed positives count more for the class, confident ones for the box, and among negatives those
        that score high without overlapping the target. An exponent's shift by a constant, which the reference has, cancels.
        """
        overlaps = torch.where(positive.unsqueeze(1), overlaps, 0.0)
        factor = 1 / self.temperature if weighted else 0.0
        is_pos, is_neg = labels == 1, labels == 0
        pos, reg = masked_softmax(overlaps * factor, is_pos), masked_softmax(scores * factor, is_pos)
        return pos, masked_softmax((scores - overlaps) * factor, is_neg), reg

    def _sum(
        self, terms: dict[str, tuple[Tensor, Tensor]], batch: PairBatch, labels: Tensor, overlaps: Tensor, validating: bool
    ) -> LossOutput:
        factors = self.second if self.mines(batch.epoch) and not validating else self.first
        with_pos, with_neg = (labels == 1).any(1).sum().to(overlaps.dtype), (labels == 0).any(1).sum().to(overlaps.dtype)
        num_pos, num_neg = (with_pos, with_neg) if validating else mean_normalizers(with_pos, with_neg)
        divisors = {"pos": num_pos, "neg": num_neg, "iou": num_pos, "l1": num_pos}
        means = {name: (weight * value).sum() / divisors[name].clamp(min=1e-9) for name, (weight, value) in terms.items()}
        losses = {f"loss_{name}": getattr(factors, name) * mean for name, mean in means.items() if getattr(factors, name)}
        is_pos = labels == 1
        stats = {
            "l1": means["l1"].detach(),
            "overlap": (overlaps * is_pos).sum() / is_pos.sum().clamp(min=1),
            "num_pos": is_pos.sum().to(overlaps.dtype) / len(labels),
            "num_neg": (labels == 0).sum().to(overlaps.dtype) / len(labels),
        }
        return LossOutput(losses, stats)
