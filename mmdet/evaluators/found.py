"""What a detector found in (a share of) a data set, as flat arrays, and the union over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mmdet.data.structures import Detections

# Decimals kept of boxes (px) and scores, so that a saved results file gives exactly the value that was logged. Both are
# finer than float32 at the sizes of images and at scores above 0.001.
BOX_DECIMALS, SCORE_DECIMALS = 4, 10


@dataclass(frozen=True)
class Found:
    """D detections in n images; an image is named by its position in the data set."""

    visited: np.ndarray  # (n,) int64 the images that were looked at, with or without detections
    positions: np.ndarray  # (D,) int64 each detection's image
    labels: np.ndarray  # (D,) int64 class indices
    boxes_xywh: np.ndarray  # (D, 4) float64 px of the original image
    scores: np.ndarray  # (D,) float64
    dropped: int = 0  # further detections that were not finite
    model_seconds: float = 0.0  # network and postprocessing
    data_seconds: float = 0.0  # waiting for the loader

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def from_images(cls, images: Sequence[tuple[int, Detections]], **counts) -> Found:
        """From (position, detections in px of the original image), detections on the CPU."""
        lengths = [len(found) for _, found in images]
        boxes = np.concatenate([np.zeros((0, 4)), *(found.boxes.double().numpy() for _, found in images)])
        boxes[:, 2:] -= boxes[:, :2]
        scores = np.concatenate([np.zeros(0), *(found.scores.double().numpy() for _, found in images)])
        visited = np.array([position for position, _ in images], dtype=np.int64)
        return cls(
            visited=visited,
            positions=np.repeat(visited, lengths),
            labels=np.concatenate([np.zeros(0, np.int64), *(found.labels.numpy() for _, found in images)]),
            boxes_xywh=boxes.round(BOX_DECIMALS),
            scores=scores.round(SCORE_DECIMALS),
            **counts,
        )

    def rows(self, which: np.ndarray) -> Found:
        """The detections that a mask or an index (D,) selects."""
        chosen = {name: getattr(self, name)[which] for name in ("positions", "labels", "boxes_xywh", "scores")}
        return replace(self, **chosen)

    def of_image(self, position: int) -> Detections:
        """One image's detections in px of the original image."""
        found = self.rows(self.positions == position)
        corners = np.concatenate([found.boxes_xywh[:, :2], found.boxes_xywh[:, :2] + found.boxes_xywh[:, 2:]], 1)
        return Detections(torch.tensor(corners).float(), torch.tensor(found.scores).float(), torch.tensor(found.labels))


def merge_found(shards: Sequence[Found], num_images: int) -> tuple[Found, int]:
    """All shares together, in the order of the data set, and how many repeated images were left out.

    An image that several ranks saw (a sampler that repeats images to make the shares equal) counts once.

    Raises:
        RuntimeError: no rank saw some image, or one saw an image twice: the result would be wrong unnoticed.
    """
    owner = np.full(num_images, -1)
    repeats = 0
    for rank, shard in enumerate(shards):
        if len(np.unique(shard.visited)) < len(shard.visited):
            raise RuntimeError(f"the loader of rank {rank} gave the same image more than once")
        fresh = shard.visited[owner[shard.visited] < 0]
        repeats += len(shard.visited) - len(fresh)
        owner[fresh] = rank
    if (owner < 0).any():
        raise RuntimeError(f"{(owner < 0).sum()} of {num_images} images were not evaluated on any rank")
    kept = [shard.rows(owner[shard.positions] == rank) for rank, shard in enumerate(shards)]
    merged = Found(
        visited=np.arange(num_images),
        positions=np.concatenate([s.positions for s in kept]),
        labels=np.concatenate([s.labels for s in kept]),
        boxes_xywh=np.concatenate([s.boxes_xywh for s in kept]),
        scores=np.concatenate([s.scores for s in kept]),
        dropped=sum(s.dropped for s in shards),
        model_seconds=max(s.model_seconds for s in shards),
        data_seconds=max(s.data_seconds for s in shards),
    )
    return merged.rows(np.argsort(merged.positions, kind="stable")), repeats
