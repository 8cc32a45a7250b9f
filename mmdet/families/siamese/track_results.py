"""Tracks as files, in the forms that the toolkits of GOT-10k and OTB read. Boxes are written as ``x,y,w,h`` px."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Track:
    """What a tracker found in one video of F frames; plain data, it goes from rank to rank."""

    boxes: np.ndarray  # (F, 4) float64 xyxy px; NaN before the start
    scores: np.ndarray  # (F,) float64
    seconds: np.ndarray  # (F,) of tracking, reading the frames excluded
    size: tuple[int, int]  # (w, h) px of the first frame


def box_lines(boxes: np.ndarray) -> str:
    """(F, 4) xyxy as one ``x,y,w,h`` per line with four decimals; frames before a tracker's start are zeros."""
    boxes = np.nan_to_num(boxes, nan=0.0)
    rows = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    return "".join(",".join(f"{value:.4f}" for value in row) + "\n" for row in rows)


def save_got10k(tracks: Mapping[str, Track], folder: str | Path, tracker: str) -> None:
    """``<folder>/<tracker>/<video>/<video>_001.txt`` and ``<video>_time.txt`` (seconds of each frame)."""
    for name, track in tracks.items():
        stem = name.replace("/", "_")
        place = Path(folder) / tracker / stem
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{stem}_001.txt").write_text(box_lines(track.boxes), encoding="ascii")
        times = "".join(f"{value:.8f}\n" for value in track.seconds)
        (place / f"{stem}_time.txt").write_text(times, encoding="ascii")


def save_otb(tracks: Mapping[str, Track], folder: str | Path, tracker: str) -> None:
    """``<folder>/<tracker>/<video>.txt``."""
    place = Path(folder) / tracker
    place.mkdir(parents=True, exist_ok=True)
    for name, track in tracks.items():
        (place / f"{name.replace('/', '_')}.txt").write_text(box_lines(track.boxes), encoding="ascii")
