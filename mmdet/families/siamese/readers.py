"""Readers of three layouts of tracking data: GOT-10k's, OTB's and pysot's crops of 511 px.

Sources of the layouts: Huang et al. 2019 (GOT-10k) and its toolkit; Wu et al. 2015 (OTB-100); pysot's training data sets.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from mmdet.data.errors import DataError
from mmdet.data.image_io import load_image
from mmdet.families.siamese.crop import context_side
from mmdet.families.siamese.videos import PairOptions, VideoRecord, VideoSource

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_OTB_STARTS = {"david": 300}  # first annotated frame where it is not the first one; tracker_benchmark's list of sequences
_EXEMPLAR = 127  # px of the template inside pysot's crops; gen of training data, `par_crop.py`


def read_boxes(path: Path) -> np.ndarray:
    """(F, 4) float64 xyxy of a text file with one ``x,y,w,h`` per line, parted by commas, tabs or spaces.

    Raises:
        DataError: the file cannot be read, or a line does not hold four numbers; the message names file and line.
    """
    rows = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        words = re.split(r"[,\s]+", line.strip())
        if words == [""]:
            continue
        try:
            values = [float(word) for word in words]
        except ValueError:
            values = []
        if len(values) != 4:
            raise DataError(f"{path}, line {number}: expected four numbers x,y,w,h, got {line.strip()[:60]!r}")
        rows.append(values)
    boxes = np.array(rows, np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text file: {error}") from error


def _image_names(folder: Path) -> list[str]:
    """File names of the images of a folder, in order; one listing instead of a look at each of GOT-10k's 1.4 million files."""
    if not folder.is_dir():
        return []
    return sorted(name for name in os.listdir(folder) if os.path.splitext(name)[1].lower() in _IMAGES)


class GOT10kFolder(VideoSource):
    """``<root>/<split>/list.txt`` and a folder per video with ``00000001.jpg`` ..., ``groundtruth.txt`` (one ``x,y,w,h`` a line)
    and, where they exist, ``absence.label`` and ``cover.label`` (visible eighths).

    A split whose videos have one line (test) gives a box for the first frame only. Frames beyond the images' number, and lines
    beyond the frames', are counted as missing, not silently cut.

    Raises:
        DataError: a list, folder or annotation is missing or malformed; the message names it.
    """

    def __init__(self, root: str | Path, split: str = "train", **pairs: Any) -> None:
        folder = Path(root) / split
        names = [line.strip() for line in _read_text(folder / "list.txt").splitlines() if line.strip()]
        super().__init__(folder, [_read_got10k(folder, name) for name in names], PairOptions(**pairs))


def _read_got10k(root: Path, name: str) -> VideoRecord:
    folder = root / name
    if not (folder / "groundtruth.txt").is_file():
        raise DataError(
            f"{folder / 'groundtruth.txt'}: there is no such file; complete the video, or take {name!r} out of "
            f"{root / 'list.txt'}"
        )
    boxes, files = read_boxes(folder / "groundtruth.txt"), _image_names(folder)
    if not len(boxes):
        raise DataError(f"{folder / 'groundtruth.txt'} holds no box: expected one x,y,w,h for each frame, or for the first")
    if not files:
        raise DataError(f"video folder {folder} holds no image ({', '.join(_IMAGES)})")
    stems = ((os.path.splitext(file)[0], file) for file in files)
    numbered = {int(stem): file for stem, file in stems if stem.isdecimal()}
    count = max(len(boxes), max(numbered, default=0))
    frames = [f"{name}/{numbered.get(i + 1, f'{i + 1:08d}.jpg')}" for i in range(count)]
    missing = np.array([i + 1 not in numbered for i in range(count)])
    all_boxes = np.full((count, 4), np.nan)
    all_boxes[: len(boxes)] = boxes
    absent, cover = _read_labels(folder / "absence.label", count), _read_labels(folder / "cover.label", count)
    present = np.isfinite(all_boxes).all(1) & (absent != 1)
    return VideoRecord(name, frames, all_boxes, present=present, cover=np.where(cover < 0, 8, cover), missing=missing)


