"""The same batches for any number of workers, after any resume, on any number of ranks."""

import multiprocessing
import os
import pickle
import sys
import time
import traceback

import numpy as np
import pytest
import torch
from toy import make_toy, toy_image, write_image

from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.errors import DataError
from mmdet.data.loader import EvalLoader, SampleError, TrainDataset, TrainLoader, epoch_order
from mmdet.data.structures import Sample
from mmdet.data.transforms import DetectionTrainPipeline, ResizeTransform


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return CocoDataset(*find_coco(make_toy(tmp_path_factory.mktemp("toy"), 10, 3), "train"))


def size_at(step):
    return (64 + 32 * (step % 3), 96)


def loader(source, batch_size=4, workers=0, seed=0, pipeline=None, **given):
    dataset = TrainDataset(source, pipeline or DetectionTrainPipeline(), seed, given.get("data_seed", 0))
    return TrainLoader(dataset, batch_size, size_at, workers, seed=seed, **given)


def take(loader, count, start_step=0):
    stream = loader.batches(start_step)
    batches = [next(stream) for _ in range(count)]
    loader.close()
    return batches


def assert_same(first, second):
    assert (first.epoch, first.step, first.meta) == (second.epoch, second.step, second.meta)
    assert torch.equal(first.images, second.images)
    for name in ("boxes", "labels", "valid", "weights", "ignore"):
        assert torch.equal(getattr(first.targets, name), getattr(second.targets, name))


@pytest.fixture(scope="module")
def straight(source):
    return take(loader(source), 8)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_matter(source, straight, workers):
    for first, second in zip(straight, take(loader(source, workers=workers), 8), strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("start", [1, 3, 5, 6])
def test_a_resumed_run_sees_the_same_batches(source, straight, start):
    for first, second in zip(straight[start:], take(loader(source), 8 - start, start), strict=True):
        assert_same(first, second)


def test_two_ranks_share_the_same_batch(source, straight):
    ranks = [take(loader(source, rank=r, world=2), 8) for r in range(2)]
    for whole, *parts in zip(straight, *ranks, strict=True):
        assert torch.equal(whole.images, torch.cat([p.images for p in parts]))
        assert whole.meta == parts[0].meta + parts[1].meta
        assert (whole.epoch, whole.step) == (parts[1].epoch, parts[1].step)


def test_shape_epoch_and_step(straight):
    for step, batch in enumerate(straight):
        assert (batch.step, batch.epoch) == (step, step // 3)  # ceil(10 / 4) steps
        assert batch.images.shape == (4, 3, *size_at(step)) and batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous() and all(m.size == size_at(step) for m in batch.meta)


def test_an_epoch_visits_every_image_once_and_is_completed(straight):
    for epoch in (0, 1):
        ids = [i for b in straight if b.epoch == epoch for i in b.image_ids]
        assert len(ids) == 12 and sorted(ids[:10]) == list(range(1, 11))
    first, second = ([i for b in straight if b.epoch == e for i in b.image_ids] for e in (0, 1))
    assert first != second


def test_seeds_change_the_order_and_the_pixels(source, straight):
    for given in ({"seed": 1}, {"data_seed": 1}):
        other = take(loader(source, **given), 3)
        assert [b.image_ids for b in other] != [b.image_ids for b in straight[:3]]
        assert not torch.equal(other[0].images, straight[0].images)


def test_an_image_looks_different_in_each_epoch(source):
    batches = take(loader(source, batch_size=10), 4)  # the size is the same in steps 0 and 3
    views = {e: dict(zip(batches[e].image_ids, batches[e].images)) for e in (0, 3)}
    assert sum(torch.equal(views[0][i], views[3][i]) for i in views[0]) == 0


def test_d11_fewer_images_than_the_batch(source, tmp_path):
    small = source.select([0, 1, 2])
    batches = take(loader(small, batch_size=8), 2)
    assert loader(small, batch_size=8).steps_per_epoch == 1
    for epoch, batch in enumerate(batches):
        assert len(batch) == 8 and batch.epoch == epoch and batch.step == epoch
        assert sorted(batch.image_ids[:3]) == sorted(batch.image_ids[3:6]) == [1, 2, 3]
    same = [i for i in range(1, 8) if torch.equal(batches[0].images[0], batches[0].images[i])]
    assert not same  # a repeated image is drawn anew
    assert len(take(loader(source.select([0]), batch_size=8), 1)[0]) == 8


def test_epoch_order():
    order = epoch_order(5, 3, 0, 0, 13)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5)) and len(order) == 13
    np.testing.assert_array_equal(order[:7], epoch_order(5, 3, 0, 0, 7))
    assert any(not np.array_equal(order, epoch_order(5, e, s, d, 13)) for e, s, d in ((4, 0, 0), (3, 1, 0), (3, 0, 1)))
    np.testing.assert_array_equal(epoch_order(20, 0, 1, 2, 20), epoch_order(20, 0, 1, 2, 20))


