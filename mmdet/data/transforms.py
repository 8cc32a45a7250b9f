"""From the decoded photograph to the image of the batch: the training pipeline and the evaluation resize.

Colours: all distortions of the recipe are affine in RGB, so they are composed into one 3x4 matrix and applied once. Geometry:
expanding, cropping, flipping and resizing are composed too; only the window that stays visible is ever built, and it is
resampled once. Sources: PaddleDetection 666f597, ppdet/data/transform/operators.py (numbers), recipes.md 3.2 and gotcha 14.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from mmdet.data.structures import Sample, SampleKey

# Matrices between RGB and YIQ, to the digits of the reference.
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
_FROM_YIQ = np.array([[1.0, 0.956, 0.621], [1.0, -0.272, -0.647], [1.0, -1.107, 1.705]])
_LUMA = _TO_YIQ[0]

# NEAREST_EXACT is the nearest neighbour whose pixel centres agree with the boxes; the reference's shifts by half a pixel.
INTERPOLATIONS = (cv2.INTER_NEAREST_EXACT, cv2.INTER_LINEAR, cv2.INTER_AREA, cv2.INTER_CUBIC, cv2.INTER_LANCZOS4)


class Window(NamedTuple):
    """A rectangle of whole pixels in the frame of the image: it may reach out of it, and is filled there."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class ColourDistortion:
    """Ranges of the colour distortion; each of the four happens with ``prob``, in random order."""

    prob: float = 0.5
    hue: float = 18.0  # degrees, either way
    saturation: tuple[float, float] = (0.5, 1.5)  # factor
    contrast: tuple[float, float] = (0.5, 1.5)  # factor
    brightness: tuple[float, float] = (0.5, 1.5)  # added; the reference adds it to values of 0..255, where it hardly shows

    def draw(self, rng: np.random.Generator) -> np.ndarray | None:
        """A (3, 4) float64 matrix, RGB_new = M[:, :3] @ RGB + M[:, 3]; None where nothing happens."""
        steps = [
            lambda: hue_matrix(rng.uniform(-self.hue, self.hue)),
            lambda: saturation_matrix(rng.uniform(*self.saturation)),
            lambda: np.diag([rng.uniform(*self.contrast)] * 3 + [1.0]),
            lambda: _shift_matrix(rng.uniform(*self.brightness)),
        ]
        total = None
        for number in rng.permutation(len(steps)):
            if rng.random() < self.prob:
                matrix = steps[number]()
                total = matrix if total is None else matrix @ total
        return None if total is None else total[:3]


def hue_matrix(degrees: float) -> np.ndarray:
    """(4, 4) rotation of the chrominance plane in YIQ."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = np.eye(4)
    matrix[:3, :3] = _FROM_YIQ @ np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) @ _TO_YIQ
    return matrix


def saturation_matrix(factor: float) -> np.ndarray:
    """(4, 4) blend between the image (factor 1) and its luma (factor 0)."""
    matrix = np.eye(4)
    matrix[:3, :3] = factor * np.eye(3) + (1 - factor) * _LUMA
    return matrix


def _shift_matrix(delta: float) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, 3] = delta
    return matrix


def apply_colour(image: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``image`` (H, W, 3) uint8 with ``matrix`` (3, 4) applied to every pixel, rounded half-even and clipped once."""
    values = cv2.transform(image.astype(np.float32), matrix)
    np.rint(values, out=values)
    return np.clip(values, 0, 255, out=values).astype(np.uint8)


def draw_expand(rng: np.random.Generator, width: int, height: int, prob: float, max_ratio: float) -> Window:
    """A window that contains the whole image at a random place: the canvas of 1 to ``max_ratio`` times its sides."""
    if rng.random() >= prob:
        return Window(0, 0, width, height)
    ratio = rng.uniform(1, max_ratio)
    canvas_width, canvas_height = int(width * ratio), int(height * ratio)
    x, y = rng.integers(0, canvas_width - width + 1), rng.integers(0, canvas_height - height + 1)
    return Window(-int(x), -int(y), canvas_width, canvas_height)


