"""Batches in an order that depends on the seeds and the step alone: not on workers, ranks, or where a run was resumed.

B is the total batch over all ranks; N the number of training images.
"""

from __future__ import annotations

import math
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmdet.data.collate import collate as default_collate
from mmdet.data.errors import DataError
from mmdet.data.structures import Batch, Sample, SampleKey


class SampleError(RuntimeError):
    """Code that makes samples failed; the message ends with the original error, the file, the epoch and the step."""


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


class _Batches(Dataset):
    """Batches by ``BatchKey``: loads, collates, and says which sample failed."""

    def __init__(self, samples, collate: Callable, path_of: Callable) -> None:
        self.samples, self.collate, self.path_of = samples, collate, path_of

    def __getitem__(self, batch: BatchKey) -> Batch | _Failure:
        key = None
        try:
            samples = []
            for key in batch.keys:
                samples.append(self.samples[key])
            key = None
            return self.collate(samples, epoch=batch.epoch, step=batch.step, size=batch.size)
        except Exception as error:
            where = f"epoch {batch.epoch}, step {batch.step}"
            if key is not None:
                where = f"image file {self.path_of(key)}, {where}"
            is_data_error = isinstance(error, DataError)
            message = f"{error} ({where})" if is_data_error else f"{type(error).__name__}: {error} ({where})"
            return _Failure(is_data_error, message, traceback.format_exc())


def _raise_failure(failure: _Failure) -> None:
    if failure.is_data_error:
        raise DataError(failure.message)
    raise SampleError(f"a sample could not be made\n{failure.trace}\n{failure.message}")


def _init_worker(worker: int) -> None:
    """Interrupts are the main process's business; parallelism is by processes, not by threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


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
        self._source = None  # the last reference: DataLoader's iterator joins its workers when it goes


class TrainLoader:
    """Endless training batches of ``batch_size`` / ``world`` samples for one rank.

    ``batch_size`` is the total over ranks; ``size_at(step) -> (H, W)`` the size of each batch tensor. Every epoch has
    ceil(N / B) full steps. Workers live from ``batches`` until ``close`` and are forked or spawned as Python's default says.

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
        self.prefetch = prefetch
        self._batches = _Batches(dataset, collate, _TrainPath(dataset.source))
        self._stream: _Stream | None = None

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Batches of this rank from global step ``start_step`` on, without end; workers start at once. One stream at a time:
        an earlier one is closed.

        Raises (from ``next``):
            DataError: an image file is broken; the message names it.
            SampleError: the pipeline failed; the message has the traceback, the error, the file, epoch and step.
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
            order = epoch_order(len(self.dataset), epoch, self.seed, self.data_seed, steps * self.batch_size).tolist()
            for within in range(step % steps, steps):
                size = tuple(self.size_at(step))
                first = within * self.batch_size + self.rank * share
                keys = tuple(SampleKey(order[p], epoch, p, size) for p in range(first, first + share))
                yield BatchKey(epoch, step, size, keys)
                step += 1


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
    """

    def __init__(self, source, transform: Callable, batch_size: int, workers: int, rank: int = 0, world: int = 1) -> None:
        if batch_size < 1 or not 0 <= rank < world:
            raise ValueError(f"got evaluation batch size {batch_size}, process {rank} of {world}; at least 1 and rank < world")
        self.source, self.transform, self.batch_size, self.workers = source, transform, batch_size, workers
        self.indices = range(rank, len(source), world)

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        parts = (self.indices[i : i + self.batch_size] for i in range(0, len(self.indices), self.batch_size))
        keys = [BatchKey(0, number, None, tuple(part)) for number, part in enumerate(parts)]
        batches = _Batches(_EvalSamples(self.source, self.transform), default_collate, _TrainPath(self.source))
        stream = _Stream(_start(batches, keys, min(self.workers, len(keys)), 2))
        try:
            yield from stream
        finally:
            stream.close()
