"""Batches in an order that depends on the seeds and the step alone: not on workers, ranks, or where a run was resumed.

B is the total batch over all ranks; N the number of training images.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple, Protocol

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mmdet.data.collate import collate as default_collate
from mmdet.data.errors import DataError
from mmdet.data.structures import Batch, Sample, SampleKey

_PATIENCE = 5.0  # s in which workers that are not needed any more must end


class SampleError(RuntimeError):
    """Code that makes samples failed: the message has the original error, the file, the epoch and the iteration. The traceback
    of where it happened, perhaps in a worker process, is its cause."""


class _WorkerTraceback(Exception):  # noqa: N818
    """Carries a traceback, as text, from another process into the chain of an exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class TrainDataset(Dataset):
    """Training samples by key. ``pipeline(source, key, rng) -> Sample`` of ``key.size``; its generator belongs to the
    position in the epoch, so nothing depends on who asks, or when."""

    def __init__(self, source, pipeline: Callable, seed: int, data_seed: int = 0) -> None:
        self.source, self.pipeline, self.seed, self.data_seed = source, pipeline, seed, data_seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: SampleKey) -> Sample:
        entropy = [self.seed, self.data_seed, key.epoch, key.position]
        return self.pipeline(self.source, key, np.random.default_rng(np.random.SeedSequence(entropy)))


def epoch_order(num_samples: int, epoch: int, seed: int, data_seed: int, total: int) -> np.ndarray:
    """(total,) int64 indices: a permutation of all samples, then further permutations as far as they are needed.

    A pure function of its arguments; each permutation has its own seed, so the first N entries do not depend on ``total``.
    """
    orders, left = [np.zeros(0, np.int64)], total
    while left > 0:
        # The spawn key parts this stream from those of the samples, [seed, data_seed, epoch, position].
        sequence = np.random.SeedSequence([seed, data_seed, epoch], spawn_key=(len(orders),))
        orders.append(np.random.default_rng(sequence).permutation(num_samples)[:left])
        left -= len(orders[-1])
    return np.concatenate(orders)


class BatchPlan(Protocol):
    """Which samples make a batch and how large its tensor is, where that depends on the images themselves. Both are pure
    functions: of the annotation index, the seeds and their arguments, equal on all ranks."""

    def order(self, epoch: int, total: int) -> np.ndarray:
        """(total,) int64 indices, batch after batch: every sample once, then as many again as ``total`` asks for."""
        ...

    def size(self, epoch: int, first: int, indices: np.ndarray) -> tuple[int, int]:
        """(H, W) px of the batch of all ranks that begins at position ``first`` of the epoch with samples ``indices`` (B,)."""
        ...


class BatchKey(NamedTuple):
    """The samples of one batch (of one rank), in order."""

    epoch: int
    step: int  # from the start of training
    size: tuple[int, int] | None  # (H, W) px of the batch tensor; None: the largest sample
    keys: tuple


@dataclass
class _Failure:
    """What went wrong in a worker, as plain values: not every exception survives the way between processes."""

    is_data_error: bool
    message: str
    trace: str


