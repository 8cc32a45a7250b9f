"""A detector that finds exactly what the annotations say, and a loader without worker processes, for tests of evaluation."""

from collections.abc import Callable, Iterator, Sequence

import cv2
import numpy as np
import torch
from torch import nn

from mmdet.data.structures import Batch, Detections, ImageMeta


class PlainLoader:
    """Batches of the images at ``indices`` (default: all), resized by ``scale``."""

    def __init__(self, source, batch_size: int = 1, indices: Sequence[int] | None = None, scale: float = 1.0):
        self.source = source
        self.batch_size = batch_size
        self.indices = list(range(len(source)) if indices is None else indices)
        self.scale = scale

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.indices), self.batch_size):
            samples = [self.source.load(n) for n in self.indices[start : start + self.batch_size]]
            images = [cv2.resize(s.image, None, fx=self.scale, fy=self.scale) for s in samples]
            transform = ((self.scale, 0.0, 0.0), (0.0, self.scale, 0.0), (0.0, 0.0, 1.0))
            meta = [ImageMeta(i.shape[:2], s.original_size, s.image_id, transform) for i, s in zip(images, samples)]
            yield Batch(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), meta=meta)


class PerfectModel(nn.Module):
    """PERFECT of the cases: the annotated boxes with scores 0.90, 0.89, ... in the order of the data set.

    ``spoil(image_id, detections) -> detections`` may change what is found, in the network's frame.
    """

    def __init__(self, source, spoil: Callable | None = None):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)  # something with a mode
        self.spoil = spoil or (lambda image_id, found: found)
        self.truth = {}
        count = 0
        for n, image_id in enumerate(source.image_ids):
            boxes, labels, _ = source.annotation(n)
            scores = torch.tensor([max(0.01, 0.90 - 0.01 * (count + k)) for k in range(len(boxes))])
            self.truth[image_id] = (torch.tensor(boxes), scores, torch.tensor(labels))
            count += len(boxes)

    def forward(self, batch: Batch) -> list[Detections]:
        assert not self.training and not torch.is_grad_enabled()
        out = []
        for meta in batch.meta:
            boxes, scores, labels = self.truth[meta.image_id]
            scale = torch.tensor([meta.transform[0][0], meta.transform[1][1]] * 2).float()
            out.append(self.spoil(meta.image_id, Detections(boxes * scale, scores, labels)))
        return out
