"""Heads and criteria of the tasks that are no detection.

B images, C classes, D channels of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.data.structures import LossOutput
from mmdet.errors import UsageError
from mmdet.families.multitask.batches import LabelledBatch
from mmdet.models.boxes import at_least_float32


class PooledLinear(nn.Module):
    """The mean of the last map over the image, then one linear layer: maps (B, C_l, H_l, W_l) -> logits (B, num_classes)."""

    def __init__(self, num_classes: int, in_channels: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(in_channels[-1], num_classes)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.linear(self.dropout(features[-1].mean((2, 3))))


class PooledEmbedding(nn.Module):
    """The mean of the last map, projected to a vector of length 1: maps -> (B, D). For tasks that compare images."""

    def __init__(self, channels: int, in_channels: Sequence[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels[-1], channels)

    def forward(self, features: list[Tensor]) -> Tensor:
        return F.normalize(self.linear(features[-1].mean((2, 3))), dim=1)


def top1(logits: Tensor, labels: Tensor) -> Tensor:
    """Percentage of images whose largest logit is that of their label: logits (B, C), labels (B,) -> ()."""
    return 100.0 * (logits.argmax(1) == labels).to(torch.float32).mean()


def multilabel_top1(logits: Tensor, labels: Tensor) -> Tensor:
    """Percentage of decisions, image by class, whose sign is right: logits (B, C), labels (B, C) in {0, 1} -> ()."""
    return 100.0 * ((logits > 0) == (labels > 0.5)).to(torch.float32).mean()


class CrossEntropy(nn.Module):
    """Mean cross-entropy of logits (B, C) against labels (B,). Statistic: ``top1``, percent."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, batch: LabelledBatch) -> LossOutput:
        logits = at_least_float32(logits)
        _check_labels(batch.labels, logits)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        return LossOutput({"loss_cls": loss}, {"top1": top1(logits.detach(), batch.labels)})


class BinaryCrossEntropy(nn.Module):
    """Mean over images and classes of the binary cross-entropy of logits (B, C) against labels (B, C). Statistic: ``top1``,
    percentage of right decisions."""

    def forward(self, logits: Tensor, batch: LabelledBatch) -> LossOutput:
        logits = at_least_float32(logits)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype))
        return LossOutput({"loss_cls": loss}, {"top1": multilabel_top1(logits.detach(), batch.labels)})


class PairLogistic(nn.Module):
    """Whether two images belong together, from the embeddings (2B, D) of B pairs, first images before second ones.

    The cosine of a pair, times ``scale`` and shifted, is the logit; labels (2B,) are 1 for pairs that belong together and the
    same in both halves. Statistic: ``top1``, percentage of pairs on the right side.
    """

    def __init__(self, scale: float = 10.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.shift = nn.Parameter(torch.tensor(0.0))

    def logits(self, embeddings: Tensor) -> Tensor:
        """(2B, D) -> (B,)."""
        first, second = at_least_float32(embeddings).chunk(2)
        return (first * second).sum(1) * self.scale + self.shift

    def forward(self, embeddings: Tensor, batch: LabelledBatch) -> LossOutput:
        logits = self.logits(embeddings)
        wanted = batch.labels[: len(logits)].to(logits.dtype)
        loss = F.binary_cross_entropy_with_logits(logits, wanted)
        return LossOutput({"loss_pair": loss}, {"top1": 100.0 * ((logits.detach() > 0) == (wanted > 0.5)).float().mean()})


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]):
        values = sorted({v for v in labels.tolist() if not 0 <= v < logits.shape[1]})
        raise UsageError(f"labels {values} in the batch, but the head has {logits.shape[1]} classes")


DEFAULT_CRITERIA = {"classification": CrossEntropy, "multilabel": BinaryCrossEntropy, "pairwise": PairLogistic}