def _share(value: object) -> None:
    """Moves a batch's tensors into shared memory, on their way to the main process. Left to torch that happens in a thread whose
    failure nobody hears of: the main process would wait for this batch for ever.

    Raises:
        DataError: it is full.
    """
    if isinstance(value, torch.Tensor):
        try:
            value.share_memory_()
        except RuntimeError as error:
            raise DataError(
                f"no shared memory is left for a tensor of {value.numel() * value.element_size() / 1e6:.1f} MB ({error}): make "
                "/dev/shm larger (docker run --shm-size=8g), take fewer --workers or a smaller batch, or --workers 0"
            ) from error
    elif isinstance(value, dict):
        for item in value.values():
            _share(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _share(item)
    elif is_dataclass(value):
        for field in fields(value):
            _share(getattr(value, field.name))


class _Batches(Dataset):
    """Batches by ``BatchKey``: loads, collates, and says which sample failed."""

    def __init__(self, samples, collate: Callable, path_of: Callable, training: bool) -> None:
        self.samples, self.collate, self.path_of, self.training = samples, collate, path_of, training

    def __getitem__(self, batch: BatchKey) -> Batch | _Failure:
        key = None
        try:
            samples = []
            for key in batch.keys:
                samples.append(self.samples[key])
            key = None
            made = self.collate(samples, epoch=batch.epoch, step=batch.step, size=batch.size)
            if get_worker_info() is not None:
                _share(made)
            return made
        except Exception as error:
            where = self._when(batch)
            if key is not None:
                where = f"image file {self.path_of(key)}, {where}"
            is_data_error = isinstance(error, DataError)
            text = str(error) if is_data_error else f"{type(error).__name__}: {' '.join(str(error).split())}"
            return _Failure(is_data_error, f"{text} ({where})", traceback.format_exc())

    def _when(self, batch: BatchKey) -> str:
        """Counted from 1, as in the log; an iteration is a step since the start of training."""
        if self.training:
            return f"epoch {batch.epoch + 1}, iteration {batch.step + 1}"
        return f"evaluation batch {batch.step + 1}"


def _raise_failure(failure: _Failure) -> None:
    if failure.is_data_error:
        raise DataError(failure.message)
    raise SampleError(failure.message) from _WorkerTraceback(failure.trace)


def _init_worker(worker: int) -> None:
    """Stop signals are the main process's business; parallelism is by processes, not by threads."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def _start_method() -> str | None:
    """None is Python's default. On Linux workers are forked unless a program chose spawn: "forkserver", the default there since
    Python 3.14, gives each its own copy of the annotations, and cannot send classes that an exp file defines."""
    is_default = multiprocessing.get_start_method(allow_none=True) in (None, "fork", "forkserver")
    return "fork" if is_default and sys.platform == "linux" else None


def _start(batches: _Batches, keys, workers: int, prefetch: int) -> Iterator:
    """DataLoader's iterator over ``keys``, in order. Its generator is its own: the global one must not move."""
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=keys,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        worker_init_fn=_init_worker,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=_start_method() if workers else None,
        generator=torch.Generator(),
    )
    return iter(loader)


class _Stream(Iterator):
    """The running iterator of a loader; closing it ends its workers."""

    def __init__(self, source: Iterator) -> None:
        self._source: Iterator | None = source

    def __next__(self) -> Batch:
        if self._source is None:
            raise StopIteration
        batch = next(self._source)
        if isinstance(batch, _Failure):
            self.close()
            _raise_failure(batch)
        return batch

    def close(self) -> None:
        """Does not leave it to the iterator's end, since the traceback of an error may hold the iterator."""
        source, self._source = self._source, None
        if not hasattr(source, "_shutdown_workers"):
            return
        killing = threading.Timer(_PATIENCE, _kill, [list(source._workers)])
        killing.daemon = True
        killing.start()
        with contextlib.suppress(RuntimeError):  # a worker died: that has been told, or is what was wanted
            source._shutdown_workers()  # waits 10 s for each, and sends them SIGTERM, which they ignore
        killing.cancel()


