"""Square crops around a target, for training and tracking alike.

Coordinates are continuous: pixel i covers [i, i + 1), a box is xyxy, its centre (x1 + x2) / 2. A crop is a ``Window`` of the
image and the map from image to crop; boxes and pixels go through the same map.

Source of the geometry: Bertinetto et al. 2016 (SiamFC), section 3.4; design/siamese.md, B4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

from mmdet.data.affine import map_boxes, paint

_MARGIN = 3  # px beyond the window that resampling may look at
_EVERYWHERE = (-1e9, -1e9, 1e9, 1e9)


def context_side(width: float, height: float, context: float = 0.5) -> float:
    """Side of the template crop of a target, px: ``sqrt((w + c (w + h)) (h + c (w + h)))``. For a square of side a: 2a."""
    margin = context * (width + height)
    return math.sqrt((width + margin) * (height + margin))


@dataclass(frozen=True)
class Window:
    """A part of an image, which may reach beyond it: centre and size in px of the image."""

    x: float
    y: float
    width: float
    height: float

    @classmethod
    def around(cls, box: np.ndarray, width: float, height: float | None = None) -> Window:
        """A window of the given size centred on ``box`` (4,) xyxy; a square one without ``height``."""
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        return cls(float(x), float(y), float(width), float(width if height is None else height))

    @property
    def box(self) -> np.ndarray:
        """(4,) float64 xyxy."""
        half_width, half_height = self.width / 2, self.height / 2
        return np.array([self.x - half_width, self.y - half_height, self.x + half_width, self.y + half_height])

    def transform(self, size: int) -> np.ndarray:
        """(3, 3) float64 map from the image to a square crop of ``size`` px that shows the whole window, centred; what the longer
        side decides leaves bars beside the shorter one."""
        scale = size / max(self.width, self.height)
        return np.array([[scale, 0, size / 2 - scale * self.x], [0, scale, size / 2 - scale * self.y], [0, 0, 1]])


def map_box(box: np.ndarray, transform: np.ndarray) -> np.ndarray:
    """``box`` (4,) or boxes (N, 4) xyxy after ``transform``, float64, enclosing the moved corners, not clipped."""
    return map_boxes(np.asarray(box, np.float64).reshape(-1, 4), transform, _EVERYWHERE).reshape(np.shape(box))


def mean_color(image: np.ndarray) -> np.ndarray:
    """(3,) uint8, the mean of an (H, W, 3) image by channel: what lies beyond its border."""
    return np.rint(cv2.mean(image)[:3]).astype(np.uint8)


def cut(image: np.ndarray, window: Window, size: int, fill: np.ndarray, after: np.ndarray | None = None) -> np.ndarray:
    """(size, size, 3) uint8: the window's part of ``image`` (H, W, 3) uint8, resampled once, ``fill`` (3,) everywhere else.

    ``after`` is a further map (3, 3) inside the crop's frame, such as a rotation.
    """
    canvas = np.empty((size, size, 3), np.uint8)
    canvas[:] = fill
    height, width = image.shape[:2]
    x1, y1, x2, y2 = np.clip(window.box, 0, (width, height, width, height))
    if x2 <= x1 or y2 <= y1:
        return canvas
    left, top = max(math.floor(x1) - _MARGIN, 0), max(math.floor(y1) - _MARGIN, 0)
    part = image[top : math.ceil(y2) + _MARGIN, left : math.ceil(x2) + _MARGIN]
    shift = np.array([[1.0, 0, left], [0, 1, top], [0, 0, 1]])
    transform = window.transform(size) @ shift
    if after is not None:
        transform = after @ transform
    paint(canvas, part, transform, tile=(x1 - left, y1 - top, x2 - left, y2 - top), frame=transform)
    return canvas


@dataclass(frozen=True)
class CropDraw:
    """How a crop is varied around a target. Source of the numbers: design/siamese.md, B4."""

    keep_scale: float  # probability that the scale stays
    scale: tuple[float, float]  # range of the factors of the crop's side
    keep_center: float  # probability that the target stays in the middle
    shrink: float  # the target may stick out of the crop by this part of the crop's side
    wide_scale: tuple[float, float] | None = None  # a wider range that some factors come from
    wide_from: int = 0  # epoch from which on ``wide_scale`` is in use

    stretch_crop: float = 0.18  # of the varied: both sides of the crop by two factors
    stretch_target: float = 0.40  # of the rest: the target's sides by two factors before the crop's side is computed
    wide_share: float = 0.11  # of the factors: from the wider range

    @classmethod
    def for_template(cls) -> CropDraw:
        return cls(keep_scale=0.8, scale=(0.85, 1.15), keep_center=1.0, shrink=0.0)

    @classmethod
    def for_search(cls, wide_from: int = 5) -> CropDraw:
        return cls(0.25, (0.75, 1.35), 0.25, shrink=0.05, wide_scale=(0.70, 1.40), wide_from=wide_from)

    @classmethod
    def for_validation(cls) -> CropDraw:
        """Search crops of fixed pairs: milder, so that the figure follows the network, not the crops."""
        return cls(0.4, (0.8, 1.25), 0.4, shrink=0.05)

    def draw(self, rng: np.random.Generator, box: np.ndarray, factor: float, context: float, epoch: int = 0) -> Window:
        """A window for ``box`` (4,) xyxy px.

        Args:
            rng: the only source of chance.
            box: the target, px of the image.
            factor: side of the unvaried crop, as a multiple of the template crop's.
            context: of ``context_side``.
            epoch: decides whether the wider range is in use.
        """
        width, height = box[2] - box[0], box[3] - box[1]
        side = factor * context_side(width, height, context)
        window_width = window_height = side
        if rng.random() >= self.keep_scale:
            kind = rng.random()
            if kind < self.stretch_crop:
                first, second = self._factors(rng, epoch, 2)
                window_width, window_height = side * first, side * second
            elif kind < self.stretch_crop + (1 - self.stretch_crop) * self.stretch_target:
                first, second = self._factors(rng, epoch, 2)
                window_width = window_height = factor * context_side(width * first, height * second, context)
            else:
                window_width = window_height = side * self._factors(rng, epoch, 1)[0]
        window = Window.around(box, window_width, window_height)
        if rng.random() >= self.keep_center:
            window = self._moved(rng, box, window)
        return window

    def _factors(self, rng: np.random.Generator, epoch: int, count: int) -> list[float]:
        """Factors on the same side of 1."""
        side = int(rng.integers(2))
        factors = []
        for _ in range(count):
            ends = (1.0, self.scale[side])
            if self.wide_scale is not None and epoch >= self.wide_from and rng.random() < self.wide_share:
                ends = (self.scale[side], self.wide_scale[side])
            factors.append(float(rng.uniform(min(ends), max(ends))))
        return factors

    def _moved(self, rng: np.random.Generator, box: np.ndarray, window: Window) -> Window:
        """Anywhere, as long as the box, made smaller by ``shrink`` on all sides, lies inside; a box larger than the window stays
        in the middle."""
        centers = []
        for axis, (middle, extent) in enumerate(((window.x, window.width), (window.y, window.height))):
            low, high = box[axis] + self.shrink * extent, box[axis + 2] - self.shrink * extent
            if high < low:
                low = high = (box[axis] + box[axis + 2]) / 2
            first, last = high - extent / 2, low + extent / 2
            centers.append(float(rng.uniform(first, last)) if first < last else middle)
        return Window(centers[0], centers[1], window.width, window.height)
