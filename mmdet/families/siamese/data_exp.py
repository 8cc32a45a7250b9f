"""The data side of a tracker's experiment: where videos come from, how pairs are drawn, and what judges a tracker.

The family's exp inherits from :class:`TrackDataExp` and adds the network, its criterion and its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loguru import logger

from mmdet.data.errors import DataError
from mmdet.data.loader import TrainLoader
from mmdet.exp.base import Exp
from mmdet.families.siamese.augment import SearchAugment
from mmdet.families.siamese.crop import CropDraw
from mmdet.families.siamese.pairs import PairPipeline, PairSettings
from mmdet.families.siamese.pictures import draw_pairs, draw_tracks
from mmdet.families.siamese.readers import VideoSource, find_layout, open_source
from mmdet.families.siamese.sampler import PairSource, pair_loader
from mmdet.families.siamese.shapes import make_shapes
from mmdet.families.siamese.track_evaluator import METRICS, TrackEvaluator, table
from mmdet.families.siamese.tracker import Tracker, TrackerSettings

DEMO = "demo"
DEMO_TRAIN, DEMO_VAL = (80, 30), (10, 80)  # videos, frames of each


class TrackDataExp(Exp):
    """Pairs for training and videos for judging, from a folder in the layout of GOT-10k, OTB or pysot's crops."""

    best_metric = "AUC"
    data_dir: str = "data/got10k"  # folder of videos (GOT-10k, OTB, or crop511 with train.json and val.json); "demo": generated
    exemplar_size: int = 128  # px of the square template crop
    search_size: int = 256  # px of the square search crop
    context: float = 0.5  # part of (width + height) that is added to both sides of a target before its crop is cut
    pairs_per_epoch: int = 0  # pairs drawn in an epoch; 0: one for each video
    frame_range: int = 0  # most frames between template and search; 0: the whole video
    template_frame: Literal["init", "all", "mix"] = "all"  # where the template is cut: first frame, any, or mix_prob of any
    mix_prob: float = 0.8  # with template_frame="mix": probability of any frame instead of the first
    negatives: tuple[float, float, float, float] = (0.04, 0.14, 0.06, 0.06)  # other video, moved window, covered twice: see pairs
    pastes: tuple[float, float] = (0.12, 0.12)  # positives whose target is pasted on another image, or elsewhere on its own
    distractor_prob: float = 0.32  # positives beside whose target one or two others are pasted
    geometric: tuple[float, float] = (0.03, 0.10)  # search crops of positives: flipped, rotated
    blurring: tuple[float, float, float, float] = (0.05, 0.10, 0.13, 0.12)  # blurred, motion, erased, low resolution
    color_prob: float = 0.15  # brightness and contrast changed
    wide_scale_epoch: int = 5  # from this epoch on a part of the search crops is scaled by 0.70 to 1.40
    eval_videos: int = 0  # videos that judge the tracker, evenly over the split; 0: all
    eval_resets: bool = False  # VOT's experiment as well: accuracy and failures of runs that start again where the target is lost
    window_influence: float = 0.46  # tracker: weight of the window over the score
    penalty_k: float = 0.16  # tracker: how strongly a change of size or shape is punished
    size_lr: float = 0.30  # tracker: how fast the size follows

    def validate(self) -> None:
        super().validate()
        for name in ("exemplar_size", "search_size"):
            self._expect(name, getattr(self, name) >= 32, "at least 32 px")
        self._expect("search_size", self.search_size > self.exemplar_size, f"more than exemplar_size={self.exemplar_size}")
        for name in ("pairs_per_epoch", "frame_range", "wide_scale_epoch", "eval_videos", "context"):
            self._expect(name, getattr(self, name) >= 0, "0 or more")
        for name in ("negatives", "pastes", "geometric", "blurring"):
            values = getattr(self, name)
            self._expect(name, min(values) >= 0 and sum(values) <= 1, "probabilities, 1 at most in sum")
        for name in ("mix_prob", "distractor_prob", "color_prob", "window_influence", "size_lr"):
            self._expect(name, 0 <= getattr(self, name) <= 1, "0 to 1")

    def metric_names(self) -> Sequence[str]:
        return METRICS

    # -- sources --------------------------------------------------------------------------------------------------------

    def train_sources(self) -> Sequence[VideoSource]:
        """The data sets that training pairs come from; an exp file may list several, each with its own quota."""
        options = {"pairs_per_epoch": self.pairs_per_epoch, "frame_range": self.frame_range}
        return [self._open("train", **options, template=self.template_frame, mix_prob=self.mix_prob)]

    def eval_source(self, split: str) -> VideoSource:
        """The videos of a split that judge a tracker."""
        return self._open(split)

    def sources(self, split: str) -> list[VideoSource]:
        """The data sets of a split; read once."""
        cache = self.__dict__.setdefault("_sources", {})
        key = (self.data_dir, split)
        if key not in cache:
            cache[key] = list(self.train_sources()) if split == "train" else [self.eval_source(split)]
        return cache[key]

    def _open(self, split: str, **options: Any) -> VideoSource:
        return open_source(self._data_root(), split, **options)

    def _data_root(self) -> Path:
        if self.data_dir == DEMO:
            return make_shapes(Path(self.output_dir) / "demo_videos", DEMO_TRAIN, DEMO_VAL)
        root = Path(self.data_dir)
        if not self.data_dir or not root.is_dir():
            fault = "is a file" if root.is_file() else "does not exist"
            raise DataError(
                f"data directory {self.data_dir!r} (set by {self.origin('data_dir')}) {fault}: give the folder that holds the "
                "videos with --data DIR, or try --data demo"
            )
        return root

    def check_sources(self) -> None:
        super().check_sources()
        if self.data_dir != DEMO and not self._lists_own_sources():
            for split in ("train", "val"):
                find_layout(self._data_root(), split)

    def _lists_own_sources(self) -> bool:
        """Whether the exp file names its data sets itself, so that ``data_dir`` says nothing."""
        return type(self).train_sources is not TrackDataExp.train_sources

    def prepare(self) -> None:
        """Reads the annotations of both splits and says what there is."""
        if self.data_dir != DEMO and not self._lists_own_sources():
            self.set("data_dir", str(self._data_root().resolve()), self.origin("data_dir"))
        for split in ("train", "val"):
            for source in self.sources(split):
                logger.info(source.report(with_pairs=split == "train"))
        if not sum(source.quota for source in self.sources("train")):
            raise DataError(f"{self.sources('train')[0].where}: there is no frame with a target to train on")

    def data_facts(self) -> dict[str, str]:
        return {split: " + ".join(s.fingerprint() for s in self.sources(split)) for split in ("train", "val")}

    # -- builders -------------------------------------------------------------------------------------------------------

    def pair_settings(self) -> PairSettings:
        """How training pairs are made."""
        return PairSettings(
            exemplar_size=self.exemplar_size,
            search_size=self.search_size,
            context=self.context,
            negatives=self.negatives,
            pastes=self.pastes,
            distractor_prob=self.distractor_prob,
            search=CropDraw.for_search(self.wide_scale_epoch),
            augment=SearchAugment(*self.geometric, *self.blurring, self.color_prob),
        )

    def get_train_loader(self, workers: int = 2, rank: int = 0, world: int = 1, data_seed: int = 0) -> TrainLoader:
        """Batches (PairBatch) of ``batch_size`` / world pairs per rank."""
        source = PairSource(self.sources("train"))
        pipeline = PairPipeline(self.pair_settings())
        return pair_loader(source, pipeline, self.batch_size, workers, rank, world, self.seed, data_seed)

    def tracker_settings(self) -> TrackerSettings:
        return TrackerSettings(self.context, self.window_influence, self.penalty_k, self.size_lr)

    def get_tracker(self, model: torch.nn.Module, device: torch.device | str = "cpu") -> Tracker:
        """A model, in eval mode on ``device``, that follows one target through a video."""
        return Tracker(model, self.tracker_settings(), device)

    def get_evaluator(
        self,
        split: str = "val",
        batch_size: int = 1,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        amp: str = "off",
    ) -> TrackEvaluator | None:
        """One-pass evaluation of a split, or None (said in the log) when it has no video. A tracker goes frame by frame: batch
        size and workers do not apply."""
        source = self.sources(split)[0]
        if not len(source):
            logger.warning(f"{source.where} has no video with a target: evaluation is skipped")
            return None
        return TrackEvaluator(source, self.tracker_settings(), rank, world, device, amp, self.eval_videos, self.eval_resets)

    def judged(self, evaluator: TrackEvaluator) -> tuple[str, dict[str, Any]]:
        return evaluator.source.report(with_pairs=False), evaluator.subject()

    def evaluation_lines(self, evaluation: Any) -> list[str]:
        return [f"\n{table(evaluation)}"]

    def training_pictures(self, batch: Any) -> list[np.ndarray]:
        return draw_pairs(batch)

    def evaluation_pictures(self, evaluation: Any) -> list[np.ndarray]:
        return draw_tracks(evaluation.samples)
