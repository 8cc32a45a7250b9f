"""Four images in one, and one image blended over another; every source is drawn into its place with one resampling.

Source of the definitions and numbers: Megvii YOLOX 6ddff48, mosaicdetection.py and data_augment.py (design/recipes.md, 3.1).
There the four images are pasted on a canvas of twice the size, which is then warped; here each is warped straight into the
result, clipped to the place that it would have had on that canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from mmdet.data.affine import RandomAffine, larger, map_boxes, mirror, paint, scaling
from mmdet.data.hsv import HSVJitter
from mmdet.data.letterbox import LetterboxTransform, fitted_size
from mmdet.data.structures import Sample, SampleKey


class Tile(NamedTuple):
    """The place of one image on the mosaic's canvas."""

    place: np.ndarray  # (3, 3) map from the image to the canvas
    rect: tuple[int, int, int, int]  # xyxy px of the canvas: what is visible there


def mosaic_tiles(images: Sequence[np.ndarray], center: tuple[int, int], size: tuple[int, int]) -> list[Tile]:
    """Places of four images around ``center`` (x, y) of a canvas of twice ``size`` (H, W): top left, top right, bottom left,
    bottom right. Each is resized to fit into ``size`` and touches the centre with a corner."""
    tiles = []
    for number, image in enumerate(images):
        _, (height, width) = fitted_size(image, size)
        x = center[0] - width if number % 2 == 0 else center[0]
        y = center[1] - height if number < 2 else center[1]
        place = scaling(width / image.shape[1], height / image.shape[0], (x, y))
        rect = (max(x, 0), max(y, 0), min(x + width, 2 * size[1]), min(y + height, 2 * size[0]))
        tiles.append(Tile(place, rect))
    return tiles


@dataclass(frozen=True)
class Mosaic:
    """Four samples around a random centre, then a random affine map. Boxes and ignore regions follow, clipped to the visible
    part of their image; a box with a side of ``min_side`` px or less is left out, before or after the map."""

    affine: RandomAffine
    fill: int = 114  # every channel, where no image is
    min_side: float = 1.0  # px

    def __call__(self, samples: Sequence[Sample], size: tuple[int, int], rng: np.random.Generator) -> Sample:
        """A sample with an image of ``size`` (H, W); id, original size and transform are those of the first."""
        height, width = size
        center = int(rng.uniform(0.5 * width, 1.5 * width)), int(rng.uniform(0.5 * height, 1.5 * height))
        frame = self.affine.draw(rng, size)
        tiles = mosaic_tiles([s.image for s in samples], center, size)
        canvas = np.full((height, width, 3), self.fill, np.uint8)
        parts = []
        for sample, tile in zip(samples, tiles, strict=True):
            paint(canvas, sample.image, frame @ tile.place, tile.rect, frame)
            parts.append(self._move(sample, tile, frame, size))
        joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ("boxes", "labels", "weights", "ignore")}
        return parts[0].replace(image=canvas, **joined)

    def _move(self, sample: Sample, tile: Tile, frame: np.ndarray, size: tuple[int, int]) -> Sample:
        boxes, kept = self._move_boxes(sample.boxes, tile, frame, size, self.min_side)
        ignore, seen = self._move_boxes(sample.ignore, tile, frame, size, 0.0)
        return sample.replace(
            boxes=boxes[kept].astype(np.float32),
            labels=sample.labels[kept],
            weights=sample.weights[kept],
            ignore=ignore[seen].astype(np.float32),
            transform=frame @ tile.place @ sample.transform,
        )

    @staticmethod
    def _move_boxes(
        boxes: np.ndarray, tile: Tile, frame: np.ndarray, size: tuple[int, int], min_side: float
    ) -> tuple[np.ndarray, np.ndarray]:
        on_canvas = map_boxes(boxes, tile.place, tile.rect)
        moved = map_boxes(on_canvas, frame, (0, 0, size[1], size[0]))
        return moved, larger(on_canvas, min_side) & larger(moved, min_side)


