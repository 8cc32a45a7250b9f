"""Scaling that keeps the aspect ratio: sizes, boxes, and batches that depend on the annotation index and the seeds alone."""

import numpy as np
import pytest
import torch

from mmdet.data.keep_ratio import (
    KeepRatioPlan,
    KeepRatioTrainPipeline,
    KeepRatioTransform,
    fitted_into,
    padded,
    scaled_size,
)
from mmdet.data.loader import EvalLoader, TrainDataset, TrainLoader
from mmdet.data.structures import Detections, ImageMeta, Sample

SHORTS, LONG, DIVISOR = (64, 96, 128), 160, 32


class Images:
    """Images of the given sizes (H, W); image i has the value i everywhere and one box, its upper left quarter."""

    def __init__(self, sizes):
        self.sizes = np.array(sizes).reshape(-1, 2)
        self.image_ids = list(range(len(self.sizes)))

    def __len__(self):
        return len(self.sizes)

    def load(self, index):
        h, w = self.sizes[index].tolist()
        image = np.full((h, w, 3), index, np.uint8)
        return Sample.from_arrays(image, [[0, 0, w / 2, h / 2]], [0], [[0, 0, w, h]], image_id=index)


def random_sizes(count, seed=0):
    return np.random.default_rng(seed).integers(40, 90, (count, 2))


def plan_of(sizes, batch_size, **given):
    return KeepRatioPlan(np.array(sizes).reshape(-1, 2), SHORTS, LONG, DIVISOR, batch_size, **{"seed": 0, **given})


def no_size(step):
    raise AssertionError("a plan decides on the size")


def loader_of(source, batch_size, workers=0, rank=0, world=1, **given):
    plan = plan_of(source.sizes, batch_size, **given)
    data = TrainDataset(source, KeepRatioTrainPipeline(plan), plan.seed)
    return TrainLoader(data, batch_size, no_size, workers, rank, world, plan.seed, plan=plan)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (480, 640, (800, 1067)),
        (640, 480, (1067, 800)),
        (300, 900, (444, 1333)),  # the long side decides
        (900, 300, (1333, 444)),
        (800, 1333, (800, 1333)),
        (1, 5000, (1, 1333)),
        (100, 100, (800, 800)),
    ],
)
def test_scaled_size(height, width, expected):
    assert scaled_size(height, width, 800, 1333) == expected


def test_padding_and_fitting():
    assert padded((800, 1067), 128) == (896, 1152) and padded((64, 96), 32) == (64, 96)
    assert fitted_into((50, 80), (64, 96)) == (50, 80)
    assert fitted_into((100, 200), (64, 96)) == (48, 96)


def test_evaluation_transform_moves_boxes_there_and_back():
    """Case E04: a box of the network's frame comes back to the file's pixels."""
    sample = Sample.from_arrays(np.zeros((960, 1280, 3), np.uint8), [[200, 100, 600, 400]], [0])
    moved = KeepRatioTransform(480, 640, 32)(sample)
    assert moved.image.shape == (480, 640, 3)
    np.testing.assert_allclose(moved.boxes, [[100, 50, 300, 200]])
    meta = ImageMeta((480, 640), (960, 1280), 0, tuple(map(tuple, moved.transform.tolist())))
    found = Detections(torch.tensor([[100.0, 50, 300, 200]]), torch.ones(1), torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(found.to_original(meta).boxes, torch.tensor([[200.0, 100, 600, 400]]))


def test_uneven_scales_use_the_real_sides():
    """301 px become 100 of them: the boxes follow the pixels that there are, not the factor that was asked for."""
    sample = Sample.from_arrays(np.zeros((301, 500, 3), np.uint8), [[0, 0, 500, 301]], [0])
    moved = KeepRatioTransform(100, 900, 32)(sample)
    height, width = moved.image.shape[:2]
    assert (height, width) == (100, 166)
    np.testing.assert_allclose(moved.boxes, [[0, 0, width, height]], rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 5, 8, 41])
