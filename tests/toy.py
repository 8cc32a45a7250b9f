"""TOY(n, C): n grey images of 160 x 120 px with one filled rectangle each, as a COCO data directory."""

import json
from pathlib import Path

import cv2
import numpy as np

COLOURS = ((220, 40, 40), (40, 200, 60), (50, 80, 230))


def toy_box(k: int) -> list[int]:
    """x, y, w, h px of image k (1-based)."""
    return [10 + 6 * (k % 9), 8 + 5 * (k % 7), 40, 30]


def toy_image(k: int, num_classes: int) -> np.ndarray:
    """(120, 160, 3) uint8 RGB of image k."""
    image = np.full((120, 160, 3), 127, np.uint8)
    x, y, w, h = toy_box(k)
    image[y : y + h, x : x + w] = COLOURS[(k - 1) % num_classes % len(COLOURS)]
    return image


def toy_coco(n: int, num_classes: int, category_ids=None, names=None) -> dict:
    """The COCO content of TOY(n, C): image id = annotation id = k, category ids 1..C named c1..cC unless given."""
    ids = list(category_ids or range(1, num_classes + 1))
    names = list(names or (f"c{i + 1}" for i in range(num_classes)))
    return {
        "info": {},
        "licenses": [],
        "images": [{"id": k, "file_name": f"t_{k:04d}.png", "width": 160, "height": 120} for k in range(1, n + 1)],
        "annotations": [
            {
                "id": k,
                "image_id": k,
                "category_id": ids[(k - 1) % num_classes],
                "bbox": toy_box(k),
                "area": 1200,
                "iscrowd": 0,
                "segmentation": [],
            }
            for k in range(1, n + 1)
        ],
        "categories": [{"id": i, "name": name, "supercategory": ""} for i, name in zip(ids, names)],
    }


def make_toy(path, n: int, num_classes: int, category_ids=None, names=None, edit=None) -> Path:
    """Writes TOY(n, C) to ``path`` (``images/``, ``annotations/instances_{train,val}.json``, both splits the same images).

    ``edit(coco, split)``, if given, changes the content of a split in place before it is written. Returns ``path``.
    """
    path = Path(path)
    (path / "images").mkdir(parents=True, exist_ok=True)
    (path / "annotations").mkdir(exist_ok=True)
    for k in range(1, n + 1):
        write_image(path / "images" / f"t_{k:04d}.png", toy_image(k, num_classes))
    for split in ("train", "val"):
        coco = toy_coco(n, num_classes, category_ids, names)
        if edit is not None:
            edit(coco, split)
        write_coco(path, coco, split)
    return path


def write_coco(path, coco: dict, split: str) -> Path:
    """Writes one annotation file of a data directory and returns its path."""
    file = Path(path) / "annotations" / f"instances_{split}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(coco, ensure_ascii=False), encoding="utf-8")
    return file


def write_image(path, rgb: np.ndarray) -> None:
    """Writes (H, W, 3) uint8 RGB in the format of the file's suffix, also where the path is not ASCII."""
    ok, data = cv2.imencode(Path(path).suffix, cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR))
    if not ok:
        raise OSError(f"{path}: OpenCV could not encode the image")
    data.tofile(path)
