"""Where the data of a task lies. A source belongs to a TaskSpec and opens the data set of a split below the exp's ``data_dir``.

Any object with ``open(root, split)`` will do; what it returns has ``len()``, ``load(index) -> Sample``, ``path(index)``,
``fingerprint()``, ``report()`` and ``class_names``; a detection data set is a CocoDataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.errors import DataError
from mmdet.data.image_io import load_image
from mmdet.data.structures import Sample

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class LabelledImages:
    """Images with labels. ``labels`` (N,) int64, or (N, C) float32 in {0, 1} where an image can have several classes."""

    def __init__(self, place: Path, files: Sequence[Path], labels: np.ndarray, class_names: Sequence[str]) -> None:
        if not files:
            raise DataError(f"{place}: there is no image ({', '.join(IMAGE_ENDINGS)})")
        self.annotation_file, self.labels, self.class_names = place, labels, tuple(class_names)
        self._files = np.array([str(f).encode("utf-8") for f in files], dtype="S")  # one array: workers share its memory

    def __len__(self) -> int:
        return len(self._files)

    def path(self, index: int) -> Path:
        return Path(self._files[index].decode("utf-8"))

    def load(self, index: int) -> Sample:
        """The decoded image, (H, W, 3) uint8 RGB, without boxes; its id is its index."""
        return Sample.from_arrays(load_image(self.path(index)), image_id=index)

    def label(self, index: int) -> int | list[float]:
        return self.labels[index].tolist()

    def fingerprint(self) -> str:
        """Number of images and a digest of names and labels; pixels are not looked at."""
        names = [self.path(i).relative_to(self.annotation_file.parent).as_posix() for i in range(len(self))]
        digest = hashlib.blake2b("\n".join([*names, *self.class_names]).encode(), digest_size=8)
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        return f"{len(self)} images, digest {digest.hexdigest()}"

    def report(self) -> str:
        counts = np.bincount(self.labels, minlength=len(self.class_names)) if self.labels.ndim == 1 else self.labels.sum(0)
        classes = ", ".join(f"{name} {int(n)}" for name, n in zip(self.class_names, counts, strict=True))
        return f"{self.annotation_file}: {len(self)} images of {len(self.class_names)} classes ({classes})"

    def doubts(self) -> list[str]:
        return []

    def check_files(self) -> None:
        """Nothing to do: every file was found by looking into the folder."""


class Pair(NamedTuple):
    """Two images, of one pair."""

    first: Sample
    second: Sample


class PairedImages(LabelledImages):
    """Pairs of images with a label each, 1 where they belong together. ``load`` gives a Pair."""

    def __init__(self, place: Path, first: Sequence[Path], second: Sequence[Path], labels: np.ndarray) -> None:
        super().__init__(place, first, labels, ("different", "same"))
        self._second = np.array([str(f).encode("utf-8") for f in second], dtype="S")

    def load(self, index: int) -> Pair:
        other = Path(self._second[index].decode("utf-8"))
        return Pair(super().load(index), Sample.from_arrays(load_image(other), image_id=index))


@dataclass(frozen=True)
class CocoFolder:
    """A folder in COCO's layout: ``annotations/instances_<split>*.json`` and the images."""

    folder: str  # below data_dir, or absolute
    classes: int  # categories that its training annotations have
    splits: tuple[tuple[str, str], ...] = ()  # (split, NAME of its annotation file) where they differ

    def open(self, root: Path, split: str) -> CocoDataset:
        data = CocoDataset(*find_coco(root / self.folder, dict(self.splits).get(split, split)))
        if len(data.categories) != self.classes:
            raise DataError(
                f"{data.annotation_file} has {len(data.categories)} categories ({', '.join(data.categories.names)}), but the "
                f"task says classes={self.classes}: make them agree"
            )
        return data


@dataclass(frozen=True)
class ImageFolder:
    """``<folder>/<split>/<class name>/<image>``: one class per image; classes in the order of their names."""

    folder: str  # below data_dir, or absolute
    classes: int

    def open(self, root: Path, split: str) -> LabelledImages:
        place = root / self.folder / split
        if not place.is_dir():
            raise DataError(f"{place}: no such folder; expected one folder per class in it")
        names = sorted(p.name for p in place.iterdir() if p.is_dir())
        _check_classes(place, names, self.classes)
        found = [(f, n) for n, name in enumerate(names) for f in sorted((place / name).iterdir()) if _is_image(f)]
        return LabelledImages(place, [f for f, _ in found], np.array([n for _, n in found], np.int64), names)


@dataclass(frozen=True)
class ImageLabels:
    """``<folder>/<split>.json``: ``{"classes": [names], "images": {"file below the folder": [names of its classes]}}``."""

    folder: str  # below data_dir, or absolute
    classes: int

    def open(self, root: Path, split: str) -> LabelledImages:
        place = root / self.folder / f"{split}.json"
        content = _read(place)
        names = _entry(content, "classes", list, place)
        _check_classes(place, names, self.classes)
        files, rows = [], np.zeros((len(_entry(content, "images", dict, place)), len(names)), np.float32)
        for row, (name, classes) in zip(rows, content["images"].items(), strict=True):
            unknown = [c for c in classes if c not in names]
            if unknown:
                raise DataError(f"{place}: image {name!r} has class {unknown[0]!r}, none of {', '.join(map(repr, names))}")
            row[[names.index(c) for c in classes]] = 1.0
            files.append(root / self.folder / name)
        return LabelledImages(place, files, rows, names)


@dataclass(frozen=True)
class ImagePairs:
    """``<folder>/<split>.json``: ``[["first file", "second file", 0 or 1], ...]``, files below the folder."""

    folder: str  # below data_dir, or absolute
    classes: int = 2

    def open(self, root: Path, split: str) -> PairedImages:
        place = root / self.folder / f"{split}.json"
        rows = _read(place)
        wrong = [r for r in rows if not (isinstance(r, list) and len(r) == 3 and r[2] in (0, 1))]
        if wrong:
            raise DataError(f"{place}: {wrong[0]!r}: expected [first file, second file, 0 or 1]")
        first, second = ([root / self.folder / r[i] for r in rows] for i in range(2))
        return PairedImages(place, first, second, np.array([r[2] for r in rows], np.int64))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_ENDINGS


def _check_classes(place: Path, names: Sequence[str], classes: int) -> None:
    if len(names) != classes:
        raise DataError(f"{place} has {len(names)} classes ({', '.join(names)}), but the task says classes={classes}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error


def _entry(content: Any, name: str, kind: type, place: Path) -> Any:
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind):
        raise DataError(f"{place}: expected {name!r}, a {kind.__name__}")
    return value
