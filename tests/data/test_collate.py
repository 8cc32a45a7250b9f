"""Samples to a batch: planes, padding, meta."""

import numpy as np
import pytest
import torch

from mmdet.data.collate import collate
from mmdet.data.structures import Sample


def noise(height, width, seed=0, **known):
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Sample.from_arrays(image, **known)


def test_pixels_planes_and_padding():
    samples = [noise(5, 7, 0, boxes=[[0, 0, 3, 3]], labels=[2], image_id=11), noise(8, 4, 1, ignore=[[1, 1, 2, 2]], image_id="b")]
    batch = collate(samples, epoch=2, step=9)
    assert batch.images.shape == (2, 3, 8, 7) and batch.images.dtype == torch.uint8 and batch.images.is_contiguous()
    for image, sample in zip(batch.images.numpy(), samples):
        h, w = sample.image.shape[:2]
        np.testing.assert_array_equal(image[:, :h, :w], sample.image.transpose(2, 0, 1))
        assert not image[:, h:].any() and not image[:, :, w:].any()
    assert [m.size for m in batch.meta] == [(5, 7), (8, 4)] and batch.image_ids == [11, "b"]
    assert (batch.epoch, batch.step) == (2, 9)
    assert batch.targets.labels.tolist() == [[2], [0]] and batch.targets.valid.tolist() == [[True], [False]]
    assert batch.targets.ignore[1].tolist() == [[1, 1, 2, 2]]


def test_given_size_and_transform():
    sample = noise(4, 4).replace(transform=np.array([[2.0, 0, 1], [0, 3, 0], [0, 0, 1]]), original_size=(2, 1))
    batch = collate([sample], size=(32, 64))
    assert batch.images.shape == (1, 3, 32, 64)
    assert batch.meta[0].transform == ((2.0, 0.0, 1.0), (0.0, 3.0, 0.0), (0.0, 0.0, 1.0)) and batch.meta[0].original_size == (
        2,
        1,
    )


def test_six_hundred_boxes_are_not_capped():
    sample = noise(8, 8, boxes=np.tile([0, 0, 4, 4], (600, 1)), labels=np.zeros(600))
    assert collate([sample]).targets.valid.sum() == 600


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="'x' has 9x4 px .* 8x8"):
        collate([noise(9, 4, image_id="x")], size=(8, 8))
    with pytest.raises(ValueError, match="float32.*uint8 is expected"):
        collate([Sample.from_arrays(np.zeros((2, 2, 3), np.float32))])
    with pytest.raises(ValueError, match="at least one"):
        collate([])
