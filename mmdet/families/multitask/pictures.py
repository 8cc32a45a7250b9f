"""Pictures of what is trained, for people: some images of every task with what they are labelled as."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import cv2
import numpy as np
import torch

from mmdet.data.structures import Batch, Detections
from mmdet.evaluators.pictures import draw_detections
from mmdet.families.multitask.batches import IterationBatch, LabelledBatch

_COLUMNS, _SIDE = 4, 160  # images of a task, and the height in px that small ones are enlarged to


def draw_iteration(
    batch: IterationBatch, class_names: Mapping[str, Sequence[str]], pairwise: Collection[str]
) -> list[np.ndarray]:
    """A row for each task of ``batch``, (h, w, 3) uint8 RGB: up to four images of its first shard under the task's name.

    Nothing for images that are already normalised. ``pairwise``: tasks whose images are pairs.
    """
    rows: dict[str, np.ndarray] = {}
    for part in batch.parts:
        if part.name not in rows and not part.data.images.is_floating_point():
            names = class_names[part.name]
            if isinstance(part.data, Batch):
                tiles = _detection_tiles(part.data, names)
            else:
                tiles = _labelled_tiles(part.data, names, part.name in pairwise)
            rows[part.name] = with_title(np.concatenate(tiles, axis=1), f"task {part.name}")
    return list(rows.values())


def with_title(image: np.ndarray, title: str) -> np.ndarray:
    """``image`` (H, W, 3) uint8 RGB below a bar of 20 px with a text."""
    bar = np.full((20, image.shape[1], 3), 255, np.uint8)
    cv2.putText(bar, title, (4, 15), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
    return np.concatenate([bar, image])


def _detection_tiles(data: Batch, names: Sequence[str]) -> list[np.ndarray]:
    targets = data.targets.map(lambda t: t.cpu())
    tiles = []
    for i, image in enumerate(_pictures(data.images[:_COLUMNS])):
        scale, valid, ignore = image.shape[0] / data.images.shape[2], targets.valid[i], targets.ignore[i]
        boxes = targets.boxes[i][valid].float() * scale
        truth = Detections(boxes, torch.ones(len(boxes)), targets.labels[i][valid])
        ignored = ignore[ignore.any(1)].float().numpy() * scale
        tiles.append(_framed(draw_detections(image, truth, names, 0.0, show_scores=False, ignore=ignored)))
    return tiles


def _labelled_tiles(data: LabelledBatch, names: Sequence[str], pairs: bool) -> list[np.ndarray]:
    count = len(data) // 2 if pairs else len(data)
    first = _pictures(data.images[:count][:_COLUMNS])
    if pairs:  # all first images, then all second ones
        first = [np.concatenate(two, axis=1) for two in zip(first, _pictures(data.images[count:][:_COLUMNS]), strict=True)]
    labels = data.labels[: len(first)].tolist()
    return [_framed(with_title(image, _names_of(label, names))) for image, label in zip(first, labels, strict=True)]


def _names_of(label: int | list[float], names: Sequence[str]) -> str:
    if isinstance(label, list):
        return ", ".join(name for name, there in zip(names, label, strict=True) if there) or "none"
    return names[label]


def _pictures(images: torch.Tensor) -> list[np.ndarray]:
    """(B, 3, H, W) uint8 -> (h, w, 3) each; small ones enlarged by a whole number."""
    scale = max(1, round(_SIDE / images.shape[2]))
    planes = images.permute(0, 2, 3, 1).cpu().numpy()
    return [cv2.resize(p, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST) for p in planes]


def _framed(tile: np.ndarray) -> np.ndarray:
    return np.pad(tile, ((0, 0), (0, 4), (0, 0)), constant_values=255)
