"""Detections of a whole data set as flat arrays, and COCO's results file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdet.data.errors import DataError


@dataclass(frozen=True)
class Results:
    """D detections of any number of images; four arrays instead of D dictionaries.

    The order matters only between detections of one image that have equal scores: the earlier one counts as better.
    """

    image_ids: np.ndarray  # (D,) int64, or object where ids are strings
    category_ids: np.ndarray  # (D,) int64, the data set's ids, not class indices
    boxes_xywh: np.ndarray  # (D, 4) float64: left, top, width, height in px of the original image
    scores: np.ndarray  # (D,) float64

    def __post_init__(self) -> None:
        lengths = [len(self.image_ids), len(self.category_ids), len(self.boxes_xywh), len(self.scores)]
        if len(set(lengths)) > 1 or self.boxes_xywh.shape[1:] != (4,):
            raise ValueError(f"results need equally long arrays and boxes of four numbers, got lengths {lengths}")

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: np.ndarray | slice) -> Results:
        return Results(self.image_ids[rows], self.category_ids[rows], self.boxes_xywh[rows], self.scores[rows])

    def finite(self) -> Results:
        """Those whose box and score are all finite."""
        return self[np.isfinite(self.boxes_xywh).all(1) & np.isfinite(self.scores)]

    @classmethod
    def from_coco(cls, entries: Sequence[dict], where: str = "results") -> Results:
        """From COCO's list of ``{"image_id", "category_id", "bbox", "score"}``.

        Raises:
            DataError: an entry is not of this form; the message names ``where`` and its position from 0.
        """
        try:
            image_ids = id_array([entry["image_id"] for entry in entries])
            category_ids = np.array([entry["category_id"] for entry in entries], dtype=np.int64)
            boxes = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
            return cls(image_ids, category_ids, boxes, np.array([entry["score"] for entry in entries], dtype=np.float64))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where}: {_first_fault(entries)}") from error

    def to_coco(self) -> list[dict]:
        """COCO's list of dictionaries, plain Python values."""
        columns = (self.image_ids.tolist(), self.category_ids.tolist(), self.boxes_xywh.tolist(), self.scores.tolist())
        return [dict(zip(("image_id", "category_id", "bbox", "score"), row)) for row in zip(*columns)]

    def save(self, path: str | Path) -> None:
        """Writes COCO's results file (UTF-8 JSON), through a temporary file beside it."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(self.to_coco(), file, ensure_ascii=False)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Reads COCO's results file.

        Raises:
            DataError: no such file, no JSON, or not a list of detections.
        """
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise DataError(f"{path}: not a JSON file ({error})") from error
        if not isinstance(entries, list):
            raise DataError(f"{path}: expected a list of detections (COCO results), found a {type(entries).__name__}")
        return cls.from_coco(entries, where=str(path))


def id_array(ids: Sequence[int | str]) -> np.ndarray:
    """Image ids as (N,) int64, or as objects if any of them is no integer."""
    if all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in ids):
        return np.array(ids, dtype=np.int64)
    out = np.empty(len(ids), dtype=object)
    out[:] = ids
    return out


def _first_fault(entries: Sequence) -> str:
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict):
            return f"entry {position} is a {type(entry).__name__}; expected an object with image_id, category_id, bbox, score"
        missing = [key for key in ("image_id", "category_id", "bbox", "score") if key not in entry]
        if missing:
            return f"entry {position} has no {', '.join(missing)}"
        try:
            box = np.array(entry["bbox"], dtype=np.float64)
            float(entry["score"])
            int(entry["category_id"])
        except (TypeError, ValueError) as error:
            return f"entry {position} is not numeric ({error})"
        if box.shape != (4,):
            return f"entry {position} has bbox {entry['bbox']}; expected four numbers: left, top, width, height"
    return "entries of differing form"
