"""How well a tracker followed: OTB's one-pass curves, GOT-10k's overlap and VOT's run with resets.

F frames; boxes (F, 4) xyxy, px of the frame. All values in [0, 1], NaN where there is nothing to judge.
Sources: Wu et al. 2015 (OTB-100), Mueller et al. 2018 (TrackingNet, normalised precision), Huang et al. 2019 (GOT-10k),
Kristan et al. 2016 (VOT); details of the toolkits in design/siamese.md, B14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

OVERLAPS = np.arange(21) / 20  # thresholds of the success curve
DISTANCES = np.arange(51.0)  # px, of the precision curve
RELATIVE_DISTANCES = np.arange(51) / 100  # of the normalised precision curve
PRECISION_AT, RELATIVE_AT = 20, 20  # places of 20 px and 0.20 in them
RESET_GAP, BURN_IN = 5, 10  # VOT: frames from a failure to the new start; frames after a start that do not count in the accuracy


def overlaps(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(F,) float64 IoU of each pair of boxes; 0 where one has no area."""
    sides = np.minimum(found[:, 2:], truth[:, 2:]) - np.maximum(found[:, :2], truth[:, :2])
    shared = np.maximum(sides, 0).prod(1)
    areas = [np.maximum(b[:, 2:] - b[:, :2], 0).prod(1) for b in (found, truth)]
    union = areas[0] + areas[1] - shared
    return np.divide(shared, union, out=np.zeros(len(found)), where=union > 0)


class Curves(NamedTuple):
    """Of one video: the part of its frames at or beyond each threshold."""

    success: np.ndarray  # (21,) IoU above OVERLAPS
    precision: np.ndarray  # (51,) distance of the centres at most DISTANCES px
    normalized: np.ndarray  # (51,) distance in target sides, axis by axis, at most RELATIVE_DISTANCES

    @property
    def auc(self) -> float:
        return float(self.success.mean())


def one_pass(found: np.ndarray, truth: np.ndarray, present: np.ndarray) -> Curves:
    """OTB's curves of one video, frame 0 included.

    Frames that are not ``present`` (F,) bool are left out. A frame whose true box has no area is a failure that counts in the
    denominator. Overlap must be *above* its threshold (a perfect tracker has 20/21), distances *at most* theirs.
    """
    found, truth = found[present], truth[present]
    if not len(truth):
        return Curves(*(np.full(len(t), np.nan) for t in (OVERLAPS, DISTANCES, RELATIVE_DISTANCES)))
    sides = truth[:, 2:] - truth[:, :2]
    valid = (sides > 0).all(1)
    shift = (found[:, :2] + found[:, 2:] - truth[:, :2] - truth[:, 2:]) / 2
    relative = shift / np.where(sides > 0, sides, 1)
    overlap = np.where(valid, overlaps(found, truth), -1.0)
    distance, relative = (np.where(valid, np.hypot(*s.T), np.inf) for s in (shift, relative))
    return Curves(
        (overlap[:, None] > OVERLAPS).mean(0),
        (distance[:, None] <= DISTANCES).mean(0),
        (relative[:, None] <= RELATIVE_DISTANCES).mean(0),
    )


def got10k_overlaps(found: np.ndarray, truth: np.ndarray, counted: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(n,) IoU as GOT-10k counts it: without frame 0, only frames that are ``counted`` (F,) bool (the target is visible), both
    boxes clipped to the image of ``size`` (w, h) px. The data set's values are over all frames of all videos together."""
    limit = np.array(size * 2, np.float64)
    counted = counted.copy()
    counted[:1] = False
    return overlaps(np.clip(found[counted], 0, limit), np.clip(truth[counted], 0, limit))


def average_overlap(values: np.ndarray) -> dict[str, float]:
    """``AO``, ``SR50`` and ``SR75`` of overlaps (n,): their mean, and the part above 0.5 and 0.75."""
    if not len(values):
        return dict.fromkeys(("AO", "SR50", "SR75"), float("nan"))
    return {"AO": float(values.mean()), "SR50": float((values > 0.5).mean()), "SR75": float((values > 0.75).mean())}


@dataclass
class ResetRun:
    """A run with resets over one video."""

    overlap: np.ndarray  # (F,) NaN where nothing was tracked: starts, failures and the frames up to the next start
    starts: list[int]
    failures: list[int]

    def accuracy(self, burn_in: int = BURN_IN) -> float:
        """Mean overlap of the tracked frames, ``burn_in`` frames from each start on left out."""
        counted = np.isfinite(self.overlap)
        for start in self.starts:
            counted[start : start + burn_in] = False
        return float(self.overlap[counted].mean()) if counted.any() else float("nan")


def run_with_resets(
    start: Callable[[int], object], follow: Callable[[object, int], tuple[object, np.ndarray]], truth: np.ndarray
) -> ResetRun:
    """VOT's experiment on axis-parallel boxes: where nothing of the target is overlapped the tracker has failed, and starts again
    from the truth five frames later.

    Args:
        start: frame -> state of a tracker started there from the truth.
        follow: state, frame -> (state, box (4,) xyxy).
        truth: (F, 4) xyxy.
    """
    run = ResetRun(np.full(len(truth), np.nan), [], [])
    frame, state = 0, None
    while frame < len(truth):
        if state is None:
            state = start(frame)
            run.starts.append(frame)
            frame += 1
            continue
        state, box = follow(state, frame)
        overlap = float(overlaps(box[None], truth[frame : frame + 1])[0])
        if overlap > 0:
            run.overlap[frame] = overlap
            frame += 1
        else:
            run.failures.append(frame)
            state, frame = None, frame + RESET_GAP
    return run


def accuracy_robustness(runs: Sequence[ResetRun]) -> dict[str, float]:
    """``accuracy``: the videos' mean; ``failures``: their number over all videos; ``failures_per_100``: for 100 frames."""
    accuracies = np.array([run.accuracy() for run in runs])
    failures, frames = sum(len(run.failures) for run in runs), sum(len(run.overlap) for run in runs)
    mean = float(np.nanmean(accuracies)) if np.isfinite(accuracies).any() else float("nan")
    return {
        "accuracy": mean,
        "failures": float(failures),
        "failures_per_100": 100 * failures / frames if frames else float("nan"),
    }