def _kill(workers: list) -> None:
    """Workers that are stuck in a sample: Python, too, would wait for them at its exit."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()


class TrainLoader:
    """Endless training batches of ``batch_size`` / ``world`` samples for one rank.

    ``batch_size`` is the total over ranks; ``size_at(step) -> (H, W)`` the size of each batch tensor, unless a ``plan`` decides
    on it and on the order of the samples. Every epoch has ceil(N / B) full steps. Workers live from ``batches`` until ``close``.

    Raises:
        DataError: the training set is empty.
        ValueError: ``batch_size`` is not a positive multiple of ``world``, or ``rank`` is not in [0, world).
    """

    def __init__(
        self,
        dataset: TrainDataset,
        batch_size: int,
        size_at: Callable[[int], tuple[int, int]],
        workers: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        data_seed: int = 0,
        collate: Callable = default_collate,
        prefetch: int = 2,  # batches in flight per worker
        plan: BatchPlan | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise DataError("the training set has no images: check the 'images' list of its annotation file")
        if batch_size < 1 or batch_size % world or not 0 <= rank < world:
            raise ValueError(
                f"the total batch size must be a positive multiple of the number of processes: got batch size {batch_size}, "
                f"process {rank} of {world}"
            )
        self.dataset, self.batch_size, self.size_at, self.workers = dataset, batch_size, size_at, workers
        self.rank, self.world, self.seed, self.data_seed = rank, world, seed, data_seed
        self.prefetch, self.plan = prefetch, plan
        self._batches = _Batches(dataset, collate, _TrainPath(dataset.source), training=True)
        self._stream: _Stream | None = None

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Batches of this rank from global step ``start_step`` on, without end; workers start at once. One stream at a time:
        an earlier one is closed.

        Raises (from ``next``):
            DataError: an image file is broken; the message names it.
            SampleError: the pipeline failed; the message has the error, the file, epoch and iteration.
        """
        self.close()
        self._stream = _Stream(_start(self._batches, self._keys(start_step), self.workers, self.prefetch))
        return self._stream

    def close(self) -> None:
        """Ends the workers."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _keys(self, start_step: int) -> Iterator[BatchKey]:
        steps, share, step = self.steps_per_epoch, self.batch_size // self.world, start_step
        while True:
            epoch = step // steps
            order = self._order(epoch, steps * self.batch_size)
            for within in range(step % steps, steps):
                start = within * self.batch_size
                size = tuple(self.size_at(step)) if self.plan is None else self._planned_size(epoch, start, order)
                first = start + self.rank * share
                keys = tuple(SampleKey(int(order[p]), epoch, p, size) for p in range(first, first + share))
                yield BatchKey(epoch, step, size, keys)
                step += 1

    def planned_sizes(self, epoch: int) -> list[tuple[int, int]]:
        """(H, W) px of every batch of an epoch, where a plan decides on them."""
        total = self.steps_per_epoch * self.batch_size
        order = self._order(epoch, total)
        return [self._planned_size(epoch, start, order) for start in range(0, total, self.batch_size)]

    def _order(self, epoch: int, total: int) -> np.ndarray:
        if self.plan is not None:
            return self.plan.order(epoch, total)
        return epoch_order(len(self.dataset), epoch, self.seed, self.data_seed, total)

    def _planned_size(self, epoch: int, start: int, order: np.ndarray) -> tuple[int, int]:
        height, width = self.plan.size(epoch, start, order[start : start + self.batch_size])
        return int(height), int(width)


@dataclass(frozen=True)
class _TrainPath:
    """The file behind a key, for messages. A class, because workers may be spawned."""

    source: object

    def __call__(self, key) -> str:
        index = key.index if isinstance(key, SampleKey) else key
        path = getattr(self.source, "path", None)
        return str(path(index)) if path else f"number {index}"


@dataclass(frozen=True)
class _EvalSamples:
    """Transformed samples by index."""

    source: object
    transform: Callable

    def __getitem__(self, index: int) -> Sample:
        return self.transform(self.source.load(index))


class EvalLoader:
    """Each image of this rank's share once, in order; nothing is repeated to fill a batch or a rank.

    Rank r takes images r, r + world, ... of ``source``; ``transform(sample) -> Sample``. Every ``iter`` starts workers anew
    and they end with it. Errors are those of ``TrainLoader.batches``.

    ``frames`` (N, 2), where given, is the (H, W) px that each image's batch tensor has: images of one frame share batches, frame
    after frame, so that an image's padding does not depend on its neighbours. Else the largest sample decides.
    """

    def __init__(
        self,
        source,
        transform: Callable,
        batch_size: int,
        workers: int,
        rank: int = 0,
        world: int = 1,
        frames: np.ndarray | None = None,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world:
            raise ValueError(f"got evaluation batch size {batch_size}, process {rank} of {world}; at least 1 and rank < world")
        self.source, self.transform, self.batch_size, self.workers = source, transform, batch_size, workers
        self.indices = range(rank, len(source), world)
        self._groups: dict[tuple[int, int] | None, list[int]] = {}
        for i in self.indices:
            frame = None if frames is None else (int(frames[i][0]), int(frames[i][1]))
            self._groups.setdefault(frame, []).append(i)

    def __len__(self) -> int:
        """Batches of this rank."""
        return sum(math.ceil(len(group) / self.batch_size) for group in self._groups.values())

    def __iter__(self) -> Iterator[Batch]:
        parts = [
            (frame, group[i : i + self.batch_size])
            for frame, group in self._groups.items()
            for i in range(0, len(group), self.batch_size)
        ]
        keys = [BatchKey(0, number, frame, tuple(part)) for number, (frame, part) in enumerate(parts)]
        batches = _Batches(_EvalSamples(self.source, self.transform), default_collate, _TrainPath(self.source), training=False)
        stream = _Stream(_start(batches, keys, min(self.workers, len(keys)), 2))
        try:
            yield from stream
        finally:
            stream.close()
