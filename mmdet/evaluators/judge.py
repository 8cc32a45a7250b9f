"""Average precision by COCO's definition, computed by faster-coco-eval.

The numbers equal pycocotools' to rounding. What differs is only the reading of the result: the summary is right for any
``max_dets`` (pycocotools' own reads AP at 100 detections and gives -1 where that number is not evaluated), and what no
ground truth defines is NaN instead of -1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from loguru import logger

from mmdet.data.errors import DataError
from mmdet.evaluators.evaluator import Evaluation
from mmdet.evaluators.results import Results, id_array

AREAS = ("", "s", "m", "l")  # all, < 32^2, 32^2 to 96^2, > 96^2 px, in the order of the library's area ranges
STANDARD_LIMITS = (1, 10, 100)  # detections per image and class, of AR1, AR10, AR100


def judge(
    ground_truth: dict,
    results: Results | Sequence[dict],
    max_dets: int = 100,
    class_names: Sequence[str] | None = None,
) -> Evaluation:
    """Compares detections with the ground truth of a data set.

    Args:
        ground_truth: COCO's ``images``, ``annotations``, ``categories``. Annotation ids are not used, a missing ``area`` is
            width times height, a missing ``iscrowd`` 0; image ids may be integers or strings. Boxes without area are not
            removed here (each costs recall: the readers of ``mmdet.data`` drop them).
        results: detections with the same image and category ids. Entries with a NaN or infinity are dropped, and those of
            categories that the ground truth does not list are not counted; both are logged with their number.
        max_dets: how many detections per image and class count, best first, in all metrics but AR1, AR10 and AR100.
        class_names: names for ``per_class``, by ascending category id; default: the ground truth's names.

    Returns:
        ``metrics``: AP (IoU 0.50 to 0.95), AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm, ARl, each in [0, 1], and
        ``AR<max_dets>`` where that is none of them. NaN is "undefined": no ground truth of that kind. ``per_class[name]``:
        AP, AP50, AP75, AR100, and ``objects`` and ``detections``, their numbers.

    Raises:
        DataError: a detection belongs to an image that the ground truth does not have.
        ValueError: ``max_dets`` is below 1, or ``class_names`` are not as many as categories.
    """
    if max_dets < 1:
        raise ValueError(f"max_dets is {max_dets}; expected at least 1")
    results = results if isinstance(results, Results) else Results.from_coco(list(results))
    usable = results.finite()
    if len(usable) < len(results):
        logger.warning(f"{len(results) - len(usable)} detections with a NaN or infinite box or score were dropped")
    image_ids = _ordered_ids(ground_truth["images"])
    category_ids = np.unique(np.array([category["id"] for category in ground_truth["categories"]], dtype=np.int64))
    names = _class_names(ground_truth["categories"], category_ids, class_names)
    truth = _truth_entries(ground_truth["annotations"], image_ids, category_ids)
    found = _detection_entries(usable, image_ids, category_ids)
    objects = Counter(entry["category_id"] for entry in truth if not entry["iscrowd"])
    if objects:
        table = _evaluate(truth, found, len(image_ids), len(category_ids), max_dets)
    else:
        table = _Table.undefined(len(category_ids), max_dets)
    detected = Counter(entry["category_id"] for entry in found)
    per_class = {
        name: {**table.of_class(k), "objects": float(objects[k]), "detections": float(detected[k])}
        for k, name in enumerate(names)
    }
    return Evaluation(table.summary(), per_class)


def metric_names(max_dets: int = 100) -> tuple[str, ...]:
    """The keys of ``judge``'s metrics."""
    return tuple(_Table.undefined(0, max_dets).summary())


class _Table:
    """Precision (T, R, K, A, M) and recall (T, K, A, M) over T IoU thresholds, R recalls, K classes, A areas and M limits of
    detections; -1 where there is no ground truth."""

    def __init__(self, precision: np.ndarray, recall: np.ndarray, max_dets: int):
        self.precision = precision
        self.recall = recall
        self.max_dets = max_dets
        self.limits = _limits(max_dets)
        self.last = self.limits.index(max_dets)

    @classmethod
    def undefined(cls, num_classes: int, max_dets: int) -> _Table:
        shape = (num_classes, len(AREAS), len(_limits(max_dets)))
        return cls(np.full((10, 101, *shape), -1.0), np.full((10, *shape), -1.0), max_dets)

    def summary(self) -> dict[str, float]:
        metrics = {"AP": self._precision(), "AP50": self._precision(iou=0), "AP75": self._precision(iou=5)}
        metrics |= {f"AP{name}": self._precision(area=a) for a, name in enumerate(AREAS) if name}
        metrics |= {f"AR{limit}": _defined_mean(self.recall[:, :, 0, m]) for m, limit in enumerate(self.limits)}
        metrics |= {f"AR{name}": _defined_mean(self.recall[:, :, a, self.last]) for a, name in enumerate(AREAS) if name}
        return metrics

    def of_class(self, k: int) -> dict[str, float]:
        rows = slice(k, k + 1)
        recall = _defined_mean(self.recall[:, rows, 0, self.limits.index(100)])
        return {
            "AP": self._precision(classes=rows),
            "AP50": self._precision(iou=0, classes=rows),
            "AP75": self._precision(iou=5, classes=rows),
            "AR100": recall,
        }

    def _precision(self, iou: int | None = None, area: int = 0, classes: slice = slice(None)) -> float:
        thresholds = slice(None) if iou is None else slice(iou, iou + 1)
        return _defined_mean(self.precision[thresholds, :, classes, area, self.last])


