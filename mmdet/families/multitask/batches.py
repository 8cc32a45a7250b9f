"""What travels from the loader to the model: the batches of one iteration.

B samples of one batch, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmdet.data.structures import Batch, ImageMeta


@dataclass
class LabelledBatch:
    """Images with one label each, or with a set of labels each."""

    images: Tensor  # (B, 3, H, W) uint8 RGB, or floating: then taken as already normalised
    labels: Tensor  # (B,) int64 in [0, C), or (B, C) float32 in {0, 1}: which classes an image has
    meta: list[ImageMeta]
    indices: list[int]  # of the samples in their data set
    epoch: int = 0
    step: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def map(self, fn) -> LabelledBatch:
        return replace(self, images=fn(self.images), labels=fn(self.labels))

    def split(self, parts: int) -> list[LabelledBatch]:
        """``parts`` batches of equal length, in order. B must be divisible by ``parts``."""
        if len(self) % parts:
            raise ValueError(f"a batch of {len(self)} images cannot be split into {parts} equal parts")
        n = len(self) // parts
        rows = [slice(i, i + n) for i in range(0, len(self), n)]
        return [
            replace(self, images=self.images[r], labels=self.labels[r], meta=self.meta[r], indices=self.indices[r]) for r in rows
        ]

    @property
    def image_ids(self) -> list[int | str]:
        return [m.image_id for m in self.meta]


def pair_up(first: LabelledBatch, second: LabelledBatch) -> LabelledBatch:
    """One batch of 2B images of B pairs: all first images, then all second ones, and the pairs' labels twice, in order."""
    return replace(
        first,
        images=torch.cat([first.images, second.images]),
        labels=torch.cat([first.labels, first.labels]),
        meta=[*first.meta, *second.meta],
        indices=[*first.indices, *second.indices],
    )


@dataclass
class TaskBatch:
    """The batch of one shard of one task."""

    task: int  # number of the task
    shard: int
    data: Batch | LabelledBatch
    step: int = 0
    name: str = ""  # of the task, for messages

    def __len__(self) -> int:
        return len(self.data)

    def split(self, parts: int) -> list[TaskBatch]:
        """``parts`` batches of equal length, in order."""
        return [replace(self, data=piece) for piece in self.data.split(parts)]

    def map(self, fn) -> TaskBatch:
        data = self.data._map(fn) if isinstance(self.data, Batch) else self.data.map(fn)
        return replace(self, data=data)


@dataclass
class IterationBatch:
    """This rank's batches of one iteration."""

    parts: list[TaskBatch]
    images_per_rank: float = 0.0  # images of the iteration, of all ranks, per rank: for the log

    def to(self, device: torch.device | str, non_blocking: bool = False) -> IterationBatch:
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> IterationBatch:
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream) -> None:
        """Tells CUDA's allocator that ``stream`` uses these tensors (they were made on a side stream)."""
        self._map(lambda t: t.record_stream(stream) or t)

    def _map(self, fn) -> IterationBatch:
        return replace(self, parts=[part.map(fn) for part in self.parts])

    def facts(self) -> dict[str, Any]:
        """What a log line says about the batch."""
        return {"images": self.images_per_rank}

    @property
    def image_ids(self) -> list[str]:
        """``<task>/<id in its data set>``."""
        return [f"{part.name}/{i}" for part in self.parts for i in part.data.image_ids]


def collate_labelled(
    images: Sequence[Any], labels: Sequence[Any], indices: Sequence[int], epoch: int = 0, step: int = 0
) -> LabelledBatch:
    """Samples of one size, images (H, W, 3) uint8 RGB -> a batch; ``labels`` are integers or rows (C,)."""
    planes = torch.stack([torch.from_numpy(s.image).permute(2, 0, 1) for s in images]).contiguous()
    meta = [ImageMeta(s.image.shape[:2], tuple(s.original_size), s.image_id) for s in images]
    rows = torch.as_tensor(labels, dtype=torch.int64 if isinstance(labels[0], int) else torch.float32)
    return LabelledBatch(planes, rows, meta, list(indices), epoch, step)