@dataclass(frozen=True)
class ScaledMixUp:
    """A sample blended half and half with another one, which is resized to fit, scaled, perhaps mirrored, and cut at random
    where it is too large. All boxes of both stay, with weight 1, as in the recipe."""

    prob: float = 1.0  # for whoever applies it
    scale: tuple[float, float] = (0.5, 1.5)  # range, on top of the fit
    fill: int = 114  # beside the other image, inside its frame; beyond the frame it is black
    min_side: float = 1.0  # px; of the other sample, boxes with a side no longer are left out

    def __call__(self, sample: Sample, other: Sample, rng: np.random.Generator) -> Sample:
        height, width = sample.image.shape[:2]
        jitter, flip = rng.uniform(*self.scale), rng.random() < 0.5
        inner_height, inner_width = max(int(height * jitter), 1), max(int(width * jitter), 1)
        left, top = (int(rng.integers(extra)) if extra > 0 else 0 for extra in (inner_width - width, inner_height - height))
        transform = self._place(other.image, (height, width), (inner_height, inner_width), flip)
        transform = scaling(1, 1, (-left, -top)) @ transform

        layer = np.zeros_like(sample.image)
        layer[: inner_height - top, : inner_width - left] = self.fill
        paint(layer, other.image, transform)
        limit = (0, 0, min(inner_width - left, width), min(inner_height - top, height))
        boxes, ignore = map_boxes(other.boxes, transform, limit), map_boxes(other.ignore, transform, limit)
        kept, seen = larger(boxes, self.min_side), larger(ignore, 0.0)
        return sample.replace(
            image=cv2.addWeighted(sample.image, 0.5, layer, 0.5, 0),
            boxes=np.concatenate([sample.boxes, boxes[kept].astype(np.float32)]),
            labels=np.concatenate([sample.labels, other.labels[kept]]),
            weights=np.concatenate([sample.weights, other.weights[kept]]),
            ignore=np.concatenate([sample.ignore, ignore[seen].astype(np.float32)]),
        )

    @staticmethod
    def _place(image: np.ndarray, size: tuple[int, int], inner: tuple[int, int], flip: bool) -> np.ndarray:
        """The map of ``image`` into a frame of ``inner`` (h, w), which is one of ``size`` (H, W) scaled."""
        _, (height, width) = fitted_size(image, size)
        scale_x, scale_y = inner[1] / size[1], inner[0] / size[0]
        place = scaling(scale_x * width / image.shape[1], scale_y * height / image.shape[0])
        return scaling(-1, 1, (inner[1], 0)) @ place if flip else place


class MosaicTrainPipeline:
    """Mosaic, affine map, mix-up, colour jitter and mirroring until epoch ``plain_from``; from then on, and where no mosaic is
    drawn, a letterbox with colour jitter and mirroring. Values stay uint8 RGB; the model normalises.

    All further images, pixels and boxes come from the sample's own generator, drawn over the whole training set.
    """

    def __init__(
        self,
        affine: RandomAffine,
        mixup: ScaledMixUp | None,
        hsv: HSVJitter | None,
        plain_from: int,
        mosaic_prob: float = 1.0,
        flip_prob: float = 0.5,
        fill: int = 114,
        min_side: float = 1.0,
    ) -> None:
        self.mosaic = Mosaic(affine, fill, min_side)
        self.mosaic_prob, self.mixup, self.hsv, self.flip_prob = mosaic_prob, mixup, hsv, flip_prob
        self.fill, self.plain_from, self.min_side = fill, plain_from, min_side

    def __call__(self, source, key: SampleKey, rng: np.random.Generator) -> Sample:
        """The sample at ``key`` with an image of ``key.size`` (H, W). ``source`` is a data set: ``len``, ``load(index)`` and
        ``annotation(index)``."""
        if key.epoch < self.plain_from and rng.random() < self.mosaic_prob:
            return self._composed(source, key, rng)
        return self._plain(source.load(key.index), key.size, rng)

    def _composed(self, source, key: SampleKey, rng: np.random.Generator) -> Sample:
        indices = [key.index, *rng.integers(len(source), size=3).tolist()]
        sample = self.mosaic([source.load(i) for i in indices], key.size, rng)
        if self.mixup is not None and len(sample.boxes) and rng.random() < self.mixup.prob:
            other = _draw_with_boxes(source, rng)
            if other is not None:
                sample = self.mixup(sample, source.load(other), rng)
        if self.hsv is not None:
            sample = self.hsv(sample, rng)
        return mirror(sample) if rng.random() < self.flip_prob else sample

    def _plain(self, sample: Sample, size: tuple[int, int], rng: np.random.Generator) -> Sample:
        if rng.random() < self.flip_prob:
            sample = mirror(sample)
        _, (height, width) = fitted_size(sample.image, size)
        sample = LetterboxTransform(size, self.fill)(sample)
        if self.hsv is not None:  # the border keeps its grey, as in evaluation
            inner = sample.image[:height, :width]
            inner[...] = self.hsv.image(inner, rng)
        kept = larger(sample.boxes, self.min_side)
        return sample.replace(boxes=sample.boxes[kept], labels=sample.labels[kept], weights=sample.weights[kept])


def _draw_with_boxes(source, rng: np.random.Generator, attempts: int = 100) -> int | None:
    """The index of a random image with boxes; None where there seems to be none."""
    for _ in range(attempts):
        index = int(rng.integers(len(source)))
        if len(source.annotation(index).boxes):
            return index
    return None
