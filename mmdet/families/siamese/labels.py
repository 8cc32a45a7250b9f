"""Which points learn what: ellipses around the target, and negatives mined from the model's own scores.

A label is 1 (target), 0 (not the target) or -1 (not looked at). Everything is computed on the device, for all pairs at once.
Source of rules and numbers: design/siamese.md, B6 and B8. Letters: see structures.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdet.families.siamese.draw import Draw, choose
from mmdet.families.siamese.structures import PairBatch

# Streams of random numbers, one for each choice.
_MIX, _MIX_COUNT, _NEGATIVE, _NEGATIVE_COUNT, _POSITIVE, _POSITIVE_COUNT, _INSIDE, _INSIDE_COUNT = range(8)
_HARD, _HARD_COUNT, _EASY, _EASY_COUNT, _KEPT, _KEPT_COUNT = range(8, 14)


@dataclass(frozen=True)
class LabelSettings:
    """How many points are labelled, and where."""

    pos_radius: float = 4.0  # positives lie in the ellipse with semi-axes width / 4 and height / 4
    neg_radius: float = 2.0  # negatives lie outside of that with width / 2 and height / 2
    mix_radius: float = 3.0  # of a distractor's ellipse
    pos_num: int = 16  # positives of an image, about
    neg_num: int = 48  # negatives of an image, about
    easy_num: int = 16  # mined negatives with a small overlap, about
    hard_num: int = 32  # mined negatives with a high score as well, about
    neg_iou: float = 0.10  # mined negatives overlap the target less
    neg_score: float = 0.30  # hard negatives score at least this

    def around(self, number: int) -> tuple[int, int]:
        """Least and most points where ``number`` are wanted: 14 to 18 for 16, 43 to 53 for 48."""
        return 9 * number // 10, -(-11 * number // 10)


def inside_ellipse(points: Tensor, boxes: Tensor, radius: float) -> Tensor:
    """Whether points (N, 2) px lie in the ellipse with semi-axes width / ``radius``, height / ``radius`` about each box's centre:
    boxes (..., 4) -> (..., N) bool. The border is inside; a box without area holds no point."""
    center, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    reach = (size / radius).unsqueeze(-2)
    offset = (points - center.unsqueeze(-2)) / reach.clamp(min=1e-6)
    return (offset.square().sum(-1) <= 1) & (reach > 0).all(-1)


def phase_one_labels(points: Tensor, batch: PairBatch, settings: LabelSettings, draw: Draw) -> Tensor:
    """Labels of the first phase: (N, 2) px -> (B, N) int64 in {-1, 0, 1}.

    In a positive pair positives lie about the target's centre, negatives outside of it and on the distractors. In a negative pair
    the place where one would expect the target is negative, and some of the rest.
    """
    inside, positives = _inside(points, batch, settings), _positives(points, batch, settings, draw)
    on_distractors = _on_distractors(points, batch, settings, draw)
    some = on_distractors.any(1)
    number = settings.neg_num
    few, many = (draw.integers(_NEGATIVE_COUNT, *span) for span in ((number // 4, number // 3), settings.around(number)))
    outside = choose(~inside, torch.where(some, few, many), draw.keys(_NEGATIVE, (len(points),)))
    labels = torch.full_like(inside, -1, dtype=torch.int64)
    labels[on_distractors | outside] = 0
    labels[positives] = 1
    return torch.where(batch.positive.unsqueeze(1), labels, _negative_pair_labels(inside, settings, draw))


def _negative_pair_labels(inside: Tensor, settings: LabelSettings, draw: Draw) -> Tensor:
    """``inside`` (B, N): the expected place. 12 to 20 points of it and 19 others are 0 at the default numbers."""
    number, spread = settings.pos_num, settings.pos_num // 4
    count = draw.integers(_INSIDE_COUNT, number - spread, number + spread)
    here = choose(inside, count, draw.keys(_INSIDE, (inside.shape[1],)))
    elsewhere = choose(~inside, torch.full_like(count, int(settings.neg_num / 2.5)), draw.keys(_NEGATIVE, (inside.shape[1],)))
    return torch.where(here | elsewhere, 0, -1)


def phase_two_labels(points: Tensor, batch: PairBatch, settings: LabelSettings, draw: Draw) -> Tensor:
    """Labels of the second phase before mining: (N, 2) px -> (B, N) int64 in {-1, 0, 1}.

    -1 marks what negatives may be mined from: all points of a negative pair, and those outside of a positive pair's target; 0 the
    other points about the target.
    """
    labels = torch.where(_inside(points, batch, settings), 0, -1)
    labels[_positives(points, batch, settings, draw, exactly=True)] = 1
    return torch.where(batch.positive.unsqueeze(1), labels, -1)


def mine_negatives(
    labels: Tensor, scores: Tensor, overlaps: Tensor, positive: Tensor, settings: LabelSettings, draw: Draw
) -> Tensor:
    """Labels after mining, (B, N) int64: the positives as they were, mined negatives 0, all else -1.

    Args:
        labels: (B, N) of ``phase_two_labels``; negatives are drawn where it is -1.
        scores: (B, N) in [0, 1], of the model.
        overlaps: (B, N) IoU of the predicted boxes with the target; of no account in negative pairs.
        positive: (B,) bool.
        settings: numbers and thresholds.
        draw: the batch's random numbers.
    """
    candidates = (labels == -1) & (torch.where(positive.unsqueeze(1), overlaps, 0.0) < settings.neg_iou)
    shape = (labels.shape[1],)
    hard_range = (settings.hard_num - settings.hard_num // 8, settings.hard_num + settings.hard_num // 8)
    hard_count = draw.integers(_HARD_COUNT, *hard_range)
    easy_count = draw.integers(_EASY_COUNT, *settings.around(settings.easy_num))
    hard = choose(candidates & (scores >= settings.neg_score), hard_count, draw.keys(_HARD, shape))
    easy = choose(candidates, easy_count, draw.keys(_EASY, shape))
    spread = settings.neg_num // 12
    kept_count = draw.integers(_KEPT_COUNT, settings.neg_num - spread, settings.neg_num + spread)
    negatives = choose(hard | easy, kept_count, draw.keys(_KEPT, shape))
    return torch.where(labels == 1, 1, torch.where(negatives, 0, -1))


def _inside(points: Tensor, batch: PairBatch, settings: LabelSettings) -> Tensor:
    return inside_ellipse(points, batch.boxes, settings.neg_radius)


def _positives(points: Tensor, batch: PairBatch, settings: LabelSettings, draw: Draw, exactly: bool = False) -> Tensor:
    """(B, N) bool: some points about the target's centre; if there is none, the nearest."""
    inner = inside_ellipse(points, batch.boxes, settings.pos_radius)
    centers = (batch.boxes[:, :2] + batch.boxes[:, 2:]) / 2
    nearest = (points - centers.unsqueeze(1)).square().sum(-1).argmin(1, keepdim=True)
    inner = torch.where(inner.any(1, keepdim=True), inner, torch.zeros_like(inner).scatter_(1, nearest, True))
    span = (settings.pos_num, settings.pos_num) if exactly else settings.around(settings.pos_num)
    return choose(inner, draw.integers(_POSITIVE_COUNT, *span), draw.keys(_POSITIVE, (len(points),)))


def _on_distractors(points: Tensor, batch: PairBatch, settings: LabelSettings, draw: Draw) -> Tensor:
    """(B, N) bool: 9 to 12 points of each distractor."""
    most = batch.distractors.shape[1]
    inside = inside_ellipse(points, batch.distractors, settings.mix_radius) & batch.distractor_valid.unsqueeze(-1)
    count = draw.integers(_MIX_COUNT, settings.neg_num // 5, settings.neg_num // 4, (most,))
    return choose(inside, count, draw.keys(_MIX, (most, len(points)))).any(1)
