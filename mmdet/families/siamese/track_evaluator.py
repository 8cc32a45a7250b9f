"""Judging a tracker on the videos of a data set: one pass over each, started on its first frame."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import nn

from mmdet.core.failure import gather_from_ranks
from mmdet.evaluators.evaluator import Evaluation, evaluation_mode
from mmdet.families.siamese.track_metrics import (
    PRECISION_AT,
    RELATIVE_AT,
    Curves,
    ResetRun,
    accuracy_robustness,
    average_overlap,
    got10k_overlaps,
    one_pass,
    run_with_resets,
)
from mmdet.families.siamese.track_results import Track, save_got10k, save_otb
from mmdet.families.siamese.tracker import Tracker, TrackerSettings, TrackerState
from mmdet.families.siamese.videos import Video, VideoSource

METRICS = ("AUC", "P20", "NP20", "AO", "SR50", "SR75")
_PICTURES = 8
_LISTED = 20  # videos that the table spells out


class TrackEvaluator:
    """One-pass evaluation: AUC, P20 and NP20 as OTB counts them, AO, SR50 and SR75 as GOT-10k does.

    Videos are shared among ``world`` ranks by their numbers of frames. ``limit`` videos, evenly over the data set; 0: all.
    ``resets`` runs VOT's experiment as well: ``accuracy``, ``failures`` and ``failures_per_100`` (frames).
    After ``evaluate``, ``tracks`` holds every video's track by its name, on every rank.
    """

    def __init__(
        self,
        source: VideoSource,
        settings: TrackerSettings | None = None,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        amp: str = "off",
        limit: int = 0,
        resets: bool = False,
    ) -> None:
        self.source, self.settings, self.rank, self.world = source, settings or TrackerSettings(), rank, world
        self.device, self.amp, self.resets = torch.device(device), amp, resets
        startable = [i for i in range(len(source)) if start_frame(source.video(i)) is not None]
        count = min(limit, len(startable)) if limit else len(startable)
        self.videos = [startable[n * len(startable) // count] for n in range(count)]
        self.tracks: dict[str, Track] = {}

    def subject(self) -> dict[str, Any]:
        """What is judged, for the records."""
        frames = sum(len(self.source.video(i)) for i in self.videos)
        return {"annotations": str(self.source.where), "videos": len(self.videos), "frames": frames}

    def save_tracks(self, folder: str | Path, tracker: str) -> None:
        """The boxes of the last run under ``folder``: ``got10k/<tracker>/...`` and ``otb/<tracker>/...``."""
        save_got10k(self.tracks, Path(folder) / "got10k", tracker)
        save_otb(self.tracks, Path(folder) / "otb", tracker)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Tracks with ``model``, in float32 unless ``amp`` says otherwise; its modes are restored. Every rank calls it."""
        shares = gather_from_ranks(lambda: self._track_share(model))
        found = {index: track for share in shares for index, (track, _) in share.items()}
        self.tracks = {self.source.names[i]: found[i] for i in self.videos}
        seconds = sum(float(track.seconds.sum()) for track in found.values())
        frames = sum(int((track.seconds > 0).sum()) for track in found.values())
        logger.info(f"{len(found)} videos tracked, {frames / max(seconds, 1e-9):.0f} frames/s and process without reading")
        evaluation = self._judged(found)
        if self.resets:
            runs = {index: run for share in shares for index, (_, run) in share.items()}
            evaluation.metrics.update(accuracy_robustness([runs[i] for i in self.videos]))
        return evaluation

    def _track_share(self, model: nn.Module) -> dict[int, tuple[Track, ResetRun | None]]:
        mine = share_of(self.videos, [len(self.source.video(i)) for i in self.videos], self.rank, self.world)
        with evaluation_mode(model, self.device, self.amp):
            tracker = Tracker(model, self.settings, self.device, inference_mode=False)
            return {
                index: (
                    track_video(tracker, self.source, index),
                    reset_video(tracker, self.source, index) if self.resets else None,
                )
                for index in mine
            }

    def _judged(self, found: dict[int, Track]) -> Evaluation:
        curves, pooled, rows = [], [], {}
        for index in self.videos:
            video, track = self.source.video(index), found[index]
            curve, overlap = judge_track(video, track)
            curves.append(curve)
            pooled.append(overlap)
            rows[video.name] = {**_of_curves([curve]), **average_overlap(overlap)}
        metrics = {**_of_curves(curves), **average_overlap(np.concatenate([np.zeros(0), *pooled]))}
        samples = self._samples(found) if self.rank == 0 else []
        return Evaluation(metrics, rows, samples)

    def _samples(self, found: dict[int, Track]) -> list[dict[str, Any]]:
        """The last frames of some videos."""
        chosen = self.videos[:: max(len(self.videos) // _PICTURES, 1)][:_PICTURES]
        samples = []
        for index in chosen:
            video = self.source.video(index)
            frame = int(np.flatnonzero(~video.missing)[-1])
            picture = {"image": self.source.load(index, frame), "truth": video.boxes[frame], "found": found[index].boxes[frame]}
            samples.append({**picture, "title": f"{video.name} frame {frame}"})
        return samples


def start_frame(video: Video) -> int | None:
    """The first frame with a file and a target of some area, on which a tracker is started; None if there is none."""
    with np.errstate(invalid="ignore"):
        startable = video.present & ~video.missing & ((video.boxes[:, 2:] - video.boxes[:, :2]) > 0).all(1)
    return int(np.argmax(startable)) if startable.any() else None


def share_of(items: Sequence[int], lengths: Sequence[int], rank: int, world: int) -> list[int]:
    """The items of one rank: the longest first, always to the rank that has least so far."""
    loads, shares = [0] * world, [[] for _ in range(world)]
    for place in sorted(range(len(items)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        loads[least] += lengths[place]
        shares[least].append(items[place])
    return sorted(shares[rank])


def track_video(tracker: Tracker, source: VideoSource, index: int) -> Track:
    """One pass over a video. Frames without a file repeat the box before them.

    Raises:
        DataError: a file that exists cannot be read.
    """
    video = source.video(index)
    first = start_frame(video)
    boxes, scores, seconds = np.full((len(video), 4), np.nan), np.zeros(len(video)), np.zeros(len(video))
    state, size = None, (0, 0)
    for frame in range(first, len(video)):
        if not video.missing[frame]:
            image = source.load(index, frame)
            begin = time.perf_counter()
            if state is None:
                state, size = tracker.start(image, video.boxes[frame]), image.shape[1::-1]
            else:
                state = tracker.follow(state, image)
            seconds[frame] = time.perf_counter() - begin
        boxes[frame], scores[frame] = state.box, state.score
    boxes[first] = video.boxes[first]
    return Track(boxes, scores, seconds, size)


def reset_video(tracker: Tracker, source: VideoSource, index: int) -> ResetRun:
    """VOT's experiment on the frames of a video that have a file and a target in view."""
    video = source.video(index)
    frames = np.flatnonzero(video.usable)

    def follow(state: TrackerState, place: int) -> tuple[TrackerState, np.ndarray]:
        state = tracker.follow(state, source.load(index, int(frames[place])))
        return state, state.box

    def start(place: int) -> TrackerState:
        return tracker.start(source.load(index, int(frames[place])), video.boxes[frames[place]])

    return run_with_resets(start, follow, video.boxes[frames])


def judge_track(video: Video, track: Track) -> tuple[Curves, np.ndarray]:
    """OTB's curves and GOT-10k's overlaps (n,) of one video; frames before the start or without a file do not count."""
    tracked = np.isfinite(track.boxes).all(1) & ~video.missing
    counted = tracked & video.present & (video.cover > 0)
    begin = int(np.argmax(tracked))
    overlap = got10k_overlaps(track.boxes[begin:], video.boxes[begin:], counted[begin:], track.size)
    return one_pass(track.boxes, video.boxes, video.present & tracked), overlap


def _of_curves(curves: Sequence[Curves]) -> dict[str, float]:
    """AUC, P20 and NP20: the mean over videos."""
    values = np.array([[c.auc, c.precision[PRECISION_AT], c.normalized[RELATIVE_AT]] for c in curves]).reshape(-1, 3)
    values = values[np.isfinite(values).all(1)]
    means = values.mean(0) if len(values) else np.full(3, np.nan)
    return dict(zip(METRICS[:3], means.tolist(), strict=True))


def table(evaluation: Evaluation) -> str:
    """Videos, the worst first, and the data set's values as lines of text."""
    rows = sorted(evaluation.per_class.items(), key=lambda item: (item[1]["AUC"], item[0]))
    shown = rows[:_LISTED]
    width = max([len("all videos"), *(len(name) for name, _ in shown)])
    lines = [f"{'video':<{width}}" + "".join(f"{name:>8}" for name in METRICS)]
    lines += [_line(name, row, width) for name, row in shown]
    if len(rows) > len(shown):
        lines.append(f"... {len(rows) - len(shown)} better ones")
    lines.append(_line("all videos", evaluation.metrics, width))
    further = [f"{name} {value:.4f}" for name, value in evaluation.metrics.items() if name not in METRICS]
    return "\n".join([*lines, *([", ".join(further)] if further else [])])


def _line(name: str, row: dict[str, float], width: int) -> str:
    return f"{name:<{width}}" + "".join(f"{row[metric]:>8.4f}" for metric in METRICS)
