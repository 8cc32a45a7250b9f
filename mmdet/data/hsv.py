"""Colour jitter in HSV."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from mmdet.data.structures import Sample

_HUES = 180  # OpenCV's hue of 8-bit images counts in steps of two degrees


@dataclass(frozen=True)
class HSVJitter:
    """Adds whole numbers to hue, saturation and value of the whole image; each of the three happens half of the time.

    Source: Megvii YOLOX 6ddff48, data_augment.py, ``augment_hsv``.
    """

    prob: float = 1.0
    gains: tuple[int, int, int] = (5, 30, 30)  # largest change of hue (of 180), saturation and value (of 255)

    def draw(self, rng: np.random.Generator) -> np.ndarray | None:
        """(3,) int64 addends; None where nothing happens."""
        if rng.random() >= self.prob:
            return None
        change = (rng.uniform(-1, 1, 3) * self.gains * rng.integers(0, 2, 3)).astype(np.int64)
        return change if change.any() else None

    def image(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """``image`` (H, W, 3) uint8 RGB changed at random; itself where nothing happens."""
        change = self.draw(rng)
        return image if change is None else shift_hsv(image, change)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        return sample.replace(image=self.image(sample.image, rng))


def shift_hsv(image: np.ndarray, change: np.ndarray) -> np.ndarray:
    """``image`` (H, W, 3) uint8 RGB with ``change`` (3,) added: hue goes round, saturation and value stop at 0 and 255."""
    levels = np.arange(256)
    table = np.stack([(levels + change[0]) % _HUES, *np.clip(levels + change[1:, None], 0, 255)], -1).astype(np.uint8)
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    cv2.LUT(hsv, table[None], dst=hsv)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=hsv)
