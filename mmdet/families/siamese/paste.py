"""Pictures changed by pasting: a target covered, moved, or given neighbours. Nothing is changed in place, and what does not
work out returns None.

Source of the numbers: design/siamese.md, B5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import cv2
import numpy as np

_CANDIDATES = 500  # places that are tried at once
_TRIES = 5
_COVER = (1.15, 1.35)  # sides of a cover, as multiples of the target's
_COVERED = 0.85  # part of the target that must lie under it
_OFFSET = 0.15  # largest shift of a cover, as a part of the target's sides
_DISTANCE = (1.2, 2.0)  # of a neighbour, in target sides along the axis where it is farther
_NEIGHBOUR = (0.7, 1.3)  # its sides, as multiples of the target's: below 2 x 1.2 - 1, so that it never touches the target


@dataclass(frozen=True)
class Scene:
    """An image with a target and what else is known in it, px of the image."""

    image: np.ndarray  # (H, W, 3) uint8 RGB
    box: np.ndarray  # (4,) float64 xyxy
    others: np.ndarray  # (N, 4) float64 xyxy


def free_place(rng: np.random.Generator, shape: tuple[int, ...], size: tuple[int, int], avoid: np.ndarray) -> np.ndarray | None:
    """(2,) int64 x, y of a rectangle of ``size`` (w, h) px inside an image of ``shape`` (H, W, ...) that touches none of the
    boxes ``avoid`` (N, 4) xyxy; None where none of the candidates does."""
    room = np.array([shape[1] - size[0], shape[0] - size[1]])
    if room.min() < 0:
        return None
    places = rng.integers(0, room + 1, (_CANDIDATES, 2))
    low, high = places[:, None], places[:, None] + np.array(size)
    overlap = np.minimum(high, avoid[None, :, 2:]) - np.maximum(low, avoid[None, :, :2])
    free = ~(overlap > 0).all(2).any(1)
    return places[np.argmax(free)] if free.any() else None


def pixels_of(scene: Scene) -> np.ndarray:
    """(h, w, 3) uint8, the target's pixels: whole ones, those that its box cuts included. Empty where it lies outside."""
    x1, y1, x2, y2 = _pixel_box(scene)
    return scene.image[y1:y2, x1:x2]


def _pixel_box(scene: Scene) -> tuple[int, int, int, int]:
    height, width = scene.image.shape[:2]
    x1, y1 = (max(math.floor(v), 0) for v in scene.box[:2])
    return x1, y1, max(min(math.ceil(scene.box[2]), width), x1), max(min(math.ceil(scene.box[3]), height), y1)


def paste(image: np.ndarray, patch: np.ndarray, x: int, y: int) -> np.ndarray:
    """A copy of the image with ``patch`` (h, w, 3) at x, y; what lies beyond the border is cut."""
    result = image.copy()
    height, width = image.shape[:2]
    x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + patch.shape[1], width), min(y + patch.shape[0], height)
    if x2 > x1 and y2 > y1:
        result[y1:y2, x1:x2] = patch[y1 - y : y2 - y, x1 - x : x2 - x]
    return result


def _resized(patch: np.ndarray, width: float, height: float) -> np.ndarray:
    size = max(round(width), 1), max(round(height), 1)
    shrinks = size[0] * size[1] < patch.shape[0] * patch.shape[1]
    return cv2.resize(patch, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def cover_with_background(rng: np.random.Generator, scene: Scene) -> Scene | None:
    """The target under a piece of its own image that shows none of it."""
    size = tuple(math.ceil(side * rng.uniform(*_COVER)) + 1 for side in scene.box[2:] - scene.box[:2])
    place = free_place(rng, scene.image.shape, size, np.concatenate([scene.box[None], scene.others]))
    if place is None:
        return None
    patch = scene.image[place[1] : place[1] + size[1], place[0] : place[0] + size[0]]
    return _covered(rng, scene, patch)


def cover_with_object(rng: np.random.Generator, scene: Scene, patch: np.ndarray) -> Scene | None:
    """The target under the pixels (h, w, 3) of something else."""
    if not patch.size:
        return None
    width, height = (scene.box[2:] - scene.box[:2]) * rng.uniform(*_COVER, 2)
    return _covered(rng, scene, _resized(patch, width, height))


def _covered(rng: np.random.Generator, scene: Scene, patch: np.ndarray) -> Scene | None:
    """``patch`` laid over the target, roughly centred, as long as it hides most of it."""
    sides, center = scene.box[2:] - scene.box[:2], (scene.box[:2] + scene.box[2:]) / 2
    extent = np.array(patch.shape[1::-1])
    for _ in range(_TRIES):
        corner = np.rint(center - extent / 2 + rng.uniform(-_OFFSET, _OFFSET, 2) * sides)
        hidden = np.minimum(corner + extent, scene.box[2:]) - np.maximum(corner, scene.box[:2])
        if hidden.min() > 0 and hidden.prod() > _COVERED * sides.prod():
            return replace(scene, image=paste(scene.image, patch, int(corner[0]), int(corner[1])))
    return None


def move_target(rng: np.random.Generator, scene: Scene) -> Scene | None:
    """The target somewhere else in its own image, and background where it was: there must not be two of it."""
    patch, origin = pixels_of(scene), np.array(_pixel_box(scene)[:2])
    emptied = cover_with_background(rng, scene)
    if emptied is None or not patch.size:
        return None
    place = free_place(rng, scene.image.shape, patch.shape[1::-1], np.concatenate([scene.box[None], scene.others]))
    return None if place is None else _placed(emptied, patch, place, scene.box + np.tile(place - origin, 2), scene.others)


def move_target_to(rng: np.random.Generator, scene: Scene, other: Scene) -> Scene | None:
    """The target pasted on another image, whose own objects become ``others``."""
    patch, origin = pixels_of(scene), np.array(_pixel_box(scene)[:2])
    objects = np.concatenate([other.box[None], other.others])
    place = free_place(rng, other.image.shape, patch.shape[1::-1], objects) if patch.size else None
    return None if place is None else _placed(other, patch, place, scene.box + np.tile(place - origin, 2), objects)


def _placed(scene: Scene, patch: np.ndarray, place: np.ndarray, box: np.ndarray, others: np.ndarray) -> Scene:
    return Scene(paste(scene.image, patch, int(place[0]), int(place[1])), box, others)


def add_neighbour(rng: np.random.Generator, scene: Scene, patch: np.ndarray) -> Scene | None:
    """Something else, pixels (h, w, 3), close to the target without touching it; at least half of it inside the image."""
    sides, center = scene.box[2:] - scene.box[:2], (scene.box[:2] + scene.box[2:]) / 2
    if not patch.size:
        return None
    patch = _resized(patch, *(sides * rng.uniform(*_NEIGHBOUR, 2)))
    extent, limit = np.array(patch.shape[1::-1]), np.array(scene.image.shape[1::-1])
    for _ in range(_TRIES):
        direction = rng.uniform(-1, 1, 2)
        offset = direction / np.abs(direction).max() * rng.uniform(*_DISTANCE) * sides
        corner = np.rint(center + offset - extent / 2)
        box = np.concatenate([np.maximum(corner, 0), np.minimum(corner + extent, limit)])
        inside = np.maximum(box[2:] - box[:2], 0).prod()
        apart = (np.minimum(box[2:], scene.box[2:]) - np.maximum(box[:2], scene.box[:2])).min() <= 0
        if inside >= extent.prod() / 2 and apart:
            image = paste(scene.image, patch, int(corner[0]), int(corner[1]))
            return Scene(image, scene.box, np.concatenate([scene.others, box[None]]))
    return None
