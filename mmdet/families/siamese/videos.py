"""What every reader of videos offers: an index of frames and boxes in flat arrays, and frames that are read when asked for.

V videos, F frames of one of them. A box is xyxy in continuous px of the frame.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdet.data.image_io import load_image

MIN_SIDE = 3.0  # px; a target with a shorter side teaches nothing and cannot be cropped sensibly
TEMPLATES = ("init", "all", "mix")


@dataclass
class VideoRecord:
    """One video as a reader found it."""

    name: str
    frames: list[str]  # (F,) file names, relative to the reader's folder of the video
    boxes: np.ndarray  # (F, 4) float64 xyxy px; NaN where there is no box
    numbers: np.ndarray | None = None  # (F,) int64 frame numbers, for distances; default 0 .. F - 1
    present: np.ndarray | None = None  # (F,) bool, False where the target is out of view; default: where there is a box
    cover: np.ndarray | None = None  # (F,) int8 visible eighths of the target; default 8 where present, else 0
    missing: np.ndarray | None = None  # (F,) bool, True where there is no file; default none

    def __post_init__(self) -> None:
        count = len(self.frames)
        self.boxes = np.asarray(self.boxes, np.float64).reshape(count, 4)
        boxed = np.isfinite(self.boxes).all(1)
        self.numbers = np.arange(count) if self.numbers is None else np.asarray(self.numbers, np.int64)
        self.present = boxed if self.present is None else np.asarray(self.present, bool) & boxed
        self.missing = np.zeros(count, bool) if self.missing is None else np.asarray(self.missing, bool)
        cover = np.full(count, 8, np.int8) if self.cover is None else np.asarray(self.cover, np.int8)
        self.cover = np.where(self.present, cover, 0).astype(np.int8)

    @property
    def usable(self) -> np.ndarray:
        """(F,) bool: there is a file, and a target in it that is large enough to be cropped."""
        sides = np.nan_to_num(self.boxes[:, 2:] - self.boxes[:, :2], nan=-1.0)
        return self.present & ~self.missing & (sides >= MIN_SIDE).all(1)


@dataclass(frozen=True)
class Video:
    """One video of a source: views into its arrays."""

    name: str
    index: int
    boxes: np.ndarray  # (F, 4) float64 xyxy px; NaN where there is no box
    numbers: np.ndarray  # (F,) int64
    usable: np.ndarray  # (F,) bool, may be trained on
    present: np.ndarray  # (F,) bool, the target is in view
    missing: np.ndarray  # (F,) bool, there is no file
    cover: np.ndarray  # (F,) int8, 0 to 8
    first: int  # row of frame 0 in the source

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass
class PairOptions:
    """How pairs are drawn from a source."""

    pairs_per_epoch: int = 0  # 0: one for each video
    frame_range: int = 0  # most frames between template and search frame; 0: the whole video
    template: str = "all"  # "init": the first usable frame; "all": any; "mix": any with ``mix_prob``, else the first
    mix_prob: float = 0.8

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"template={self.template!r}: expected one of {', '.join(TEMPLATES)}")
        if self.pairs_per_epoch < 0 or self.frame_range < 0 or not 0 <= self.mix_prob <= 1:
            raise ValueError(f"{self}: expected pairs_per_epoch >= 0, frame_range >= 0 and 0 <= mix_prob <= 1")


class VideoSource:
    """Videos of one data set. Annotations are read when it is made, images when asked for.

    Videos without any usable frame are left out of training; ``train_videos`` lists the others.
    """

    def __init__(self, where: Path, records: list[VideoRecord], options: PairOptions) -> None:
        self.where, self.options = Path(where), options
        self.names = [r.name for r in records]
        self._starts = np.cumsum([0] + [len(r.frames) for r in records])
        # UTF-8 in one array: a list would be copied into every worker page by page, as reference counts are touched.
        self._files = np.array([name.encode() for r in records for name in r.frames], dtype=np.bytes_)
        self._boxes = np.concatenate([np.zeros((0, 4)), *(r.boxes for r in records)])
        self._flags = {
            name: np.concatenate([np.zeros(0, kind), *(getattr(r, name) for r in records)])
            for name, kind in (("numbers", np.int64), ("usable", bool), ("present", bool), ("missing", bool), ("cover", np.int8))
        }
        self.train_videos = np.array([i for i, r in enumerate(records) if r.usable.any()], np.int64)

    def __len__(self) -> int:
        """Videos, usable or not."""
        return len(self.names)

    @property
    def quota(self) -> int:
        """Pairs drawn from here in an epoch."""
        return 0 if not len(self.train_videos) else self.options.pairs_per_epoch or len(self.train_videos)

    def video(self, index: int) -> Video:
        rows = slice(int(self._starts[index]), int(self._starts[index + 1]))
        flags = {name: self._flags[name][rows] for name in ("numbers", "usable", "present", "missing", "cover")}
        return Video(self.names[index], index, self._boxes[rows], first=rows.start, **flags)

    def path(self, index: int, frame: int) -> Path:
        """The file of a frame."""
        return self.where / self._file(int(self._starts[index]) + frame)

    def _file(self, row: int) -> str:
        return self._files[row].decode()

    def load(self, index: int, frame: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB.

        Raises:
            DataError: the file is absent or broken; the message names it.
        """
        return load_image(self.path(index, frame))

    def others(self, index: int, frame: int) -> np.ndarray:
        """(N, 4) float64 xyxy px of the frame: annotated objects besides the target."""
        return np.zeros((0, 4))

    def report(self, with_pairs: bool = True) -> str:
        """One line for the log: what there is and what is left out."""
        usable, total = int(self._flags["usable"].sum()), len(self._files)
        text = f"{self.where}: {len(self)} videos, {usable} of {total} frames usable"
        if with_pairs:
            text += f", {self.quota} pairs per epoch"
        missing = int(self._flags["missing"].sum())
        counts = (
            (missing, "frames without a file"),
            (total - usable - missing, f"frames without a visible target of at least {MIN_SIDE:g} px"),
            (len(self) - len(self.train_videos), "videos without a usable frame"),
        )
        lost = [f"{what}: {count}" for count, what in counts if count]
        return f"{text} (left out: {', '.join(lost)})" if lost else text

    def fingerprint(self) -> str:
        """What a resume must find again: number of videos and frames, and a digest of names and boxes."""
        digest = hashlib.sha256("\n".join(self.names).encode())
        for array in (self._files, np.nan_to_num(self._boxes, nan=-1.0).astype("<f4"), self._flags["usable"]):
            digest.update(array.tobytes())
        return f"{len(self)} videos, {len(self._files)} frames, digest {digest.hexdigest()[:16]}"
