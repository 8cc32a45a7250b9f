"""Which videos an epoch draws its pairs from, and the loader of pairs. Everything is a function of (seeds, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmdet.data.loader import TrainDataset, TrainLoader
from mmdet.families.siamese.structures import collate_pairs
from mmdet.families.siamese.videos import Video, VideoSource

_CLEAR = 5  # visible eighths of the target that a template should show


class PairFrames(NamedTuple):
    """Where a pair comes from."""

    video: int  # in the PairSource
    template: int  # frame
    search: int  # frame


class PairSource:
    """The usable videos of several data sets under one numbering; its length is the number of pairs in an epoch."""

    def __init__(self, sources: Sequence[VideoSource]) -> None:
        self.sources = list(sources)
        self._of = np.concatenate([np.zeros(0, np.int64), *(np.full(len(s.train_videos), i) for i, s in enumerate(sources))])
        self._video = np.concatenate([np.zeros(0, np.int64), *(s.train_videos for s in sources)])

    def __len__(self) -> int:
        return sum(source.quota for source in self.sources)

    @property
    def num_videos(self) -> int:
        return len(self._of)

    def members(self, number: int) -> np.ndarray:
        """(n,) int64, the videos of data set ``number``."""
        return np.flatnonzero(self._of == number)

    def video(self, index: int) -> tuple[VideoSource, Video]:
        source = self.sources[int(self._of[index])]
        return source, source.video(int(self._video[index]))

    def path(self, index: int) -> Path:
        """The folder of a video, for messages."""
        source, video = self.video(index)
        return source.path(video.index, 0).parent

    def name(self, frames: PairFrames) -> str:
        """A pair in words: ``video:template>search``, in the data set's frame numbers."""
        _, video = self.video(frames.video)
        return f"{video.name}:{video.numbers[frames.template]}>{video.numbers[frames.search]}"

    def draw_frames(self, rng: np.random.Generator, index: int) -> PairFrames:
        """Template and search frame of a video, as its data set's options say; both may be the same one. Templates come from the
        frames that show most of the target, where there are any."""
        source, video = self.video(index)
        options, usable = source.options, np.flatnonzero(video.usable)
        clear = usable[video.cover[usable] >= _CLEAR]
        templates = clear if len(clear) else usable
        at_start = options.template == "init" or (options.template == "mix" and rng.random() >= options.mix_prob)
        template = templates[0] if at_start else templates[rng.integers(len(templates))]
        if options.frame_range:
            distance = np.abs(video.numbers[usable] - video.numbers[template])
            usable = usable[distance <= options.frame_range]
        return PairFrames(index, int(template), int(usable[rng.integers(len(usable))]))

    def draw_other(self, rng: np.random.Generator, index: int) -> tuple[int, int] | None:
        """(video, frame) of another video of any data set, uniformly; None if there is only one."""
        if self.num_videos < 2:
            return None
        other = int(rng.integers(self.num_videos - 1))
        other += other >= index
        usable = np.flatnonzero(self.video(other)[1].usable)
        return other, int(usable[rng.integers(len(usable))])


class EpochPairSampler:
    """The videos of an epoch, drawn when the epoch is reached: from each data set exactly its quota, without replacement as far
    as it has videos, then again; all shuffled together. A ``BatchPlan`` of the loader."""

    def __init__(self, source: PairSource, seed: int, data_seed: int = 0, size: tuple[int, int] = (0, 0)) -> None:
        self.source, self.seed, self.data_seed, self._size = source, seed, data_seed, size

    def order(self, epoch: int, total: int) -> np.ndarray:
        """(total,) int64 videos: first the pairs of the epoch, then further draws in the same way, which fill its last batch."""
        if not len(self.source):
            raise ValueError("no pairs: no data set has a usable video")
        draws, left = [np.zeros(0, np.int64)], total
        while left > 0:
            draws.append(self._draw(epoch, len(draws))[:left])
            left -= len(draws[-1])
        return np.concatenate(draws)

    def _draw(self, epoch: int, turn: int) -> np.ndarray:
        """(pairs per epoch,) int64."""
        # The spawn key parts this stream from those of the samples, [seed, data_seed, epoch, position].
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, self.data_seed, epoch], spawn_key=(turn,)))
        drawn = []
        for number, source in enumerate(self.source.sources):
            videos = self.source.members(number)
            rounds = -(-source.quota // len(videos)) if source.quota else 0
            permutations = [rng.permutation(videos) for _ in range(rounds)]
            drawn += [np.concatenate(permutations)[: source.quota]] if rounds else []
        return rng.permutation(np.concatenate(drawn))

    def size(self, epoch: int, first: int, indices: np.ndarray) -> tuple[int, int]:
        """The search crop's (H, W) px: always the same."""
        return self._size


def pair_loader(
    source: PairSource,
    pipeline: Callable,
    batch_size: int,
    workers: int,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    data_seed: int = 0,
) -> TrainLoader:
    """Endless ``PairBatch``es of ``batch_size`` / ``world`` pairs for one rank, equal for any number of workers and after any
    resume. ``pipeline``: a :class:`~mmdet.families.siamese.pairs.PairPipeline`."""
    side = pipeline.settings.search_size
    plan = EpochPairSampler(source, seed, data_seed, (side, side))
    data = TrainDataset(source, pipeline, seed, data_seed)
    return TrainLoader(data, batch_size, plan.size, workers, rank, world, seed, data_seed, collate=collate_pairs, plan=plan)
