"""From decoded boxes and scores to detections. B images, A points, C classes, K kept detections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from mmdet.data.structures import Detections, ImageMeta


class MulticlassNMS:
    """Greedy non-maximum suppression, class by class. Its settings are plain attributes and may be changed at any time.

    ``multi_label`` (PaddlePaddle's MultiClassNMS, as PP-YOLOE's AP was measured): a point may be kept for several classes and
    each class starts from its ``nms_top_k`` best points. Otherwise a point has its best class only (YOLOX) and ``nms_top_k`` is
    not used. ``class_agnostic`` lets boxes of different classes suppress each other.

    Scores that are NaN and boxes that are not finite are passed on, for the evaluator to drop and count.
    """

    def __init__(
        self,
        score_threshold: float = 0.01,
        nms_threshold: float = 0.6,
        nms_top_k: int = 1000,
        keep_top_k: int = 100,
        multi_label: bool = True,
        class_agnostic: bool = False,
    ) -> None:
        self.score_threshold = score_threshold  # kept when the score is above it
        self.nms_threshold = nms_threshold  # suppressed when the IoU with a better box is above it
        self.nms_top_k = nms_top_k  # points per class that enter the suppression; -1: all
        self.keep_top_k = keep_top_k  # detections per image; -1: all
        self.multi_label = multi_label
        self.class_agnostic = class_agnostic

    @torch.no_grad()
    def __call__(self, boxes: Tensor, scores: Tensor, meta: Sequence[ImageMeta] | None = None) -> list[Detections]:
        """boxes (B, A, 4) xyxy px, scores (B, A, C) in [0, 1] -> one Detections per image, best score first.

        The inputs are not modified. Images are taken one by one, so memory does not grow with B. ``meta`` is not needed here:
        boxes stay in the network's frame and are not clipped.
        """
        return [self._one_image(b, s) for b, s in zip(boxes.float(), scores.float(), strict=True)]

    def _one_image(self, boxes: Tensor, scores: Tensor) -> Detections:
        points, labels, kept_scores = self._candidates(scores)
        boxes = boxes[points]
        groups = torch.zeros_like(labels) if self.class_agnostic else labels
        order = batched_nms(_shifted(boxes), kept_scores.double(), groups, self.nms_threshold)
        if self.keep_top_k >= 0:
            order = order[: self.keep_top_k]
        return Detections(boxes[order], kept_scores[order], labels[order])

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """scores (A, C) -> point indexes, labels and scores, each (n,), of what is above the threshold."""
        num_points, num_classes = scores.shape
        if not self.multi_label:
            best, labels = scores.max(1)
            points = (~(best <= self.score_threshold)).nonzero().squeeze(1)
            return points, labels[points], best[points]
        k = num_points if self.nms_top_k < 0 else min(self.nms_top_k, num_points)
        values, points = scores.t().topk(k, dim=1)
        above = ~(values <= self.score_threshold)  # true for NaN too
        labels = torch.arange(num_classes, device=scores.device).unsqueeze(1).expand_as(points)
        return points[above], labels[above], values[above]


def _shifted(boxes: Tensor) -> Tensor:
    """A float64 copy (n, 4) moved so that no coordinate is negative; boxes that are not finite become a point.

    ``batched_nms`` keeps classes apart by adding multiples of the largest coordinate. Negative coordinates would reach into the
    neighbouring class's range, and in float32 the sums would lose the fraction of a pixel.
    """
    finite = boxes.isfinite().all(1, keepdim=True)
    boxes = torch.where(finite, boxes.double(), 0.0)
    return boxes - boxes.amin() if len(boxes) else boxes
