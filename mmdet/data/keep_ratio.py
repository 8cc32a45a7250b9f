"""Images scaled with their aspect ratio kept: to a short side, as far as the long one allows, then padded by the batch.

Which short side a sample gets, which samples share a batch, and how large its tensor is, follow from the annotation index, the
seeds, the epoch and the position in it alone. N training images, B the total batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from mmdet.data.loader import epoch_order
from mmdet.data.structures import Sample, SampleKey
from mmdet.data.transforms import Window, move_sample, resample, window_transform


def scaled_size(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """(H, W) px of an image whose short side becomes ``short``, or whose long side ``long`` if that is reached first; rounded
    half-even, at least 1."""
    scale = min(short / min(height, width), long / max(height, width))
    return max(round(height * scale), 1), max(round(width * scale), 1)


def fitted_into(size: tuple[int, int], frame: tuple[int, int]) -> tuple[int, int]:
    """``size`` (H, W), reduced with its aspect ratio kept where it is larger than ``frame`` (H, W)."""
    scale = min(frame[0] / size[0], frame[1] / size[1], 1.0)
    return size if scale == 1.0 else (max(int(size[0] * scale), 1), max(int(size[1] * scale), 1))


def padded(size: tuple[int, int], divisor: int) -> tuple[int, int]:
    """``size`` (H, W) rounded up to multiples of ``divisor``."""
    return -(-size[0] // divisor) * divisor, -(-size[1] // divisor) * divisor


def _resized(sample: Sample, size: tuple[int, int], interpolation: int, flip: bool) -> Sample:
    height, width = sample.image.shape[:2]
    window = Window(0, 0, width, height)
    image = resample(sample.image, window, size, interpolation, flip, 0)
    return move_sample(sample, image, window_transform(window, size, flip), np.ones(len(sample.boxes), bool), 0.0)


class KeepRatioTransform:
    """The evaluation transform: ``Sample -> Sample``, its image scaled and not padded."""

    def __init__(self, short: int, long: int, divisor: int, interpolation: int = cv2.INTER_LINEAR) -> None:
        self.short, self.long, self.divisor, self.interpolation = short, long, divisor, interpolation

    def __call__(self, sample: Sample) -> Sample:
        size = scaled_size(*sample.image.shape[:2], self.short, self.long)
        return _resized(sample, size, self.interpolation, False)

    def frames(self, sizes: np.ndarray) -> np.ndarray:
        """(N, 2) int64 (H, W) px of the padded images, from the sizes (N, 2) of their files."""
        rows = [padded(scaled_size(int(h), int(w), self.short, self.long), self.divisor) for h, w in sizes]
        return np.array(rows, np.int64).reshape(-1, 2)


class KeepRatioPlan:
    """How the images of a training set are scaled and put together.

    Each sample draws its short side from ``shorts``. Batches hold images of one orientation (width >= height, or not), so that
    little of their tensor is padding. Where the numbers do not come out even, the last batch of an epoch mixes both; its tensor
    is no larger in area than that of the largest other batch can be, and its images are reduced to fit.
    """

    def __init__(
        self, sizes: np.ndarray, shorts: Sequence[int], long: int, divisor: int, batch_size: int, seed: int, data_seed: int = 0
    ) -> None:
        """Args:
        sizes: (N, 2) (H, W) px of the image files.
        shorts: px, one is drawn for each sample.
        long: px, the most that the long side becomes.
        divisor: px, the sides of batch tensors are multiples of it.
        batch_size: B, over all ranks.
        seed, data_seed: as the loader's.
        """
        self.sizes, self.shorts, self.long, self.divisor = np.asarray(sizes), tuple(shorts), long, divisor
        self.batch_size, self.seed, self.data_seed = batch_size, seed, data_seed
        self.wide = self.sizes[:, 1] >= self.sizes[:, 0]

    def scaled(self, index: int, epoch: int, position: int) -> tuple[int, int]:
        """(H, W) px that a sample's image is scaled to."""
        # The spawn key parts this stream from that of the sample's own generator.
        draw = np.random.SeedSequence([self.seed, self.data_seed, epoch, position], spawn_key=(0,)).generate_state(1)[0]
        height, width = self.sizes[index].tolist()
        return scaled_size(height, width, self.shorts[int(draw) % len(self.shorts)], self.long)

    def size(self, epoch: int, first: int, indices: np.ndarray) -> tuple[int, int]:
        """(H, W) px of the batch tensor, see ``BatchPlan``."""
        scaled = [self.scaled(int(index), epoch, first + i) for i, index in enumerate(indices)]
        frame = padded((max(h for h, _ in scaled), max(w for _, w in scaled)), self.divisor)
        if len(set(self.wide[indices].tolist())) == 1:
            return frame
        largest = padded((max(self.shorts), self.long), self.divisor)
        side = math.isqrt(largest[0] * largest[1]) // self.divisor * self.divisor
        return min(frame[0], side), min(frame[1], side)

    def order(self, epoch: int, total: int) -> np.ndarray:
        """(total,) int64 indices, see ``BatchPlan``; ``total`` is a multiple of B."""
        entries = self._entries(epoch, total)
        batches, rest = [], []
        for wide in (True, False):
            places = np.flatnonzero(self.wide[entries] == wide)
            full = len(places) // self.batch_size * self.batch_size
            batches += list(places[:full].reshape(-1, self.batch_size))
            rest.append(places[full:])
        # A batch comes where its last sample stood, so that the orientations alternate at random; the mixed one is the last.
        batches.sort(key=lambda places: places[-1])
        return entries[np.concatenate([*batches, *rest]).astype(np.int64)]

    def _entries(self, epoch: int, total: int) -> np.ndarray:
        """(total,) indices in random order: every sample once, then further ones; of the orientations that complete the last
        batches, if that takes as many and repeats no image twice."""
        count, num_wide = len(self.wide), int(self.wide.sum())
        present = {True: num_wide, False: count - num_wide}
        missing = {wide: -number % self.batch_size for wide, number in present.items()}
        if sum(missing.values()) != total - count or any(missing[wide] > present[wide] for wide in present):
            return epoch_order(count, epoch, self.seed, self.data_seed, total)
        stream = epoch_order(count, epoch, self.seed, self.data_seed, 2 * count)
        further = stream[count:]
        chosen = [further[self.wide[further] == wide][:number] for wide, number in missing.items()]
        return np.concatenate([stream[:count], *chosen])


class KeepRatioTrainPipeline:
    """Scaling and mirroring: ``(source, key, rng) -> Sample``, its image as large as the plan says and not padded."""

    def __init__(self, plan: KeepRatioPlan, flip_prob: float = 0.5, interpolation: int = cv2.INTER_LINEAR) -> None:
        self.plan, self.flip_prob, self.interpolation = plan, flip_prob, interpolation

    def __call__(self, source, key: SampleKey, rng: np.random.Generator) -> Sample:
        """The sample at ``key``, its image no larger than ``key.size`` (H, W); ``source.load(index)`` decodes."""
        size = fitted_into(self.plan.scaled(key.index, key.epoch, key.position), key.size)
        return _resized(source.load(key.index), size, self.interpolation, bool(rng.random() < self.flip_prob))