@dataclass(frozen=True)
class RandomCrop:
    """Crops whose overlap with the boxes is constrained."""

    # The idea: Liu et al. 2016 (SSD), section 2.2; the numbers: operators.py, RandomCrop, without its ``cover_all_box``.

    thresholds: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    aspect_ratio: tuple[float, float] = (0.5, 2.0)
    scaling: tuple[float, float] = (0.3, 1.0)  # per side, before the aspect ratio
    attempts: int = 50  # per threshold

    def draw(self, rng: np.random.Generator, canvas: Window, boxes: np.ndarray) -> Window:
        """A window inside ``canvas``; ``boxes`` (N, 4) xyxy px are in the frame of the image. Without boxes: no crop.

        Thresholds come in random order, "no crop" among them. A candidate is taken if some box has at least that IoU with it
        and some box has its centre in it.
        """
        if not len(boxes):
            return canvas
        for number in rng.permutation(len(self.thresholds) + 1):
            if number == len(self.thresholds):
                return canvas
            windows = self._candidates(rng, canvas)
            overlaps = _iou(windows, boxes).max(1) >= self.thresholds[number]
            taken = np.flatnonzero(overlaps & centre_inside(windows[:, None], boxes).any(1))
            if len(taken):
                x1, y1, x2, y2 = windows[taken[0]].astype(int).tolist()
                return Window(x1, y1, x2 - x1, y2 - y1)
        return canvas

    def _candidates(self, rng: np.random.Generator, canvas: Window) -> np.ndarray:
        """(attempts, 4) float64 xyxy px, whole numbers."""
        scale = rng.uniform(*self.scaling, self.attempts)
        low, high = np.maximum(self.aspect_ratio[0], scale**2), np.minimum(self.aspect_ratio[1], scale**-2)
        root = np.sqrt(low + (high - low) * rng.random(self.attempts))
        width = np.maximum(np.floor(canvas.width * scale * root), 1)
        height = np.maximum(np.floor(canvas.height * scale / root), 1)
        width, height = np.minimum(width, canvas.width), np.minimum(height, canvas.height)
        x = canvas.x + np.floor(rng.random(self.attempts) * (canvas.width - width + 1))
        y = canvas.y + np.floor(rng.random(self.attempts) * (canvas.height - height + 1))
        return np.stack([x, y, x + width, y + height], 1)


