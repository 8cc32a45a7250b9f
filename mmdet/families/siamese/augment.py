"""What is done to the search crop of a positive pair. Source of the numbers: design/siamese.md, B5.

Three independent draws, each of which picks one change at most: a map (flip, rotation), a damage (blur, motion, an erased patch,
low resolution), a colour change. Maps are composed with the crop's own, so pixels are resampled once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

_ANGLES = (3.0, 20.0)  # degrees, either way
_BLUR_SIDES = (5, 19)  # px of the cross-shaped kernel, odd
_MOTION = (1, 8)  # px
_SHRINK = (0.4, 0.7)  # factor of the low resolution
_BRIGHTNESS, _CONTRAST = 64.0, (0.5, 1.5)


def flip_map(size: int) -> np.ndarray:
    """(3, 3) map that exchanges left and right of a crop of ``size`` px."""
    return np.array([[-1.0, 0, size], [0, 1, 0], [0, 0, 1]])


def rotation_map(size: int, degrees: float) -> np.ndarray:
    """(3, 3) map that turns a crop of ``size`` px about its centre."""
    cos, sin, middle = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), size / 2
    x, y = middle * (1 - cos + sin), middle * (1 - sin - cos)
    return np.array([[cos, -sin, x], [sin, cos, y], [0, 0, 1]])


def map_target(box: np.ndarray, transform: np.ndarray) -> np.ndarray:
    """``box`` (4,) xyxy after ``transform``: the hull of its four moved edge mid-points, float64. Turned corners would enclose
    more than a typical target fills. Without a rotation it is the box itself, moved."""
    x1, y1, x2, y2 = np.asarray(box, np.float64)
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    middles = np.array([[x1, y], [x2, y], [x, y1], [x, y2]]) @ transform[:2, :2].T + transform[:2, 2]
    return np.concatenate([middles.min(0), middles.max(0)])


@dataclass(frozen=True)
class SearchAugment:
    """Probabilities of the changes."""

    flip: float = 0.03
    rotate: float = 0.10
    blur: float = 0.05
    motion: float = 0.10
    erase: float = 0.13
    shrink: float = 0.12
    color: float = 0.15

    def draw_map(self, rng: np.random.Generator, size: int) -> np.ndarray | None:
        """A map inside a crop of ``size`` px, or None."""
        kind = rng.random()
        if kind < self.flip:
            return flip_map(size)
        if kind < self.flip + self.rotate:
            return rotation_map(size, float(rng.uniform(*_ANGLES)) * (1 if rng.random() < 0.5 else -1))
        return None

    def change_pixels(self, rng: np.random.Generator, crop: np.ndarray, box: np.ndarray) -> np.ndarray:
        """The crop (n, n, 3) uint8, perhaps damaged and coloured; ``box`` (4,) xyxy px is its target."""
        kind = rng.random()
        for share, change in ((self.blur, _blur), (self.motion, _motion), (self.erase, _erase), (self.shrink, _low_resolution)):
            if 0 <= kind < share:
                crop = change(rng, crop, box)
                break
            kind -= share
        return _recolor(rng, crop) if rng.random() < self.color else crop


def _blur(rng: np.random.Generator, crop: np.ndarray, box: np.ndarray) -> np.ndarray:
    side = 2 * int(rng.integers(_BLUR_SIDES[0] // 2, _BLUR_SIDES[1] // 2 + 1)) + 1
    kernel = np.zeros((side, side), np.float32)
    kernel[side // 2] = kernel[:, side // 2] = 1
    return cv2.filter2D(crop, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE)


def _motion(rng: np.random.Generator, crop: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Blurred along a line of some px in any direction."""
    length, angle = int(rng.integers(_MOTION[0], _MOTION[1] + 1)), rng.uniform(0, math.pi)
    steps = np.linspace(-length / 2, length / 2, 2 * length + 1)
    radius = length // 2 + 1
    kernel = np.zeros((2 * radius + 1, 2 * radius + 1), np.float32)
    rows, columns = (np.rint(radius + steps * part).astype(int) for part in (math.sin(angle), math.cos(angle)))
    np.add.at(kernel, (rows, columns), 1)
    return cv2.filter2D(crop, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE)


def _erase(rng: np.random.Generator, crop: np.ndarray, box: np.ndarray) -> np.ndarray:
    """A grey patch over a part of the target: up to half of its sides."""
    width, height = (box[2:] - box[:2]) * rng.uniform(0.2, 0.5, 2)
    x, y = (rng.uniform(box[axis], max(box[axis + 2] - extent, box[axis])) for axis, extent in enumerate((width, height)))
    x1, y1, x2, y2 = np.clip(np.rint([x, y, x + width, y + height]), 0, crop.shape[0]).astype(int)
    crop = crop.copy()
    crop[y1:y2, x1:x2] = rng.integers(96, 160)
    return crop


def _low_resolution(rng: np.random.Generator, crop: np.ndarray, box: np.ndarray) -> np.ndarray:
    side = max(round(crop.shape[0] * rng.uniform(*_SHRINK)), 1)
    small = cv2.resize(crop, (side, side), interpolation=cv2.INTER_AREA)
    return cv2.resize(small, crop.shape[1::-1], interpolation=cv2.INTER_LINEAR)


def _recolor(rng: np.random.Generator, crop: np.ndarray) -> np.ndarray:
    contrast, brightness = rng.uniform(*_CONTRAST), rng.uniform(-_BRIGHTNESS, _BRIGHTNESS)
    table = np.rint(np.clip(np.arange(256) * contrast + brightness, 0, 255)).astype(np.uint8)
    return cv2.LUT(crop, table)