def _read_labels(path: Path, count: int) -> np.ndarray:
    """(count,) int64, one integer per line; -1 where the file or the line does not exist."""
    labels = np.full(count, -1)
    if path.is_file():
        words = _read_text(path).split()[:count]
        if not all(word.isdecimal() for word in words):
            raise DataError(f"{path}: expected one integer on each line")
        labels[: len(words)] = [int(word) for word in words]
    return labels


class OTBFolder(VideoSource):
    """``<root>/<Video>/img/0001.jpg`` ... and ``groundtruth_rect.txt``; several targets of a video
    (``groundtruth_rect.1.txt`` ...) become several videos, ``<Video>.1`` ...

    Raises:
        DataError: no video, or a malformed annotation.
    """

    def __init__(self, root: str | Path, split: str = "", **pairs: Any) -> None:
        folder = Path(root) / split if split and (Path(root) / split).is_dir() else Path(root)
        truths = sorted(folder.glob("*/groundtruth_rect*.txt"))
        if not truths:
            raise DataError(f"{folder}: no video in OTB's layout (<Video>/groundtruth_rect.txt beside <Video>/img/)")
        super().__init__(folder, [_read_otb(path) for path in truths], PairOptions(**pairs))


def _read_otb(truth: Path) -> VideoRecord:
    folder = truth.parent
    part = truth.stem.removeprefix("groundtruth_rect").strip(".")
    boxes, files = read_boxes(truth), _image_names(folder / "img")
    start = _OTB_STARTS.get(folder.name.lower(), 1) - 1
    kept = files[start : start + len(boxes)]
    frames = [f"{folder.name}/img/{name}" for name in kept] + [f"{folder.name}/img/?"] * (len(boxes) - len(kept))
    missing = np.arange(len(boxes)) >= len(kept)
    return VideoRecord(folder.name + (f".{part}" if part else ""), frames, boxes, missing=missing)


class Crop511Json(VideoSource):
    """pysot's crops: ``<root>/<video>/{frame:06d}.{track:02d}.x.jpg`` with the target in the middle, and a JSON file
    ``{video: {track: {frame: [x1, y1, x2, y2] or [w, h]}}}`` of the boxes in the images that the crops were cut from.

    A track is a video here. In a crop the target's side is its own times ``127 / s(w, h)`` with the context side s, so its box
    follows from its size. Boxes without area and empty tracks are dropped.

    Raises:
        DataError: the JSON file cannot be read or has another structure.
    """

    def __init__(self, root: str | Path, json_file: str | Path, **pairs: Any) -> None:
        folder = Path(root)
        try:
            content = json.loads(_read_text(Path(json_file)))
            tracks = [(v, t, frames) for v, ts in sorted(content.items()) for t, frames in sorted(ts.items()) if frames]
            records = [_read_track(folder, video, track, frames) for video, track, frames in tracks]
            self._in_image = np.concatenate([np.zeros((0, 4)), *(_image_boxes(frames) for _, _, frames in tracks)])
        except (ValueError, AttributeError, TypeError) as error:
            text = "expected {video: {track: {frame: [x1, y1, x2, y2]}}}"
            raise DataError(f"{json_file}: {text} ({type(error).__name__}: {error})") from error
        super().__init__(folder, records, PairOptions(**pairs))
        self._siblings: dict[str, list[int]] = {}  # video -> its tracks
        for i, (video, _, _) in enumerate(tracks):
            self._siblings.setdefault(video, []).append(i)
        self._middle = self._find_middle()
        self._boxes += np.tile(self._middle, 2)

    def _find_middle(self) -> np.ndarray:
        """(2,) px, where the targets are. All crops have the size of the first that exists."""
        found = np.flatnonzero(~self._flags["missing"])
        shape = load_image(self.where / self._file(int(found[0]))).shape if len(found) else (0, 0)
        return np.array(shape[1::-1]) / 2

    def others(self, index: int, frame: int) -> np.ndarray:
        """The boxes of the video's other tracks in the same frame, in px of this crop; some may lie outside it."""
        video = self.video(index)
        own = self._in_image[video.first + frame]
        scale = _EXEMPLAR / context_side(*(own[2:] - own[:2]))
        found = []
        for sibling in (self.video(i) for i in self._siblings[video.name.rpartition("/")[0]] if i != index):
            row = int(np.searchsorted(sibling.numbers, video.numbers[frame]))
            if row < len(sibling) and sibling.numbers[row] == video.numbers[frame]:
                found.append(self._in_image[sibling.first + row])
        boxes = np.array(found).reshape(-1, 4)
        boxes = (boxes - np.tile((own[:2] + own[2:]) / 2, 2)) * scale + np.tile(self._middle, 2)
        return boxes[np.isfinite(boxes).all(1)]


