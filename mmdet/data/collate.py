"""Samples to a batch."""

from __future__ import annotations

import cv2
import numpy as np
import torch

from mmdet.data.structures import Batch, ImageMeta, Sample, Targets


def collate(samples: list[Sample], epoch: int = 0, step: int = 0, size: tuple[int, int] | None = None) -> Batch:
    """A batch of (B, 3, H, W) uint8 images, contiguous, each at the top left, zeros beyond it.

    (H, W) is ``size`` or the largest height and width among the samples; the unpadded sizes are in ``meta``.

    Raises:
        ValueError: no samples, or an image that is no (H, W, 3) uint8 array or does not fit into ``size``.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    for sample in samples:
        if sample.image.dtype != np.uint8 or sample.image.ndim != 3 or sample.image.shape[2] != 3:
            raise ValueError(
                f"image {sample.image_id!r} is {sample.image.dtype} {sample.image.shape}; (H, W, 3) uint8 is expected"
            )
    height, width = size or (max(s.image.shape[0] for s in samples), max(s.image.shape[1] for s in samples))
    images = torch.zeros((len(samples), 3, height, width), dtype=torch.uint8)
    meta = []
    for planes, sample in zip(images.numpy(), samples):
        h, w = sample.image.shape[:2]
        if h > height or w > width:
            raise ValueError(f"image {sample.image_id!r} has {h}x{w} px (H x W), more than the batch's {height}x{width}")
        cv2.split(sample.image, [plane[:h, :w] for plane in planes])  # writes into the batch
        transform = tuple(map(tuple, np.asarray(sample.transform, np.float64).tolist()))
        meta.append(ImageMeta((h, w), tuple(sample.original_size), sample.image_id, transform))
    targets = Targets.from_lists(
        [s.boxes for s in samples], [s.labels for s in samples], [s.weights for s in samples], [s.ignore for s in samples]
    )
    return Batch(images, targets, meta, epoch, step)