def test_an_epoch_visits_every_image_in_full_batches(count, batch_size):
    """ceil(N / B) steps; where one orientation is left over it is mixed into one batch, the last."""
    sizes = random_sizes(count)
    plan = plan_of(sizes, batch_size)
    total = -(-count // batch_size) * batch_size
    for epoch in (0, 1):
        order = plan.order(epoch, total)
        assert order.shape == (total,) and set(order.tolist()) == set(range(count))
        counts = np.bincount(order, minlength=count)
        assert counts.max() <= 1 + -(-(total - count) // count)
        wide = plan.wide[order].reshape(-1, batch_size)
        mixed = [len(set(row.tolist())) > 1 for row in wide]
        assert not any(mixed[:-1])
    assert (count <= batch_size) or (plan.order(0, total) != plan.order(1, total)).any()


def test_completion_is_of_the_orientation_that_needs_it():
    """Five wide and six high images in batches of four: 2 + 2 batches are one more than ceil(11 / 4), so one is mixed; with
    seven and three the numbers come out, and none is. A single high image is not taken four times."""
    wide, high = (50, 80), (80, 50)
    for num_wide, num_high, pure in (
        (5, 6, False),
        (7, 3, True),
        (6, 6, False),
        (4, 4, True),
        (7, 0, True),
        (3, 4, True),
        (7, 1, False),
    ):
        plan = plan_of([wide] * num_wide + [high] * num_high, 4)
        total = -(-(num_wide + num_high) // 4) * 4
        rows = plan.wide[plan.order(0, total)].reshape(-1, 4)
        assert all(len(set(row.tolist())) == 1 for row in rows) == pure, (num_wide, num_high)


def test_batch_sizes_hold_their_images_and_no_more():
    source = Images(random_sizes(30))
    loader = loader_of(source, 4)
    batches = loader.batches()
    for _ in range(2 * loader.steps_per_epoch):
        batch = next(batches)
        height, width = batch.images.shape[2:]
        assert height % DIVISOR == width % DIVISOR == 0
        sizes = np.array([m.size for m in batch.meta])
        wide = [m.original_size[1] >= m.original_size[0] for m in batch.meta]
        if len(set(wide)) == 1:
            assert (height, width) == padded(tuple(sizes.max(0).tolist()), DIVISOR)
            for (h, w), meta in zip(sizes.tolist(), batch.meta):
                assert (h, w) in {scaled_size(*meta.original_size, short, LONG) for short in SHORTS}
        else:
            assert height * width <= 128 * 160
        for image, meta, boxes in zip(batch.images, batch.meta, batch.targets.boxes):
            h, w = meta.size
            assert (image[:, :h, :w] == meta.image_id).all() and not image[:, h:].any() and not image[:, :, w:].any()
            x1, y1, x2, y2 = boxes[0].tolist()
            assert (x2 - x1, y2 - y1) == pytest.approx((w / 2, h / 2)) and y1 == 0 and x1 in (0, pytest.approx(w / 2))
        ignore = batch.targets.ignore[:, 0]
        torch.testing.assert_close(ignore[:, 2:], torch.tensor(sizes[:, ::-1].copy(), dtype=torch.float32))
    loader.close()


def test_a_mixed_batch_is_no_larger_than_the_others():
    wide, high = (80, 120), (120, 80)
    plan = KeepRatioPlan(np.array([wide, high]), (128,), 192, 32, 2, seed=0)
    assert plan.size(0, 0, np.array([0, 0])) == (128, 192) and plan.size(0, 0, np.array([1, 1])) == (192, 128)
    assert plan.size(0, 0, np.array([0, 1])) == (128, 128)  # not 192 x 192
    pipeline = KeepRatioTrainPipeline(plan)
    loader = TrainLoader(TrainDataset(Images([wide, high]), pipeline, 0), 2, no_size, 0, plan=plan)
    batch = next(loader.batches())
    assert batch.images.shape[2:] == (128, 128)
    assert sorted(m.size for m in batch.meta) == [(85, 128), (128, 85)]
    loader.close()


def taken(loader, steps, start=0):
    batches = loader.batches(start)
    result = [next(batches) for _ in range(steps)]
    loader.close()
    return result


def same(a, b):
    return torch.equal(a.images, b.images) and a.meta == b.meta and torch.equal(a.targets.boxes, b.targets.boxes)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_for_any_number_of_workers_and_after_any_resume(workers):
    source = Images(random_sizes(11))
    straight = taken(loader_of(source, 4), 7)
    resumed = taken(loader_of(source, 4, workers), 3, start=4)
    assert all(same(a, b) for a, b in zip(straight[4:], resumed))
    assert any(not same(a, b) for a, b in zip(straight, taken(loader_of(source, 4, seed=1), 7)))


def test_ranks_share_the_batches_of_one_process():
    source = Images(random_sizes(11))
    whole = taken(loader_of(source, 4), 6)
    parts = [taken(loader_of(source, 4, rank=rank, world=2), 6) for rank in (0, 1)]
    for batch, first, second in zip(whole, *parts):
        assert first.images.shape == second.images.shape and first.images.shape[2:] == batch.images.shape[2:]
        assert torch.equal(torch.cat([first.images, second.images]), batch.images)
        assert first.meta + second.meta == batch.meta


def test_short_sides_are_drawn_evenly():
    plan = plan_of([(50, 50)], 1)
    sides = [plan.scaled(0, epoch, 0)[0] for epoch in range(300)]
    assert {side: sides.count(side) > 60 for side in SHORTS} == dict.fromkeys(SHORTS, True)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_pads_an_image_alike_in_any_batch(batch_size):
    source = Images(random_sizes(13))
    transform = KeepRatioTransform(96, 160, 32)
    frames = transform.frames(source.sizes)
    seen = {}
    for rank in (0, 1):
        loader = EvalLoader(source, transform, batch_size, 0, rank, 2, frames=frames)
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            for meta in batch.meta:
                assert meta.image_id not in seen
                seen[meta.image_id] = tuple(batch.images.shape[2:])
                assert meta.size == scaled_size(*source.sizes[meta.image_id].tolist(), 96, 160)
    assert seen == {i: tuple(frame) for i, frame in enumerate(frames.tolist())}
    assert all(h % 32 == w % 32 == 0 for h, w in seen.values())


def test_an_empty_evaluation_set_has_no_frames():
    transform = KeepRatioTransform(96, 160, 32)
    assert transform.frames(np.zeros((0, 2), int)).shape == (0, 2)
    assert not list(EvalLoader(Images([]), transform, 2, 0, frames=transform.frames(np.zeros((0, 2), int))))
