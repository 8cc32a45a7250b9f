"""Pictures for people: training pairs with their boxes, and tracks beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from mmdet.families.siamese.structures import PairBatch

_GREEN, _RED, _GREY, _BLUE = (40, 220, 60), (240, 60, 50), (200, 200, 200), (60, 120, 255)


def draw_box(image: np.ndarray, box: np.ndarray, color: tuple[int, int, int], thickness: int = 1) -> None:
    """A rectangle on (H, W, 3) uint8, in place; ``box`` (4,) xyxy px, also where it lies partly outside."""
    if np.isfinite(box).all():
        x1, y1, x2, y2 = np.clip(np.rint(box), -9999, 9999).astype(int).tolist()
        cv2.rectangle(image, (x1, y1), (max(x2 - 1, x1), max(y2 - 1, y1)), color, thickness)


def draw_pairs(batch: PairBatch, most: int = 16, columns: int = 4) -> list[np.ndarray]:
    """Rows of pairs, (h, w, 3) uint8 RGB: template beside search crop; its box green in a positive pair, red in a negative one,
    distractors grey. Nothing for images that are already normalised."""
    if batch.searches.is_floating_point():
        return []
    batch = batch.to("cpu")
    tiles = []
    for i in range(min(len(batch), most)):
        template, search = (images[i].permute(1, 2, 0).numpy().copy() for images in (batch.templates, batch.searches))
        for box in batch.distractors[i][batch.distractor_valid[i]].numpy():
            draw_box(search, box, _GREY)
        draw_box(search, batch.boxes[i].numpy(), _GREEN if batch.positive[i] else _RED)
        below = np.full((search.shape[0] - template.shape[0], template.shape[1], 3), 255, np.uint8)
        tile = np.concatenate([np.concatenate([template, below]), search], axis=1)
        tiles.append(np.pad(tile, ((0, 4), (0, 4), (0, 0)), constant_values=255))
    columns = min(columns, len(tiles))
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % max(columns, 1)) if tiles else []
    return [np.concatenate(tiles[i : i + columns], axis=1) for i in range(0, len(tiles), columns)] if tiles else []


def draw_tracks(samples: Sequence[dict[str, Any]], columns: int = 4) -> list[np.ndarray]:
    """Rows of frames, (h, w, 3) uint8 RGB: the truth green, what the tracker found blue.

    ``samples``: ``image`` (H, W, 3) uint8 RGB, ``truth`` and ``found`` (4,) xyxy px, ``title``.
    """
    height = 180
    tiles = []
    for sample in samples:
        scale = height / sample["image"].shape[0]
        image = cv2.resize(sample["image"], None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        draw_box(image, sample["truth"] * scale, _GREEN)
        draw_box(image, sample["found"] * scale, _BLUE)
        bar = np.full((18, image.shape[1], 3), 255, np.uint8)
        cv2.putText(bar, sample["title"], (4, 13), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (0, 0, 0), 1, cv2.LINE_AA)
        tiles.append(np.concatenate([bar, image]))
    width = max((tile.shape[1] for tile in tiles), default=0)
    tiles = [np.pad(t, ((0, 0), (0, width - t.shape[1] + 4), (0, 0)), constant_values=255) for t in tiles]
    tiles += [np.full((height + 18, width + 4, 3), 255, np.uint8)] * (-len(tiles) % columns)
    return [_level(tiles[i : i + columns]) for i in range(0, len(tiles), columns)]


def _level(row: Sequence[np.ndarray]) -> np.ndarray:
    height = max(tile.shape[0] for tile in row)
    padded = [np.pad(t, ((0, height - t.shape[0]), (0, 0), (0, 0)), constant_values=255) for t in row]
    return np.concatenate(padded, axis=1)
