"""Which samples an iteration of one shard takes: a pure function of seeds, shard and iteration, so that resuming is skipping.

N samples in the data set, B per shard and iteration, S shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mmdet.data.loader import epoch_order
from mmdet.errors import UsageError

MODES = ("epoch_shuffle", "global_shuffle", "per_rank", "class_uniform", "class_balanced", "class_chunks")
_NEEDS_CLASSES = ("class_uniform", "class_balanced", "class_chunks")
# Streams of draws that must not coincide, as spawn keys.
_GLOBAL, _UNIFORM, _TOP_UP, _CHUNKS = range(1000, 1004)


class GivenIterationSampler:
    """Sample indices for ``total_iters`` iterations of one shard.

    Modes:
        epoch_shuffle: the data set in a new random order per pass, dealt out over the shards: each sample once per pass.
        global_shuffle: every sample as often as needed (counts differ by one at most), all shuffled once; a shard takes its
            contiguous part.
        per_rank: every shard walks the whole data set in an order of its own.
        class_uniform: a class at random, then one of its samples, independently.
        class_balanced: classes below the mean count are topped up to it by repetition; then as epoch_shuffle.
        class_chunks: every class is filled up to a multiple of ``images_per_class`` and cut into chunks of that many samples,
            which are shuffled; then dealt out as they come.

    Iterating gives B indices after B indices from ``start_iter`` on; :meth:`batch` gives those of one iteration.

    Args:
        num_samples: N.
        total_iters: iterations of the whole run.
        batch_size: B.
        world: S.
        rank: the shard, in [0, S).
        seed: of everything random; sequences of integers are taken too.
        start_iter: iterations done already.
        labels: (N,) class of each sample, for the class modes.

    Raises:
        UsageError: no samples, an unknown mode, or a class mode without labels.
    """

    def __init__(
        self,
        num_samples: int,
        total_iters: int,
        batch_size: int,
        world: int = 1,
        rank: int = 0,
        seed: int | Sequence[int] = 0,
        start_iter: int = 0,
        mode: str = "epoch_shuffle",
        labels: Sequence[int] | None = None,
        images_per_class: int = 4,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"sampling mode {mode!r}: expected one of {', '.join(MODES)}")
        if num_samples < 1:
            raise UsageError("a sampler needs at least one sample")
        if mode in _NEEDS_CLASSES and labels is None:
            raise UsageError(f"sampling mode {mode!r} needs one class per sample, which this kind of data does not have")
        if not 0 <= rank < world:
            raise ValueError(f"shard {rank} of {world}")
        self.num_samples, self.total_iters, self.batch_size = num_samples, total_iters, batch_size
        self.world, self.rank, self.mode, self.start_iter = world, rank, mode, start_iter
        self.seed = [seed] if isinstance(seed, int) else list(seed)
        self._classes = None if labels is None else _by_class(np.asarray(labels))
        self._per_class = images_per_class
        self._orders: dict[int, np.ndarray] = {}
        self.period = self._period()  # samples in one pass over the data, as this mode counts them

    def __len__(self) -> int:
        return (self.total_iters - self.start_iter) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        for iteration in range(self.start_iter, self.total_iters):
            yield from self.batch(iteration).tolist()

    def batch(self, iteration: int) -> np.ndarray:
        """(B,) int64 indices of one iteration."""
        if self.mode == "class_uniform":
            return self._uniform(iteration)
        return self._at(self.first_position(iteration), self.batch_size)

    def first_position(self, iteration: int) -> int:
        """Place of an iteration's first sample in the stream that the mode deals out."""
        if self.mode == "global_shuffle":
            return (self.rank * self.total_iters + iteration) * self.batch_size
        if self.mode == "per_rank":
            return iteration * self.batch_size
        return (iteration * self.world + self.rank) * self.batch_size

    def _period(self) -> int:
        if self.mode == "global_shuffle":
            return self.total_iters * self.batch_size * self.world
        if self.mode == "class_balanced":
            mean = -(-self.num_samples // len(self._classes))
            return sum(max(len(c), mean) for c in self._classes)
        if self.mode == "class_chunks":
            return sum(-(-len(c) // self._per_class) * self._per_class for c in self._classes)
        return self.num_samples

    def _at(self, first: int, count: int) -> np.ndarray:
        """``count`` entries of the stream from ``first`` on: pass after pass."""
        parts, left = [], count
        while left > 0:
            number, inside = divmod(first, self.period)
            part = self._order(number)[inside : inside + left]
            parts.append(part)
            first, left = first + len(part), left - len(part)
        return np.concatenate(parts)

    def _order(self, number: int) -> np.ndarray:
        """The order of pass ``number``; the two last ones are kept."""
        if number not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k == number - 1}
            self._orders[number] = self._make_order(number)
        return self._orders[number]

    def _make_order(self, number: int) -> np.ndarray:
        if self.mode == "global_shuffle":
            draw = self._draw(_GLOBAL)
            repeated = np.tile(np.arange(self.num_samples), -(-self.period // self.num_samples))[: self.period]
            if self.period < self.num_samples:  # a part of the data is enough: any part, not the first one
                return draw.permutation(self.num_samples)[: self.period]
            return draw.permutation(repeated)
        if self.mode == "class_balanced":
            mean = -(-self.num_samples // len(self._classes))
            draw = self._draw(_TOP_UP, number)
            return draw.permutation(np.concatenate([_filled(draw, c, max(len(c), mean)) for c in self._classes]))
        if self.mode == "class_chunks":
            draw, size = self._draw(_CHUNKS, number), self._per_class
            full = [_filled(draw, draw.permutation(c), -(-len(c) // size) * size) for c in self._classes]
            chunks = np.concatenate(full).reshape(-1, size)
            return chunks[draw.permutation(len(chunks))].reshape(-1)
        seed = self.seed + ([self.rank] if self.mode == "per_rank" else [])
        return epoch_order(self.num_samples, number, _one_seed(seed), 0, self.num_samples)

    def _uniform(self, iteration: int) -> np.ndarray:
        draw = self._draw(_UNIFORM, self.rank, iteration)
        chosen = draw.integers(len(self._classes), size=self.batch_size)
        return np.array([self._classes[c][draw.integers(len(self._classes[c]))] for c in chosen], np.int64)

    def _draw(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))


def _by_class(labels: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


def _filled(draw: np.random.Generator, samples: np.ndarray, count: int) -> np.ndarray:
    """``samples`` followed by as many of them again, drawn at random, as ``count`` asks for."""
    return np.concatenate([samples, draw.choice(samples, count - len(samples))]) if count > len(samples) else samples


def _one_seed(values: Sequence[int]) -> int:
    """One number of several seeds; a single one stays as it is."""
    return values[0] if len(values) == 1 else int(np.random.SeedSequence(list(values)).generate_state(1)[0])