def test_wrong_arguments_are_named(source):
    with pytest.raises(ValueError, match="multiple of the number of processes: got batch size 3, process 0 of 2"):
        loader(source, batch_size=3, world=2)
    with pytest.raises(DataError, match="no images"):
        loader(source.select([]))


def test_the_global_generators_do_not_move(source):
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for workers in (0, 1):
        take(loader(source, workers=workers), 2)
        list(EvalLoader(source, ResizeTransform((32, 32)), 4, workers))
    assert torch.equal(before[0], torch.get_rng_state()) and np.array_equal(before[1], np.random.get_state()[1])


class Failing(DetectionTrainPipeline):
    def __call__(self, source, key, rng):
        if key.index == 3:
            raise KeyError("boom")  # an exception whose text is not its argument
        return super().__call__(source, key, rng)


@pytest.mark.parametrize("workers", [0, 1])
def test_u01_a_failing_pipeline_says_error_file_and_step(source, workers):
    with pytest.raises(SampleError) as caught:
        take(loader(source, workers=workers, pipeline=Failing()), 8)
    message = str(caught.value)
    assert "KeyError: 'boom'" in message and "t_0004.png" in message and "epoch 1, iteration" in message
    trace = "".join(traceback.format_exception(caught.value))
    assert message.count("\n") == 0 and "test_loader.py" in trace and trace.strip().splitlines()[-1].endswith(message)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_a_data_error_with_its_name(tmp_path, workers):
    root = make_toy(tmp_path, 4, 1)
    (root / "images" / "t_0002.png").write_bytes(b"")
    broken = CocoDataset(*find_coco(root, "train"))
    with pytest.raises(DataError, match=r"t_0002\.png is empty.*epoch 1, iteration 1") as caught:
        take(loader(broken, workers=workers), 1)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(DataError, match=r"t_0002\.png is empty.*evaluation batch 1"):
        list(EvalLoader(broken, ResizeTransform((32, 32)), 2, workers))


def children():
    return {p.pid for p in multiprocessing.active_children()}


def test_close_ends_the_workers_and_a_new_stream_replaces_the_old(source):
    before = children()
    train = loader(source, workers=1)
    first = train.batches()
    next(first)
    assert len(children() - before) == 1
    second = train.batches(4)
    assert next(second).step == 4 and len(children() - before) == 1
    assert list(first) == []
    train.close()
    deadline = time.monotonic() + 10
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() == before


class Stuck(DetectionTrainPipeline):
    def __call__(self, source, key, rng):
        if key.epoch > 0:
            time.sleep(1000)
        return super().__call__(source, key, rng)


def test_stuck_workers_are_ended_in_seconds(source):
    """They ignore SIGTERM, and Python would wait for them at its exit."""
    training = loader(source, workers=3, pipeline=Stuck())
    stream = training.batches()
    batches = [next(stream) for _ in range(3)]
    workers = multiprocessing.active_children()
    begin = time.monotonic()
    training.close()
    assert len(batches) == 3 and len(workers) == 3
    assert time.monotonic() - begin < 9 and not any(w.is_alive() for w in workers)


