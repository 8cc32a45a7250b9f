"""Affine maps of images and boxes.

A map is a (3, 3) float64 matrix between continuous pixel coordinates, (x, y, 1)_new = A @ (x, y, 1)_old, in which pixel i covers
[i, i + 1): the same numbers serve boxes and pixels. (OpenCV counts from the centre of the first pixel; ``paint`` translates.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

from mmdet.data.structures import Sample


def scaling(x: float, y: float, offset: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """The map that scales by ``x`` and ``y`` and then shifts by ``offset`` (x, y) px."""
    return np.array([[x, 0, offset[0]], [0, y, offset[1]], [0, 0, 1]], dtype=np.float64)


@dataclass(frozen=True)
class RandomAffine:
    """Rotation, scale, shear and shift about the top left corner.

    Source: Megvii YOLOX 6ddff48, data_augment.py, ``get_affine_matrix``.
    """

    degrees: float = 10.0  # largest rotation, either way
    translate: float = 0.1  # largest shift, either way, as a part of the side
    scale: tuple[float, float] = (0.1, 2.0)  # range
    shear: float = 2.0  # largest shear, either way, degrees

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        """A map into a frame of ``size`` (H, W)."""
        angle, scale = math.radians(rng.uniform(-self.degrees, self.degrees)), rng.uniform(*self.scale)
        shear_x, shear_y = np.tan(np.radians(rng.uniform(-self.shear, self.shear, 2)))
        cos, sin = scale * math.cos(angle), scale * math.sin(angle)
        matrix = np.eye(3)
        matrix[:2, :2] = np.array([[1, shear_y], [shear_x, 1]]) @ np.array([[cos, sin], [-sin, cos]])
        matrix[:2, 2] = rng.uniform(-self.translate, self.translate, 2) * (size[1], size[0])
        return matrix


def map_boxes(boxes: np.ndarray, transform: np.ndarray, limit: tuple[float, float, float, float]) -> np.ndarray:
    """The boxes, axis-parallel, that enclose ``boxes`` (N, 4) xyxy px after ``transform``, clipped to ``limit`` xyxy; float64."""
    corners = boxes.astype(np.float64)[:, [0, 1, 2, 1, 0, 3, 2, 3]].reshape(-1, 4, 2)
    moved = corners @ transform[:2, :2].T + transform[:2, 2]
    moved = np.clip(moved, limit[:2], limit[2:])
    return np.concatenate([moved.min(1), moved.max(1)], 1)


def larger(boxes: np.ndarray, min_side: float) -> np.ndarray:
    """(N,) bool, whether both sides of ``boxes`` (N, 4) xyxy px are longer than ``min_side`` px."""
    return ((boxes[:, 2:] - boxes[:, :2]) > min_side).all(1)


def mirror(sample: Sample) -> Sample:
    """The sample with left and right exchanged."""
    size = sample.image.shape[:2]
    transform, limit = scaling(-1, 1, (size[1], 0)), (0, 0, size[1], size[0])
    return sample.replace(
        image=cv2.flip(sample.image, 1),
        boxes=map_boxes(sample.boxes, transform, limit).astype(np.float32),
        ignore=map_boxes(sample.ignore, transform, limit).astype(np.float32),
        transform=transform @ sample.transform,
    )


def paint(
    canvas: np.ndarray,
    image: np.ndarray,
    transform: np.ndarray,
    tile: tuple[float, float, float, float] | None = None,
    frame: np.ndarray | None = None,
) -> None:
    """Draws ``image`` (h, w, 3) uint8 on ``canvas`` (H, W, 3) uint8, in place, with one bilinear resampling; of an image that
    becomes much smaller, a halved copy is drawn, since bilinear sampling would skip pixels and leave their noise.

    ``transform`` maps the image to the canvas. Painted are the canvas pixels whose centre lies inside ``tile`` xyxy, a
    rectangle that ``frame`` maps to the canvas (without: the whole image). Tiles that share an edge in the same frame neither
    overlap nor leave a gap; the image is continued by its edge pixels where a tile reaches beyond it.
    """
    if tile is None or frame is None:
        tile, frame = (0, 0, image.shape[1], image.shape[0]), transform
    bounds = map_boxes(np.array([tile]), frame, (0, 0, canvas.shape[1], canvas.shape[0]))[0]
    x1, y1, x2, y2 = (*np.floor(bounds[:2]).astype(int).tolist(), *np.ceil(bounds[2:]).astype(int).tolist())
    if x2 <= x1 or y2 <= y1:
        return
    start, stop = _row_spans(np.linalg.inv(frame), tile, (x1, y1, x2, y2))
    image, transform = _halved(image, transform)
    # From the centre of pixel (0, 0) of the part that is drawn to the image, counted from the centre of its first pixel.
    matrix = scaling(1, 1, (-0.5, -0.5)) @ np.linalg.inv(transform) @ scaling(1, 1, (x1 + 0.5, y1 + 0.5))
    target = canvas[y1:y2, x1:x2]
    warped = cv2.warpAffine(
        image,
        matrix[:2],
        (x2 - x1, y2 - y1),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    if (start == 0).all() and (stop == x2 - x1).all():
        target[...] = warped
        return
    columns = np.arange(x2 - x1, dtype=np.int16)
    inside = (columns >= start[:, None]) & (columns < stop[:, None])
    cv2.copyTo(warped, inside.view(np.uint8), target)


def _halved(image: np.ndarray, transform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The image averaged down by two until ``transform`` scales it by more than the square root of a half, and the transform
    of what is left: the level of an image pyramid that lies nearest."""
    scale = math.sqrt(abs(np.linalg.det(transform[:2, :2])))
    while scale < math.sqrt(0.5) and min(image.shape[:2]) >= 4:
        height, width = image.shape[:2]
        image = cv2.resize(image, (width // 2, height // 2), interpolation=cv2.INTER_AREA)
        transform = transform @ scaling(width / (width // 2), height / (height // 2))
        scale *= 2
    return image, transform


def _row_spans(inverse: np.ndarray, tile, part: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel row of ``part`` xyxy of the canvas the columns [start, stop), counted from the part's left, whose centres
    ``inverse`` maps into ``tile``: two (rows,) int16."""
    x1, y1, x2, y2 = part
    rows = np.arange(y1, y2) + 0.5
    low, high = np.full(len(rows), x1, np.float64), np.full(len(rows), x2, np.float64)
    for axis in range(2):
        slope, at_zero = inverse[axis, 0], inverse[axis, 1] * rows + inverse[axis, 2]
        first, last = tile[axis], tile[axis + 2]
        if abs(slope) < 1e-12:  # the coordinate does not change along a row
            high = np.where((at_zero >= first) & (at_zero < last), high, low)
            continue
        ends = (first - at_zero) / slope, (last - at_zero) / slope
        low, high = np.maximum(low, np.minimum(*ends)), np.minimum(high, np.maximum(*ends))
    start, stop = (np.ceil(np.clip(edge, x1, x2) - 0.5).astype(np.int16) - x1 for edge in (low, high))
    return start, np.maximum(start, stop)
