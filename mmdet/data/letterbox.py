"""Resizing that keeps the aspect ratio: the image at the top left, the rest filled."""

from __future__ import annotations

import cv2
import numpy as np

from mmdet.data.structures import Sample
from mmdet.data.transforms import move_sample


def fitted_size(image: np.ndarray, size: tuple[int, int]) -> tuple[float, tuple[int, int]]:
    """The scale at which ``image`` (h, w, 3) just fits into ``size`` (H, W), and its (h, w) then: whole px, rounded down."""
    height, width = image.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    return scale, (max(int(height * scale), 1), max(int(width * scale), 1))


class LetterboxTransform:
    """``Sample -> Sample`` of a fixed ``size`` (H, W): resized to fit, pixels beyond it ``fill``.

    Boxes are scaled by the exact factor although the image's sides are rounded down: that is how the published models map
    their detections back (Megvii YOLOX 6ddff48, data_augment.py, ``preproc``), at most a pixel at the far end.
    """

    def __init__(self, size: tuple[int, int], fill: int = 114, interpolation: int = cv2.INTER_LINEAR) -> None:
        self.size, self.fill, self.interpolation = tuple(size), fill, interpolation

    def __call__(self, sample: Sample) -> Sample:
        scale, (height, width) = fitted_size(sample.image, self.size)
        image = np.full((*self.size, 3), self.fill, np.uint8)
        image[:height, :width] = cv2.resize(sample.image, (width, height), interpolation=self.interpolation)
        return move_sample(sample, image, np.diag([scale, scale, 1.0]), np.ones(len(sample.boxes), bool), 0.0)
