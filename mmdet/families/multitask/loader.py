"""Batches of all tasks, iteration after iteration: which samples is a function of (seed, task, shard, iteration) alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mmdet.data.collate import collate
from mmdet.data.errors import DataError
from mmdet.data.loader import BatchKey, TrainDataset, TrainLoader
from mmdet.data.structures import Sample, SampleKey
from mmdet.data.transforms import ColourDistortion, Window, apply_colour, move_sample, resample, window_transform
from mmdet.families.multitask.batches import IterationBatch, LabelledBatch, TaskBatch, collate_labelled, pair_up
from mmdet.families.multitask.groups import Unit
from mmdet.families.multitask.sampler import GivenIterationSampler
from mmdet.families.multitask.sources import Pair


class ImagePipeline:
    """Training images of a task without boxes: a random part of the image, mirrored or not, in other colours if wanted."""

    def __init__(self, min_area: float = 0.6, flip_prob: float = 0.5, distort: ColourDistortion | None = None) -> None:
        self.min_area, self.flip_prob, self.distort = min_area, flip_prob, distort

    def __call__(self, source: Any, key: SampleKey, rng: np.random.Generator) -> Sample | Pair:
        sample = source.load(key.index)
        if isinstance(sample, Pair):
            return Pair(*(self.transform(s, key.size, rng) for s in sample))
        return self.transform(sample, key.size, rng)

    def transform(self, sample: Sample, size: tuple[int, int], rng: np.random.Generator) -> Sample:
        """``sample`` changed at random, its image of ``size`` (H, W)."""
        height, width = sample.image.shape[:2]
        side = np.sqrt(rng.uniform(self.min_area, 1.0))
        part_width, part_height = max(int(width * side), 1), max(int(height * side), 1)
        x, y = int(rng.integers(width - part_width + 1)), int(rng.integers(height - part_height + 1))
        window, flip = Window(x, y, part_width, part_height), bool(rng.random() < self.flip_prob)
        colour = None if self.distort is None else self.distort.draw(rng)
        image = resample(sample.image, window, size, cv2.INTER_LINEAR, flip, 0)
        image = image if colour is None else apply_colour(image, colour)
        return move_sample(sample, np.ascontiguousarray(image), window_transform(window, size, flip), np.zeros(0, bool), 0.0)


class UnitKey(NamedTuple):
    """The samples of one batch of one shard."""

    unit: Unit
    step: int
    epoch: int  # passes over the task's data that are over
    size: tuple[int, int]  # (H, W) px
    keys: tuple[SampleKey, ...]


@dataclass
class TaskData:
    """What the loader must know about a task: plain parts, which worker processes can be sent."""

    name: str
    kind: str
    source: Any
    pipeline: Callable
    batch_size: int
    sizes: Sequence[tuple[int, int]]  # (H, W) px that its batches may have
    seed: Sequence[int]
    sampling: str = "epoch_shuffle"
    images_per_class: int = 4

    def samplers(self, shards: int, total_iters: int) -> list[GivenIterationSampler]:
        """One for each shard."""
        labels = getattr(self.source, "labels", None)
        labels = None if labels is None or labels.ndim != 1 else labels
        args = len(self.source), total_iters, self.batch_size, shards
        return [
            GivenIterationSampler(*args, rank, self.seed, 0, self.sampling, labels, self.images_per_class)
            for rank in range(shards)
        ]


class UnitSamples(Dataset):
    """Batches by ``UnitKey``."""

    def __init__(self, tasks: Sequence[TaskData]) -> None:
        self.tasks = list(tasks)
        seeds = [int(np.random.SeedSequence(list(t.seed)).generate_state(1)[0]) for t in tasks]
        self._samples = [TrainDataset(t.source, t.pipeline, seed) for t, seed in zip(tasks, seeds, strict=True)]
        self.source = self

    def __len__(self) -> int:
        return sum(len(t.source) for t in self.tasks)

    def path(self, key: UnitKey) -> str:
        """For messages that know no more."""
        return f"of task {self.tasks[key.unit.task].name}, shard {key.unit.shard}"

    def __getitem__(self, key: UnitKey) -> TaskBatch:
        task = self.tasks[key.unit.task]
        samples = [self._load(key.unit.task, sample_key) for sample_key in key.keys]
        if task.kind == "detection":
            data = collate(samples, key.epoch, key.step, key.size)
        else:
            indices = [k.index for k in key.keys]
            data = labelled_batch(task.source, samples, indices, key.epoch, key.step)
        return TaskBatch(key.unit.task, key.unit.shard, data, key.step, task.name)

    def _load(self, task: int, key: SampleKey) -> Any:
        try:
            return self._samples[task][key]
        except DataError as error:
            raise DataError(f"{error} (task {self.tasks[task].name})") from error
        except Exception as error:
            file = self.tasks[task].source.path(key.index)
            raise RuntimeError(f"{type(error).__name__}: {error} (task {self.tasks[task].name}, image file {file})") from error


def labelled_batch(source: Any, samples: Sequence[Any], indices: Sequence[int], epoch: int = 0, step: int = 0) -> LabelledBatch:
    """Samples, or pairs of them, with the labels that ``source`` has for ``indices``."""
    labels = [source.label(i) for i in indices]
    if isinstance(samples[0], Pair):
        halves = [collate_labelled([p[i] for p in samples], labels, indices, epoch, step) for i in range(2)]
        return pair_up(*halves)
    return collate_labelled(samples, labels, indices, epoch, step)


class _Gather:
    """Batches of a rank's units -> the rank's batch of the iteration. A class, because workers may be spawned."""

    def __init__(self, images_per_rank: float) -> None:
        self.images_per_rank = images_per_rank

    def __call__(self, parts: list[TaskBatch], epoch: int, step: int, size: Any) -> IterationBatch:
        return IterationBatch(parts, self.images_per_rank)


class TaskLoader(TrainLoader):
    """Endless batches of a rank's units. An "epoch" of the Trainer is ``round_length`` iterations.

    Args:
        tasks: the tasks' data, in order.
        shards: batches per iteration of each task, over all ranks.
        units: what this rank computes, in order.
        round_length: iterations between evaluations.
        total_iters: of the whole run.
        seed: of sizes.
        workers, rank, world: as of TrainLoader.
    """

    def __init__(
        self,
        tasks: Sequence[TaskData],
        shards: Sequence[int],
        units: Sequence[Unit],
        round_length: int,
        total_iters: int,
        seed: int = 0,
        data_seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        images = sum(t.batch_size * s * (2 if t.kind == "pairwise" else 1) for t, s in zip(tasks, shards, strict=True))
        gather = _Gather(images / world)
        super().__init__(UnitSamples(tasks), world, _no_size, workers, rank, world, seed, data_seed, collate=gather)
        self.tasks, self.shards, self.units = list(tasks), list(shards), list(units)
        self.round_length, self.total_iters = round_length, total_iters
        self.samplers = [t.samplers(s, total_iters) for t, s in zip(tasks, shards, strict=True)]

    @property
    def steps_per_epoch(self) -> int:
        return self.round_length

    def _keys(self, start_step: int) -> Iterator[BatchKey]:
        step = start_step
        while True:
            yield BatchKey(step // self.round_length, step, None, tuple(self.unit_key(unit, step) for unit in self.units))
            step += 1

    def unit_key(self, unit: Unit, step: int) -> UnitKey:
        """The samples of one unit in one iteration."""
        task, sampler = self.tasks[unit.task], self.samplers[unit.task][unit.shard]
        size = self._size(task, unit.task, step)
        first = sampler.first_position(step)
        places = [divmod(first + j, sampler.period) for j in range(task.batch_size)]
        apart = unit.shard * sampler.period if sampler.mode == "per_rank" else 0  # there every shard has a stream of its own
        keys = tuple(
            SampleKey(int(index), epoch, position + apart, size)
            for index, (epoch, position) in zip(sampler.batch(step), places, strict=True)
        )
        passes = step * sampler.world * task.batch_size // len(task.source)
        return UnitKey(unit, step, passes, size, keys)

    def _size(self, task: TaskData, number: int, step: int) -> tuple[int, int]:
        """(H, W) px of a task's batches in an iteration, equal for all its shards."""
        draw = np.random.default_rng(np.random.SeedSequence([self.seed, number, step, len(task.sizes)]))
        return tuple(task.sizes[int(draw.integers(len(task.sizes)))])


