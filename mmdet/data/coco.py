"""COCO annotation files: found, checked, mended where that is harmless, and held in a few flat arrays.

The arrays are what worker processes share: a list of dicts would be copied into each of them page by page, as reference
counts are touched. N images, T annotations in use (crowd regions among them).
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmdet.data.categories import Categories, is_integer
from mmdet.data.errors import DataError
from mmdet.data.image_io import file_fault, load_image
from mmdet.data.structures import Sample

_LISTED = 20  # annotation ids or file names that a message spells out
_CLIP_SLACK = 0.02  # px; corners of two decimals leave the image by so much without meaning it
_MIN_SIDE = 1e-5  # px


class Annotation(NamedTuple):
    """What is known of one image besides its pixels."""

    boxes: np.ndarray  # (N, 4) float32 xyxy px
    labels: np.ndarray  # (N,) int64 in [0, C)
    ignore: np.ndarray  # (I, 4) float32 xyxy px, crowd regions


def find_coco(data_dir: str | Path, split: str) -> tuple[Path, Path]:
    """The annotation file and the image folder of one split ("train", "val", "test" or any NAME).

    Annotations: ``annotations/instances_{split}*.json``, else ``annotations/*{split}*.json``. Images: below
    ``images/{split}*/``, ``images/``, ``{split}*/`` or ``data_dir`` itself, wherever most of the first file names exist.

    Raises:
        DataError: what was looked for and not found, or several annotation files fit.
    """
    root, word = Path(data_dir), glob.escape(split)
    if not root.is_dir():
        raise DataError(f"data directory {root} does not exist")
    file = _find_annotations(root, split)
    names = _first_file_names(file)
    folders = [*sorted(root.glob(f"images/{word}*")), root / "images", *sorted(root.glob(f"{word}*")), root]
    folders = [f for f in folders if f.is_dir()]
    hits = [sum((f / _posix(name)).is_file() for name in names) for f in folders]
    if names and not max(hits):
        raise DataError(
            f"none of the first {len(names)} images of {file} (such as {names[0]!r}) was found; looked in "
            + ", ".join(map(str, folders))
        )
    return file, folders[hits.index(max(hits))]


def _find_annotations(root: Path, split: str) -> Path:
    word = glob.escape(split)
    exact = root / "annotations" / f"instances_{split}.json"
    if exact.is_file():
        return exact
    patterns = (f"annotations/instances_{word}*.json", f"annotations/*{word}*.json")
    for pattern in patterns:
        found = sorted(root.glob(pattern))
        if len(found) > 1:
            raise DataError(f"several annotation files fit {root / pattern}: {', '.join(f.name for f in found)}; keep one there")
        if found:
            return found[0]
    looked = " and ".join(str(root / p) for p in patterns)
    raise DataError(
        f"no annotations of split {split!r}: looked for {looked}; name the folder that holds 'annotations', and put a file in "
        "COCO's format there for this split"
    )


def _first_file_names(file: Path, count: int = 16) -> list[str]:
    """The first file names of a COCO file, without parsing all of it (COCO's own has 450 MB)."""
    names: list[str] = []
    rest = ""
    with open(file, encoding="utf-8-sig") as stream:
        while len(names) < count and (chunk := stream.read(1 << 20)):
            text, end = rest + chunk, 0
            for match in re.finditer(r'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")', text):
                names.append(json.loads(match[1]))
                end = match.end()
            rest = text[max(end, len(text) - 4096) :]
    return names[:count]


def _posix(name: str) -> str:
    """A file name as written on Windows, with this system's separators."""
    return name.replace("\\", "/")


@dataclass
class _Counts:
    """What was mended while reading, with annotation ids."""

    dropped: list = field(default_factory=list)
    clipped: list = field(default_factory=list)
    unlisted: list = field(default_factory=list)


class CocoDataset:
    """The images of one COCO file, with their boxes.

    ``categories``: the map of the training file, if this is another one; it is checked against this file's and used for
    labels. Boxes are clipped to the image; those without area left are dropped; both are counted (``report``). Images
    without boxes stay. Missing ``area`` and ``iscrowd`` are filled in.

    Raises:
        DataError: the file is no COCO annotation file, contradicts itself or ``categories``.
    """

    def __init__(self, annotation_file: str | Path, image_dir: str | Path, categories: Categories | None = None) -> None:
        self.annotation_file, self.image_dir = Path(annotation_file), Path(image_dir)
        content = _read_json(self.annotation_file)
        self.file_categories = Categories.from_coco(content["categories"], self.annotation_file)
        if categories is not None:
            categories.check_same(self.file_categories, "the training annotations", self.annotation_file)
        self.categories = categories or self.file_categories
        self._read_images(content["images"])
        self._read_annotations(content["annotations"])

    def __len__(self) -> int:
        return len(self._file_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.categories.names

    @property
    def image_ids(self) -> list[int | str]:
        """The ids of the file, in its order."""
        return self._image_ids.tolist()

    def path(self, index: int) -> Path:
        """The image file at ``index``."""
        return self.image_dir / self._file_names[index].decode("utf-8")

    def annotation(self, index: int) -> Annotation:
        """Boxes, labels and crowd regions of one image, in its own pixels."""
        rows = slice(self._offsets[index], self._offsets[index + 1])
        crowd, boxes = self._crowd[rows], self._boxes[rows].astype(np.float32)
        return Annotation(boxes[~crowd], self._labels[rows][~crowd].astype(np.int64), boxes[crowd])

    def load(self, index: int) -> Sample:
        """The decoded image, (H, W, 3) uint8 RGB of the declared size, with its annotation.

        Raises:
            DataError: the file is absent, broken, cut short or of another size than declared (``image_io.load_image``).
        """
        height, width = self.sizes[index].tolist()
        image = load_image(self.path(index), (height, width))
        boxes, labels, ignore = self.annotation(index)
        return Sample(
            image, boxes, labels, np.ones(len(boxes), np.float32), ignore, self._image_ids[index].item(), (height, width)
        )

    def broken_files(self) -> dict[int, str]:
        """Index and reason of every image that ``load`` would refuse; reads only the ends of sound files."""
        faults = {}
        for index, (height, width) in enumerate(self.sizes.tolist()):
            fault = file_fault(self.path(index), (height, width))
            if fault:
                faults[index] = fault
        return faults

    def check_files(self) -> None:
        """Stops before training if images are broken.

        Raises:
            DataError: names every broken file and what is wrong with it.
        """
        faults = self.broken_files()
        if faults:
            lines = "\n  ".join(faults.values())
            raise DataError(f"{len(faults)} of the {len(self)} images of {self.annotation_file} cannot be used:\n  {lines}")

    def select(self, indices: Sequence[int]) -> CocoDataset:
        """The same data set with only the images at ``indices``, in that order; the report still tells of the whole file."""
        part = copy.copy(self)
        indices = np.asarray(indices, dtype=np.int64)
        rows = [np.arange(self._offsets[i], self._offsets[i + 1]) for i in indices]
        part._offsets = np.cumsum([0, *map(len, rows)])
        kept = np.concatenate([np.zeros(0, np.int64), *rows])
        for name in ("_boxes", "_labels", "_crowd", "_areas"):
            setattr(part, name, getattr(self, name)[kept])
        part._file_names, part.sizes, part._image_ids = self._file_names[indices], self.sizes[indices], self._image_ids[indices]
        part._judge_ids = self._judge_ids[indices]
        return part

    def fingerprint(self) -> str:
        """Counts and a digest of image ids, file names, sizes and annotations in their order; pixels are not looked at."""
        digest = hashlib.blake2b(digest_size=8)
        arrays = (self._file_names, self.sizes, self._offsets, self._boxes, self._labels, self._crowd)
        for array in (np.array(self.image_ids).astype("U"), *arrays):
            digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        digest.update("\n".join(self.categories.names).encode("utf-8"))
        return f"{len(self)} images, {len(self._boxes)} annotations, digest {digest.hexdigest()}"

    def report(self) -> str:
        """What the file holds and what was mended, for the log."""
        boxes = self.num_boxes
        without = np.count_nonzero(np.diff(self._offsets) == 0)
        lines = [
            f"{self.annotation_file}: {len(self)} images, {boxes} boxes of {len(self.categories)} classes, "
            f"{without} images without boxes, {len(self._crowd) - boxes} crowd regions"
        ]
        counts = self._counts
        if counts.dropped or counts.clipped:
            lines.append(
                f"{len(counts.dropped)} dropped, {len(counts.clipped)} clipped (boxes without area inside their image, boxes "
                f"reaching out of it); annotation ids dropped: {_listed(counts.dropped)}; clipped: {_listed(counts.clipped)}"
            )
        if counts.unlisted:
            lines.append(f"{len(counts.unlisted)} annotations of images that are not listed, ids: {_listed(counts.unlisted)}")
        return "\n".join(lines)

    @property
    def num_boxes(self) -> int:
        """Boxes in use, crowd regions left out."""
        return int(np.count_nonzero(~self._crowd))

    def doubts(self) -> list[str]:
        """What a person should look at before trusting a run on this file."""
        lines, counts = [], self._counts
        if len(self) and not self.num_boxes:
            lines.append(f"{self.annotation_file}: no image has a box: nothing can be learnt from it, and AP is undefined on it")
        if counts.dropped:
            lines.append(f"{self.annotation_file}: {len(counts.dropped)} annotations are unusable and left out (listed above)")
        if len(counts.clipped) > 0.3 * max(self.num_boxes, 1):
            lines.append(
                f"{self.annotation_file}: {len(counts.clipped)} of {self.num_boxes} boxes reach out of their image and are "
                "clipped; 'bbox' must be [x, y, width, height] in px: were x1, y1, x2, y2 written?"
            )
        return lines

    def judge_image_id(self, image_id: int | str) -> int:
        """The integer by which the judge knows an image: the id itself, or a number where the file's ids are strings."""
        if self._image_ids.dtype.kind == "i":
            return int(image_id)
        if not hasattr(self, "_judge_map"):
            self._judge_map = dict(zip(self.image_ids, self._judge_ids.tolist()))
        return self._judge_map[image_id]

    def ground_truth(self) -> dict:
        """COCO content for the judge: annotation ids from 1, all keys filled in, integer image ids (``judge_image_id``),
        boxes as in training, crowd regions with ``iscrowd`` 1, categories of this file."""
        sizes, judge_ids = self.sizes.tolist(), self._judge_ids.tolist()
        xywh = np.concatenate([self._boxes[:, :2], self._boxes[:, 2:] - self._boxes[:, :2]], 1).tolist()
        owners = np.repeat(self._judge_ids, np.diff(self._offsets)).tolist()
        category_ids = np.asarray(self.categories.ids)[self._labels].tolist()
        rows = zip(owners, category_ids, xywh, self._areas.tolist(), self._crowd.astype(int).tolist())
        keys = ("image_id", "category_id", "bbox", "area", "iscrowd")
        names = zip(self.file_categories.ids, self.file_categories.names)
        return {
            "info": {},
            "licenses": [],
            "images": [
                {"id": judge_ids[i], "file_name": self._file_names[i].decode("utf-8"), "height": h, "width": w}
                for i, (h, w) in enumerate(sizes)
            ],
            "annotations": [{"id": number, **dict(zip(keys, row))} for number, row in enumerate(rows, 1)],
            "categories": [{"id": i, "name": name, "supercategory": ""} for i, name in names],
        }

    def _read_images(self, images: list[dict]) -> None:
        for entry in images:
            missing = [k for k in ("id", "file_name", "width", "height") if entry.get(k) in (None, "")]
            if missing:
                raise DataError(f"{self.annotation_file}: image {entry.get('id', entry)!r} lacks {', '.join(map(repr, missing))}")
            if not (_is_side(entry["width"]) and _is_side(entry["height"])):
                raise DataError(
                    f"{self.annotation_file}: image {entry['id']!r} has width {entry['width']!r} and height {entry['height']!r}; "
                    "positive integers are expected"
                )
        ids = [entry["id"] for entry in images]
        if len(set(map(str, ids))) != len(ids):
            seen: set[str] = set()
            twice = [i for i in ids if str(i) in seen or seen.add(str(i))]
            raise DataError(f"{self.annotation_file}: image ids given twice: {_listed(twice)}; make each one unique")
        numbers = all(map(is_integer, ids))
        self._image_ids = np.array(ids, dtype=np.int64) if numbers else np.array(list(map(str, ids)))
        self._judge_ids = self._image_ids if numbers else np.arange(1, len(ids) + 1)
        self._file_names = np.array([_posix(entry["file_name"]).encode("utf-8") for entry in images], dtype="S")
        self.sizes = np.array([(e["height"], e["width"]) for e in images], dtype=np.int32).reshape(-1, 2)  # (N, 2) H, W px

    def _read_annotations(self, annotations: list[dict]) -> None:
        self._counts = counts = _Counts()
        index_of = {i: n for n, i in enumerate(self.image_ids)}
        if self._image_ids.dtype.kind != "i":  # ids of mixed types were made strings
            annotations = [{**a, "image_id": str(a.get("image_id"))} for a in annotations]
        label_of = {i: self.categories.index_of(i) for i in self.file_categories.ids}
        rows = []
        for number, entry in enumerate(annotations):
            name = entry.get("id", f"number {number}")
            if entry.get("category_id") not in label_of:
                raise DataError(
                    f"{self.annotation_file}: annotation {name} has category_id {entry.get('category_id')!r}, none of the "
                    f"file's categories {self.file_categories.ids}"
                )
            image = index_of.get(entry.get("image_id"))
            if image is None:
                counts.unlisted.append(name)
                continue
            box = self._clipped_box(entry, name, image)
            if box is not None:
                sides = (box[2] - box[0]) * (box[3] - box[1])
                area = entry.get("area")
                area = min(float(area), sides) if isinstance(area, (int, float)) and area > 0 else sides
                rows.append((image, *box, label_of[entry["category_id"]], bool(entry.get("iscrowd", 0)), area))
        if annotations and len(counts.unlisted) == len(annotations):
            raise DataError(
                f"{self.annotation_file}: no annotation belongs to a listed image; the first has image_id "
                f"{annotations[0].get('image_id')!r}, the images have ids such as {_listed(self.image_ids[:3])}"
            )
        self._store(rows)

    def _store(self, rows: list[tuple]) -> None:
        table = np.array(rows, dtype=np.float64).reshape(-1, 8)
        table = table[np.argsort(table[:, 0], kind="stable")]
        self._offsets = np.searchsorted(table[:, 0], np.arange(len(self) + 1))
        self._boxes = np.ascontiguousarray(table[:, 1:5])  # (T, 4) float64 xyxy px
        self._labels = table[:, 5].astype(np.int32)
        self._crowd = table[:, 6].astype(bool)
        self._areas = np.ascontiguousarray(table[:, 7])

    def _clipped_box(self, entry: dict, name, image: int) -> tuple[float, float, float, float] | None:
        """xyxy px inside the image, or None where nothing is left; either way counted."""
        box = entry.get("bbox")
        try:
            x, y, w, h = (float(v) for v in box)
        except (TypeError, ValueError) as error:
            if not box:
                self._counts.dropped.append(name)
                return None
            raise DataError(
                f"{self.annotation_file}: annotation {name} has bbox {box!r}; four numbers x, y, width, height in px are expected"
            ) from error
        height, width = self.sizes[image].tolist()
        x1, y1, x2, y2 = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
        if not (math.isfinite(x + y + w + h) and w > 0 and h > 0 and x2 - x1 > _MIN_SIDE and y2 - y1 > _MIN_SIDE):
            self._counts.dropped.append(name)
            return None
        if max(x1 - x, y1 - y, x + w - x2, y + h - y2) > _CLIP_SLACK:
            self._counts.clipped.append(name)
        return x1, y1, x2, y2


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"annotation file {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"annotation file {file} is no JSON in UTF-8: {error}") from error
    needed = ("images", "annotations", "categories")
    missing = [k for k in needed if not isinstance(content, dict) or not isinstance(content.get(k), list)]
    if missing:
        raise DataError(f"annotation file {file} is not in COCO's form: it lacks the list {', '.join(map(repr, missing))}")
    return content


def _is_side(value) -> bool:
    return isinstance(value, (int, float)) and value > 0 and float(value).is_integer()


def _listed(values) -> str:
    """Up to 20 of the values, separated by commas, and how many more there are."""
    values = list(values)
    more = f" and {len(values) - _LISTED} more" if len(values) > _LISTED else ""
    return ", ".join(map(str, islice(values, _LISTED))) + more if values else "none"