def _iou(windows: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """(A, N) IoU of (A, 4) with (N, 4) xyxy."""
    corner = np.minimum(windows[:, None, 2:], boxes[None, :, 2:]) - np.maximum(windows[:, None, :2], boxes[None, :, :2])
    common = np.maximum(corner, 0).prod(2)
    areas = [(b[:, 2:] - b[:, :2]).prod(1) for b in (windows, boxes)]
    return common / (areas[0][:, None] + areas[1][None] - common)


def centre_inside(window: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Whether the centres of ``boxes`` (N, 4) xyxy lie inside ``window`` (..., 4): (..., N) bool."""
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    return ((window[..., :2] < centre) & (centre < window[..., 2:])).all(-1)


def resample(image: np.ndarray, window: Window, size: tuple[int, int], interpolation: int, flip: bool, fill) -> np.ndarray:
    """The pixels of ``window`` resized to ``size`` (H, W) and mirrored if ``flip``; beyond the image it shows ``fill``."""
    height, width = image.shape[:2]
    x1, y1 = max(window.x, 0), max(window.y, 0)
    x2, y2 = min(window.x + window.width, width), min(window.y + window.height, height)
    visible = image[y1:y2, x1:x2]
    if visible.shape[:2] != (window.height, window.width):
        canvas = np.empty((window.height, window.width, 3), np.uint8)
        canvas[0] = fill
        canvas[1:] = canvas[0]  # row copies; filling every pixel with three values is a hundred times slower
        canvas[y1 - window.y : y2 - window.y, x1 - window.x : x2 - window.x] = visible
        visible = canvas
    result = cv2.resize(visible, (size[1], size[0]), interpolation=interpolation)
    return cv2.flip(result, 1) if flip else result


def window_transform(window: Window, size: tuple[int, int], flip: bool) -> np.ndarray:
    """(3, 3) float64 from the frame of the image to the ``size`` (H, W) that ``resample`` makes of ``window``."""
    scale_x, scale_y = size[1] / window.width, size[0] / window.height
    matrix = np.array([[scale_x, 0, -window.x * scale_x], [0, scale_y, -window.y * scale_y], [0, 0, 1]])
    mirror = np.array([[-1.0, 0, size[1]], [0, 1, 0], [0, 0, 1]])
    return mirror @ matrix if flip else matrix


def move_boxes(boxes: np.ndarray, transform: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """``boxes`` (N, 4) xyxy px through an axis-parallel ``transform`` and clipped to ``size`` (H, W), float64."""
    corners = boxes.astype(np.float64).reshape(-1, 2, 2) * np.diagonal(transform)[:2] + transform[:2, 2]
    limit = np.array([size[1], size[0]], np.float64)
    corners = np.clip(corners, 0, limit)
    return np.concatenate([corners.min(1), corners.max(1)], 1)


def move_sample(sample: Sample, image: np.ndarray, transform: np.ndarray, keep: np.ndarray, min_side: float) -> Sample:
    """``sample`` with the new ``image`` and everything moved by ``transform`` (3, 3).

    ``keep`` (N,) bool names the boxes that stay, if also both sides measure ``min_side`` px; crowd regions stay as long as
    anything of them is visible.
    """
    size = image.shape[:2]
    boxes, ignore = move_boxes(sample.boxes, transform, size), move_boxes(sample.ignore, transform, size)
    keep = keep & ((boxes[:, 2:] - boxes[:, :2]) >= min_side).all(1)
    visible = (ignore[:, 2:] > ignore[:, :2]).all(1)
    return sample.replace(
        image=image,
        boxes=boxes[keep].astype(np.float32),
        labels=sample.labels[keep],
        weights=sample.weights[keep],
        ignore=ignore[visible].astype(np.float32),
        transform=transform @ sample.transform,
    )


def load_sample(source, key: SampleKey, rng: np.random.Generator) -> Sample:
    """The sample that ``key`` names, alone and as it is."""
    return source.load(key.index)


class DetectionTrainPipeline:
    """Colour distortion, expansion, constrained crop, mirroring and a resize to the size of the batch, without keeping the
    aspect ratio. Values stay uint8 RGB; the model normalises.

    The interpolation is drawn per image (the reference draws it per batch; a sample here depends on its own key only).
    """

    def __init__(
        self,
        expand_prob: float = 0.5,
        expand_ratio: float = 4.0,
        fill: tuple[int, int, int] = (123, 116, 103),  # RGB of the canvas; the recipe's means, cast to uint8 as there
        crop: RandomCrop | None = RandomCrop(),
        distort: ColourDistortion | None = ColourDistortion(),
        flip_prob: float = 0.5,
        random_interpolation: bool = True,
        interpolation: int = cv2.INTER_LINEAR,  # where it is not random
        min_side: float = 1.0,  # px in the network's frame; smaller boxes are left out
        load: Callable[..., Sample] = load_sample,  # ``(source, key, rng) -> Sample``: what the rest is applied to
    ) -> None:
        self.load = load
        self.expand_prob, self.expand_ratio, self.fill = expand_prob, expand_ratio, fill
        self.crop, self.distort, self.flip_prob = crop, distort, flip_prob
        self.random_interpolation, self.interpolation, self.min_side = random_interpolation, interpolation, min_side

    def __call__(self, source, key: SampleKey, rng: np.random.Generator) -> Sample:
        """The sample at ``key`` with an image of ``key.size`` (H, W); ``source.load(index)`` decodes."""
        return self.transform(self.load(source, key, rng), key.size, rng)

    def transform(self, sample: Sample, size: tuple[int, int], rng: np.random.Generator) -> Sample:
        """``sample`` changed at random, its image of ``size`` (H, W)."""
        height, width = sample.image.shape[:2]
        colour = None if self.distort is None else self.distort.draw(rng)
        window = draw_expand(rng, width, height, self.expand_prob, self.expand_ratio)
        if self.crop is not None:
            window = self.crop.draw(rng, window, sample.boxes)
        flip = bool(rng.random() < self.flip_prob)
        interpolation = INTERPOLATIONS[rng.integers(len(INTERPOLATIONS))] if self.random_interpolation else self.interpolation

        image, inside = _visible(sample.image, window)
        if colour is not None:
            image = apply_colour(image, colour)
        image = resample(image, inside, size, interpolation, flip, self.fill)
        frame = np.array([window.x, window.y, window.x + window.width, window.y + window.height])
        keep = centre_inside(frame, sample.boxes)
        return move_sample(sample, image, window_transform(window, size, flip), keep, self.min_side)


def _visible(image: np.ndarray, window: Window) -> tuple[np.ndarray, Window]:
    """The part of ``image`` inside ``window``, and the window in that part's frame."""
    x, y = max(window.x, 0), max(window.y, 0)
    part = image[y : window.y + window.height, x : window.x + window.width]
    return part, window._replace(x=window.x - x, y=window.y - y)


class ResizeTransform:
    """The evaluation transform: a resize to a fixed ``size`` (H, W), aspect ratio not kept (recipe: cubic)."""

    def __init__(self, size: tuple[int, int], interpolation: int = cv2.INTER_CUBIC) -> None:
        self.size, self.interpolation = tuple(size), interpolation

    def __call__(self, sample: Sample) -> Sample:
        height, width = sample.image.shape[:2]
        window = Window(0, 0, width, height)
        image = resample(sample.image, window, self.size, self.interpolation, False, 0)
        return move_sample(sample, image, window_transform(window, self.size, False), np.ones(len(sample.boxes), bool), 0.0)