def _read_track(root: Path, video: str, track: str, frames: dict[str, list[float]]) -> VideoRecord:
    order = sorted(frames, key=int)
    files = [f"{video}/{int(frame):06d}.{int(track):02d}.x.jpg" for frame in order]
    boxes = np.array([_box_in_crop(frames[frame]) for frame in order])
    there = set(_image_names(root / video))
    missing = [Path(file).name not in there for file in files]
    return VideoRecord(f"{video}/{track}", files, boxes, numbers=np.array([int(f) for f in order]), missing=np.array(missing))


def _image_boxes(frames: dict[str, list[float]]) -> np.ndarray:
    """(F, 4) float64 xyxy px of the images that a track's crops were cut from; NaN where only sizes are known."""
    return np.array([frames[f] if len(frames[f]) == 4 else [np.nan] * 4 for f in sorted(frames, key=int)], np.float64)


def _box_in_crop(value: list[float]) -> np.ndarray:
    """(4,) float64 xyxy around 0, px of the crop; NaN where the annotation has no area."""
    values = np.array(value, np.float64)
    if values.shape not in ((2,), (4,)):
        raise ValueError(f"box {value}: expected [x1, y1, x2, y2] or [w, h]")
    size = values if len(values) == 2 else values[2:] - values[:2]
    if not np.isfinite(size).all() or size.min() <= 0:
        return np.full(4, np.nan)
    half = size * _EXEMPLAR / context_side(*size) / 2
    return np.concatenate([-half, half])


# -- which layout a folder has ------------------------------------------------------------------------------------------------


def find_layout(root: str | Path, split: str) -> str:
    """``got10k``, ``crop511`` or ``otb``: the layout of a data folder.

    Raises:
        DataError: none of them; the message says what was looked for.
    """
    root = Path(root)
    if (root / split / "list.txt").is_file():
        return "got10k"
    if (root / f"{split}.json").is_file() and _crop_folder(root).is_dir():
        return "crop511"
    if any(root.glob("*/groundtruth_rect*.txt")) or any(root.glob(f"{split}/*/groundtruth_rect*.txt")):
        return "otb"
    raise DataError(
        f"{root} holds no videos of split {split!r}: looked for {split}/list.txt (GOT-10k), {split}.json beside crop511/ "
        "(pysot's crops) and <Video>/groundtruth_rect.txt (OTB); name the folder that holds one of them"
    )


def _crop_folder(root: Path) -> Path:
    return root / "crop511" if (root / "crop511").is_dir() else root


def open_source(root: str | Path, split: str, **pairs: Any) -> VideoSource:
    """The videos of a split, whatever layout the folder has. ``pairs``: fields of :class:`PairOptions`.

    Raises:
        DataError: no known layout, or a fault in the annotations.
    """
    layout = find_layout(root, split)
    if layout == "got10k":
        return GOT10kFolder(root, split, **pairs)
    if layout == "crop511":
        return Crop511Json(_crop_folder(Path(root)), Path(root) / f"{split}.json", **pairs)
    return OTBFolder(root, split, **pairs)
