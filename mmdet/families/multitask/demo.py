"""Generated data for multi-task demos: two detection sets with label spaces of their own, and images sorted by colour.

All three are made of the painted scenes of :mod:`mmdet.data.demo`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from mmdet.data.demo import CLASS_NAMES, Scene, make_demo, make_scenes
from mmdet.data.generated import write_once

VERSION = 1
COLOURS = ("blue", "green", "red", "yellow")  # sorted, as class folders are read
COLOUR_OF = ("red", "blue", "red", "yellow", "green")  # of each class of the scenes
DISCS_AND_SQUARES = ("red disc", "blue disc", "red square")
MARKER = "tasks.json"


def make_task_demo(directory: str | Path, num_train: int = 160, num_val: int = 40) -> Path:
    """Writes ``shapesA`` (three of the scenes' classes; COCO layout), ``shapesB`` (all five, other scenes; COCO layout) and
    ``colours`` (``<split>/<colour>/*.png``, 48 x 48 px, one shape each) below ``directory``, seconds of work, unless a complete
    set of the same version and sizes is there already. Returns the directory.
    """
    facts = {"version": VERSION, "num_train": num_train, "num_val": num_val}

    def write(folder: Path) -> None:
        make_demo(folder / "shapesB", num_train, num_val, seed=1)
        _write_part(make_demo(folder / "scenesA", num_train, num_val, seed=0), folder / "shapesA", DISCS_AND_SQUARES)
        for split, count in (("train", num_train), ("val", num_val)):
            write_colours(folder / "colours" / split, make_scenes(2, split, count))

    return write_once(directory, MARKER, facts, _digest, write, "the demo data of several tasks")


def _digest(folder: Path) -> str:
    """Of names and sizes: what a damaged or foreign set would differ in."""
    files = sorted(p for name in ("shapesA", "shapesB", "scenesA", "colours") for p in (folder / name).rglob("*") if p.is_file())
    lines = [f"{p.relative_to(folder).as_posix()} {p.stat().st_size}" for p in files]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _write_part(scenes: Path, folder: Path, names: Sequence[str]) -> None:
    """The same images with the classes ``names`` alone; the others are background."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "annotations").mkdir(parents=True)
    shutil.copytree(scenes / "images", folder / "images")
    number = {CLASS_NAMES.index(name) + 1: i + 1 for i, name in enumerate(names)}
    for split in ("train", "val"):
        content = json.loads((scenes / "annotations" / f"instances_{split}.json").read_text())
        kept = [a for a in content["annotations"] if a["category_id"] in number]
        content["annotations"] = [{**a, "category_id": number[a["category_id"]]} for a in kept]
        content["categories"] = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(names)]
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def write_colours(folder: Path, scenes: Sequence[Scene], side: int = 48) -> None:
    """Cuts every shape, with a margin, out of the scenes and sorts it by its colour: ``<folder>/<colour>/NNNN_NN.png``."""
    shutil.rmtree(folder, ignore_errors=True)
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
    for number, scene in enumerate(scenes):
        image = scene.rgb()
        for i, thing in enumerate(scene.things):
            x1, y1, x2, y2 = thing.box
            margin = max(x2 - x1, y2 - y1) // 4
            part = image[max(y1 - margin, 0) : y2 + margin, max(x1 - margin, 0) : x2 + margin]
            part = cv2.resize(np.ascontiguousarray(part[..., ::-1]), (side, side), interpolation=cv2.INTER_AREA)
            name = folder / COLOUR_OF[thing.label] / f"{number:04d}_{i:02d}.png"
            cv2.imencode(".png", part)[1].tofile(name)
