"""The largest batch that training can meet, to warm up with."""

from __future__ import annotations

import numpy as np
import torch

from mmdet.data.structures import Batch, Targets
from mmdet.families.multitask.batches import IterationBatch, LabelledBatch, TaskBatch
from mmdet.families.multitask.groups import Unit
from mmdet.families.multitask.loader import TaskLoader


def largest_batch(loader: TaskLoader) -> IterationBatch:
    """Black images of the largest size for every batch of this rank, with the most boxes; the heaviest batch first."""
    parts = [_largest_part(loader, unit) for unit in loader.units]
    return IterationBatch(sorted(parts, key=lambda part: -part.data.images.numel()))


def _largest_part(loader: TaskLoader, unit: Unit) -> TaskBatch:
    data = loader.tasks[unit.task]
    height, width = max(data.sizes, key=lambda size: size[0] * size[1])
    count = data.batch_size * (2 if data.kind == "pairwise" else 1)
    batch = Batch(torch.zeros((count, 3, height, width), dtype=torch.uint8))
    if data.kind != "detection":
        labels = torch.as_tensor([data.source.label(0)] * count)
        labels = labels if labels.ndim == 1 else labels.float()
        return TaskBatch(unit.task, unit.shard, LabelledBatch(batch.images, labels, batch.meta, list(range(count))))
    boxes = max((len(data.source.annotation(i).boxes) for i in range(len(data.source))), default=0)
    corners = np.random.default_rng(0).uniform(0, 0.8, (count, max(boxes, 1), 2)) * (width, height)
    rows = list(np.concatenate([corners, corners + 0.1 * min(height, width)], 2))
    batch.targets = Targets.from_lists(rows, [np.zeros(len(row)) for row in rows])
    return TaskBatch(unit.task, unit.shard, batch)