class TellsProcess(DetectionTrainPipeline):
    """Puts what the worker process is like into the image id."""

    def __call__(self, source, key, rng):
        import signal

        import cv2

        ignored = [signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)]
        facts = f"{os.getpid()} {all(ignored)} {torch.get_num_threads()} {cv2.getNumThreads()}"
        return super().__call__(source, key, rng).replace(image_id=facts)


def test_workers_live_over_epochs_ignore_interrupts_and_use_one_thread(source):
    batches = take(loader(source, workers=1, pipeline=TellsProcess()), 7)
    facts = {i for b in batches for i in b.image_ids}
    assert len(facts) == 1 and batches[-1].epoch == 2
    pid, ignored, threads, cv_threads = facts.pop().split()
    assert int(pid) != os.getpid() and ignored == "True" and threads == "1" and cv_threads in ("0", "1")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python's default decides")
@pytest.mark.parametrize("default", [None, "forkserver"])
def test_on_linux_workers_share_memory_whatever_the_default_is(source, default):
    before, earlier = children(), multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(default, force=True)
    try:
        started = loader(source, workers=1)
        started.batches()
        (worker,) = [p for p in multiprocessing.active_children() if p.pid not in before]
        assert type(worker).__name__ == "ForkProcess"
        started.close()
    finally:
        multiprocessing.set_start_method(earlier, force=True)


def test_everything_a_worker_needs_can_be_spawned(source):
    copy = pickle.loads(pickle.dumps(loader(source)._batches))
    key = next(loader(source)._keys(0))
    assert_same(copy[key], loader(source)._batches[key])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_sees_each_image_once(source, workers, world):
    seen, small = [], source.select(range(7))
    for rank in range(world):
        part = EvalLoader(small, ResizeTransform((48, 64)), 2, workers, rank, world)
        batches = list(part)
        assert len(batches) == len(part)
        assert all(b.images.shape[1:] == (3, 48, 64) for b in batches)
        seen += [i for b in batches for i in b.image_ids]
    assert sorted(seen) == list(range(1, 8))


def test_evaluation_batches_carry_what_goes_back_to_the_file(source):
    (batch,) = EvalLoader(source.select([2]), ResizeTransform((60, 320)), 5, 0)
    (meta,) = batch.meta
    assert meta.original_size == (120, 160) and meta.transform == ((2.0, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 1.0))
    assert batch.targets.boxes[0, 0].tolist() == [2 * 28, 0.5 * 23, 2 * 68, 0.5 * 53]


def test_an_evaluation_rank_without_images_has_no_batches(source):
    empty = EvalLoader(source.select([0]), ResizeTransform((32, 32)), 2, 1, rank=1, world=2)
    assert len(empty) == 0 and list(empty) == []
    with pytest.raises(ValueError, match="process 2 of 2"):
        EvalLoader(source, ResizeTransform((32, 32)), 2, 0, rank=2, world=2)


def test_stopping_an_evaluation_early_ends_its_workers(source):
    before = children()
    stream = iter(EvalLoader(source, ResizeTransform((32, 32)), 1, 1))
    next(stream)
    stream.close()
    time.sleep(0.2)
    assert children() == before


def test_samples_of_other_shapes_are_padded_together(tmp_path):
    root = make_toy(tmp_path, 2, 1, edit=lambda coco, split: coco["images"][1].update(width=100, height=80))
    write_image(root / "images" / "t_0002.png", toy_image(2, 1)[:80, :100])
    ragged = CocoDataset(*find_coco(root, "train"))
    (batch,) = EvalLoader(ragged, _as_it_is, 2, 0)
    assert batch.images.shape == (2, 3, 120, 160) and [m.size for m in batch.meta] == [(120, 160), (80, 100)]


def _as_it_is(sample: Sample) -> Sample:
    return sample