def _no_size(step: int) -> None:
    """A size of the whole iteration: there is none."""


# -- evaluation ---------------------------------------------------------------------------------------------------------------


class _EvalBatches(Dataset):
    def __init__(self, source: Any, transform: Callable, groups: Sequence[Sequence[int]]) -> None:
        self.source, self.transform, self.groups = source, transform, groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> LabelledBatch:
        indices = self.groups[number]
        loaded = [self.source.load(i) for i in indices]
        samples = [Pair(*map(self.transform, s)) if isinstance(s, Pair) else self.transform(s) for s in loaded]
        return labelled_batch(self.source, samples, indices)


class LabelledEvalLoader:
    """Each image (or pair) of this rank's share of ``source`` once, in order."""

    def __init__(
        self, source: Any, transform: Callable, batch_size: int, workers: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self.source, self.workers = source, workers
        mine = range(rank, len(source), world)
        groups = [list(mine[i : i + batch_size]) for i in range(0, len(mine), batch_size)]
        self._batches = _EvalBatches(source, transform, groups)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[LabelledBatch]:
        workers = min(self.workers, len(self))
        # Forked on Linux, like training's: other ways would have to pickle what an exp file defines.
        start = "fork" if workers and sys.platform == "linux" else None
        options = {"num_workers": workers, "multiprocessing_context": start, "generator": torch.Generator()}
        return iter(DataLoader(self._batches, batch_size=None, **options))
