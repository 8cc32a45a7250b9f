"""Batches arrive in order on the device, errors with the batch that failed."""

import time

import pytest
import torch

from mmdet.data.prefetcher import Prefetcher
from mmdet.data.structures import Batch, Targets

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


def batches(count, fail_at=None):
    for step in range(count):
        if step == fail_at:
            raise ValueError(f"boom at {step}")
        targets = Targets.from_lists([[[0, 0, step, step]]], [[step]])
        yield Batch(torch.full((1, 3, 4, 4), step, dtype=torch.uint8), targets, step=step)


@pytest.mark.parametrize("device", DEVICES)
def test_all_batches_in_order_on_the_device(device):
    seen = list(Prefetcher(batches(5), device))
    assert [b.step for b in seen] == list(range(5))
    for step, batch in enumerate(seen):
        assert batch.images.device.type == batch.targets.boxes.device.type == device
        assert batch.images.dtype == torch.uint8 and bool((batch.images == step).all())
        assert batch.targets.labels.tolist() == [[step]]


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_comes_in_place_of_its_own_batch(device):
    prefetcher = Prefetcher(batches(5, fail_at=2), device)
    assert [next(prefetcher).step, next(prefetcher).step] == [0, 1]
    with pytest.raises(ValueError, match="boom at 2"):
        next(prefetcher)


@pytest.mark.parametrize("device", DEVICES)
def test_data_time_is_the_wait_for_the_last_batch(device):
    def slow():
        for batch in batches(3):
            time.sleep(0.05)
            yield batch

    prefetcher = Prefetcher(slow(), device)
    next(prefetcher)
    assert prefetcher.data_time >= 0.05
    next(prefetcher)
    assert 0.05 <= prefetcher.data_time < 1