def _limits(max_dets: int) -> list[int]:
    return sorted({*STANDARD_LIMITS, max_dets})


def _defined_mean(values: np.ndarray) -> float:
    values = values[values > -1]
    return float(values.mean()) if values.size else float("nan")


def _evaluate(truth: list[dict], found: list[dict], num_images: int, num_classes: int, max_dets: int) -> _Table:
    images = [{"id": n} for n in range(num_images)]
    categories = [{"id": k} for k in range(num_classes)]
    sides = []
    for entries in (truth, found):
        side = COCO()
        side.dataset = {"images": images, "annotations": entries, "categories": categories}
        side.createIndex()
        sides.append(side)
    run = COCOeval_faster(*sides, "bbox", print_function=lambda *_: None)
    run.params.maxDets = _limits(max_dets)
    run.evaluate()
    run.accumulate()
    shape = (num_classes, len(AREAS), len(run.params.maxDets))
    precision = np.asarray(run.eval["precision"]).reshape(10, 101, *shape)
    return _Table(precision, np.asarray(run.eval["recall"]).reshape(10, *shape), max_dets)


def _ordered_ids(images: Sequence[dict]) -> np.ndarray:
    """Unique image ids: ascending where they are numbers (equal scores are ranked in this order), else as in the file."""
    ids = id_array([image["id"] for image in images])
    return np.unique(ids) if ids.dtype != object else id_array(list(dict.fromkeys(ids.tolist())))


def _positions(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Where each of ``ids`` (D,) stands in ``table``, or -1: (D,) int64."""
    if ids.dtype == object or table.dtype == object:
        lookup = {value: n for n, value in enumerate(table.tolist())}
        return np.array([lookup.get(value, -1) for value in ids.tolist()], dtype=np.int64)
    if not len(table):
        return np.full(len(ids), -1)
    place = np.searchsorted(table, ids).clip(max=len(table) - 1)
    return np.where(table[place] == ids, place, -1)


def _truth_entries(annotations: Sequence[dict], image_ids: np.ndarray, category_ids: np.ndarray) -> list[dict]:
    """The library's form of the annotations, ids counted from 1: it takes a match with id 0 for no match."""
    images = _positions(id_array([a["image_id"] for a in annotations]), image_ids).tolist()
    categories = _positions(np.array([a["category_id"] for a in annotations], dtype=np.int64), category_ids).tolist()
    entries = []
    for annotation, image, category in zip(annotations, images, categories):
        if image < 0 or category < 0:
            continue
        box = [float(value) for value in annotation["bbox"]]
        area = float(annotation.get("area", box[2] * box[3]))
        crowd = int(annotation.get("iscrowd", 0))
        entries.append(_entry(len(entries) + 1, image, category, box, area) | {"iscrowd": crowd})
    return entries


def _detection_entries(results: Results, image_ids: np.ndarray, category_ids: np.ndarray) -> list[dict]:
    images = _positions(results.image_ids, image_ids)
    if (images < 0).any():
        raise DataError(
            f"{(images < 0).sum()} of {len(results)} detections are of images that the ground truth does not have "
            f"(image ids {_some(results.image_ids[images < 0])}); its {len(image_ids)} images are {_some(image_ids)}"
        )
    categories = _positions(results.category_ids, category_ids)
    known = categories >= 0
    if not known.all():
        logger.warning(
            f"{(~known).sum()} of {len(results)} detections are not counted: category ids {_some(results.category_ids[~known])} "
            f"are not in the ground truth, which has {_some(category_ids)}"
        )
    boxes = results.boxes_xywh[known]
    columns = (images[known], categories[known], boxes, boxes[:, 2] * boxes[:, 3], results.scores[known])
    rows = zip(range(1, len(boxes) + 1), *(column.tolist() for column in columns))
    return [{**_entry(number, n, k, box, area), "score": score, "iscrowd": 0} for number, n, k, box, area, score in rows]


def _entry(number: int, image: int, category: int, box: list[float], area: float) -> dict:
    return {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": area}


def _some(ids: np.ndarray, most: int = 5) -> str:
    distinct = list(dict.fromkeys(ids.tolist()))
    return ", ".join(map(repr, distinct[:most])) + (", ..." if len(distinct) > most else "")


def _class_names(categories: Sequence[dict], category_ids: np.ndarray, names: Sequence[str] | None) -> list[str]:
    """One distinct name per category id, ascending; a name that occurs twice carries its id."""
    ids = category_ids.tolist()
    if names is None:
        by_id = {category["id"]: str(category.get("name", category["id"])) for category in categories}
        names = [by_id[value] for value in ids]
    if len(names) != len(ids):
        raise ValueError(f"{len(names)} class names for {len(ids)} categories; expected one for each")
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} (id {value})" for name, value in zip(names, ids)]
