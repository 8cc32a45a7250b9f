"""Matrix NMS: scores decay by overlap, all boxes at once (arXiv 2003.10152, section 3.3). n candidates of an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdet.data.structures import Detections, ImageMeta
from mmdet.models.boxes import at_least_float32, iou_pairwise

MATRIX_BYTES = 64 * 2**20
PAIR_BYTES = 24  # of all tensors that live at once per pair of candidates, float32; rounded up


class MatrixNMS:
    """Soft suppression in parallel: each score is multiplied by a decay that follows from its overlaps with better boxes of its
    class. Its settings are plain attributes and may be changed at any time.

    A candidate is a point with one class whose score is above ``score_threshold``; a point may be kept for several classes. The
    best ``nms_top_k`` candidates of the image enter. With ``o(i, j)`` the IoU of two candidates of one class and ``m(i)`` the
    greatest overlap of i with a better one, the decay of j is the least ``f(o(i, j)) / f(m(i))`` over all better i, where f is
    ``1 - o`` or, with ``use_gaussian``, ``exp(-gaussian_sigma * o ** 2)``.

    A box without area overlaps nothing: it neither decays nor lowers another box. Scores that are NaN and boxes that are not
    finite are passed on, for the evaluator to drop and count, and lower no other box either.
    """

    def __init__(
        self,
        score_threshold: float = 0.01,
        post_threshold: float = 0.01,
        nms_top_k: int = 500,
        keep_top_k: int = 100,
        use_gaussian: bool = False,
        gaussian_sigma: float = 2.0,
    ) -> None:
        self.score_threshold = score_threshold  # a candidate when the score is above it
        self.post_threshold = post_threshold  # kept when the decayed score is above it
        self.nms_top_k = nms_top_k  # candidates per image that enter the suppression; -1: all
        self.keep_top_k = keep_top_k  # detections per image; -1: all
        self.use_gaussian = use_gaussian
        self.gaussian_sigma = gaussian_sigma

    @torch.no_grad()
    def __call__(self, boxes: Tensor, scores: Tensor, meta: Sequence[ImageMeta] | None = None) -> list[Detections]:
        """boxes (B, A, 4) xyxy px, scores (B, A, C) in [0, 1] -> one Detections per image, best decayed score first.

        The inputs are not modified. Images are taken one by one, so memory does not grow with B. ``meta`` is not needed here:
        boxes stay in the network's frame and are not clipped.
        """
        return [self._one_image(b.float(), at_least_float32(s)) for b, s in zip(boxes, scores, strict=True)]

    def _one_image(self, boxes: Tensor, scores: Tensor) -> Detections:
        points, labels = (~(scores <= self.score_threshold)).nonzero(as_tuple=True)  # true for NaN too
        candidates = scores[points, labels].float()
        k = len(candidates) if self.nms_top_k < 0 else min(self.nms_top_k, len(candidates))
        kept_scores, order = candidates.topk(k)
        boxes, labels = boxes[points[order]], labels[order]
        usable = boxes.isfinite().all(1) & ~kept_scores.isnan()
        decayed = kept_scores * self._decay(torch.where(usable.unsqueeze(1), boxes, 0.0), labels)
        decayed, order = decayed.sort(descending=True, stable=True)
        order = order[~(decayed <= self.post_threshold)]
        if self.keep_top_k >= 0:
            order = order[: self.keep_top_k]
        return Detections(boxes[order], decayed[: len(order)], labels[order])

    def _decay(self, boxes: Tensor, labels: Tensor) -> Tensor:
        """boxes (n, 4) and labels (n,), best score first -> decay factors (n,) in [0, 1]."""
        count = len(boxes)
        size = max(1, MATRIX_BYTES // max(1, count * PAIR_BYTES))
        slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        overlaps = [_better_overlaps(boxes, labels, slices[0])] if len(slices) == 1 else None  # of one slice: kept, not redone
        greatest = torch.zeros(count, device=boxes.device)
        for i, columns in enumerate(slices):
            greatest[columns] = (overlaps[i] if overlaps else _better_overlaps(boxes, labels, columns)).amax(0)
        decay = torch.ones_like(greatest)
        for i, columns in enumerate(slices):
            ratio = self._ratio(overlaps[i] if overlaps else _better_overlaps(boxes, labels, columns), greatest.unsqueeze(1))
            decay[columns] = ratio.amin(0).clamp(max=1.0)
        return decay

    def _ratio(self, overlaps: Tensor, greatest: Tensor) -> Tensor:
        """f(overlaps) / f(greatest), (n, m). A candidate that covers a better one entirely says nothing more: infinity."""
        if self.use_gaussian:
            return ((greatest**2 - overlaps**2) * self.gaussian_sigma).exp_()
        left = 1.0 - greatest
        return torch.where(left > 0, (1.0 - overlaps) / left, float("inf"))


def _better_overlaps(boxes: Tensor, labels: Tensor, columns: slice) -> Tensor:
    """IoU of all candidates (n) with those of ``columns`` (m), 0 unless of one class and the first one better: (n, m)."""
    overlaps = iou_pairwise(boxes, boxes[columns])
    rows = torch.arange(len(boxes), device=boxes.device).unsqueeze(1)
    counts = (labels.unsqueeze(1) == labels[columns]) & (rows < rows[columns].squeeze(1))
    return overlaps.mul_(counts)
