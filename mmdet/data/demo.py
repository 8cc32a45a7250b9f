"""The demo data set: a small COCO-format set of painted scenes with exact boxes, the same bytes on every machine.

Scenes are painted in integers only, with draws from PCG64's raw stream (NumPy promises that stream for good, not the one of
``Generator``), and written as palette PNGs of stored, uncompressed blocks, so that no library version can change a byte.
A pixel is ``16 * hue + shade``: sixteen hues of sixteen shades make the palette.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmdet.data.generated import Draws, write_once

VERSION = 1
SIZE = 320  # px, height and width of every image
CLASS_NAMES = ("red disc", "blue disc", "red square", "yellow triangle", "green cross")
EMPTY_EVERY = 8  # one image in eight has no object
MARKER = "demo.json"

_CLASS_SHAPES = ("disc", "disc", "square", "triangle", "cross")
_CLASS_HUES = ((0, 1), (2, 3), (0, 1), (4, 5), (6, 7))
_MUTED = range(8, 16)
_HUES = (  # RGB at full shade: two variants of each object colour, then the muted ones of the background
    ((255, 45, 40), (240, 30, 75), (60, 100, 255), (40, 140, 255), (255, 225, 40), (250, 200, 20), (50, 225, 70), (80, 235, 40))
    + ((200, 200, 200), (190, 175, 150), (150, 165, 185), (165, 180, 150))
    + ((180, 155, 170), (150, 140, 130), (130, 150, 150), (215, 205, 190))
)
_SIDES = (16, 18, 20, 23, 26, 30, 34, 38, 43, 48, 54, 60, 67, 75, 84, 94, 105, 118, 132, 146, 160)  # px, evenly in log
_NUM_OBJECTS = (1, 2, 3, 3, 4, 4, 5)
_HIDDEN_RANGE = (22, 48)  # percent of an object that its occluder may hide


@dataclass
class Thing:
    """One painted object. ``mask`` is the object as if nothing lay over it, inside its box."""

    label: int
    x: int  # px of the box's left edge
    y: int
    mask: np.ndarray  # (h, w) bool, touches all four sides

    @property
    def box(self) -> tuple[int, int, int, int]:
        """xyxy px."""
        return self.x, self.y, self.x + self.mask.shape[1], self.y + self.mask.shape[0]


@dataclass
class Scene:
    """One image of the set and what is in it. Things lie over each other in list order, the last one on top."""

    pixels: np.ndarray  # (320, 320) uint8 palette indices
    things: list[Thing] = field(default_factory=list)
    crowd: list[Thing] = field(default_factory=list)  # annotated as one region

    def rgb(self) -> np.ndarray:
        """(320, 320, 3) uint8 RGB."""
        return palette()[self.pixels]


def palette() -> np.ndarray:
    """(256, 3) uint8 RGB of the palette indices."""
    shades = np.arange(16)[None, :, None] + 5
    return (np.array(_HUES)[:, None, :] * shades // 20).astype(np.uint8).reshape(256, 3)


def shape_mask(shape: str, width: int, height: int) -> np.ndarray:
    """(height, width) bool mask of a shape that touches all four sides of its box."""
    x = np.abs(2 * np.arange(width, dtype=np.int64)[None, :] + 1 - width)  # twice the distance to the centre line
    y = np.abs(2 * np.arange(height, dtype=np.int64)[:, None] + 1 - height)
    if shape == "disc":
        return (x * height) ** 2 + (y * width) ** 2 <= (width * height) ** 2
    if shape == "triangle":
        return x <= np.maximum((np.arange(height)[:, None] + 1) * width // height, 1)
    if shape == "cross":
        return (3 * x <= width) | (3 * y <= height)
    if shape == "square":
        return np.ones((height, width), bool)
    raise ValueError(f"unknown shape {shape!r}: expected disc, square, triangle or cross")


def hidden_shares(things: list[Thing]) -> list[float]:
    """Of each thing, the share of its pixels that lies under later ones."""
    owner = np.full((SIZE, SIZE), -1)
    for number, thing in enumerate(things):
        _window(owner, thing)[thing.mask] = number
    return [1 - np.count_nonzero(owner == i) / np.count_nonzero(t.mask) for i, t in enumerate(things)]


def _window(canvas: np.ndarray, thing: Thing) -> np.ndarray:
    x1, y1, x2, y2 = thing.box
    return canvas[y1:y2, x1:x2]


def _noise(draws: Draws, cell: int) -> np.ndarray:
    """(320, 320) int64 value noise in [0, 255], linear between draws ``cell`` px apart."""
    grid = draws.array(0, 256, (SIZE // cell + 2, SIZE // cell + 2))
    index, part = np.arange(SIZE) // cell, np.arange(SIZE) % cell
    rows = grid[index] * (cell - part)[:, None] + grid[index + 1] * part[:, None]
    return (rows[:, index] * (cell - part) + rows[:, index + 1] * part) // (cell * cell)


def _background(draws: Draws) -> np.ndarray:
    """A textured ground of two muted hues, strewn with muted shapes and lines."""
    texture = (4 * _noise(draws, 64) + 3 * _noise(draws, 16) + 2 * _noise(draws, 4) + draws.array(0, 256, (SIZE, SIZE))) // 10
    shade = texture * 13 // 256
    first, second = draws.choice(_MUTED), draws.choice(_MUTED)
    pixels = np.where(_noise(draws, 32) > 128, first, second) * 16 + shade
    for _ in range(draws.integer(14, 27)):
        width, height = draws.integer(8, 110), draws.integer(8, 110)
        mask = shape_mask(draws.choice(("disc", "square", "triangle", "cross")), width, height)
        clutter = Thing(-1, draws.integer(0, SIZE - width), draws.integer(0, SIZE - height), mask)
        light = draws.integer(-4, 5)
        fill = draws.choice(_MUTED) * 16 + np.clip(_window(shade, clutter) + light, 0, 15)
        _window(pixels, clutter)[mask] = fill[mask]
    for _ in range(draws.integer(4, 9)):
        pixels = np.where(_line_mask(draws), draws.choice(_MUTED) * 16 + draws.integer(0, 16), pixels)
    return pixels.astype(np.uint8)


def _line_mask(draws: Draws) -> np.ndarray:
    """(320, 320) bool, a straight line across the image, 2 to 6 px thick."""
    x0, y0 = draws.integer(0, SIZE), draws.integer(0, SIZE)
    dx, dy = draws.integer(-64, 65), draws.integer(1, 65)
    across = (np.arange(SIZE)[None, :] - x0) * dy - (np.arange(SIZE)[:, None] - y0) * dx
    return 4 * across**2 <= draws.integer(2, 7) ** 2 * (dx * dx + dy * dy)


def _paint(draws: Draws, pixels: np.ndarray, thing: Thing) -> None:
    """Bright and grained inside, with a dark rim that parts it from whatever it touches."""
    height, width = thing.mask.shape
    rim = 1 if min(height, width) < 40 else 2
    padded = np.pad(thing.mask, rim)
    inner = thing.mask.copy()
    for step in range(1, rim + 1):
        for dy, dx in ((-step, 0), (step, 0), (0, -step), (0, step)):
            inner &= padded[rim + dy : rim + dy + height, rim + dx : rim + dx + width]
    hue = 16 * draws.choice(_CLASS_HUES[thing.label])
    shade = draws.integer(11, 14) + draws.array(-2, 3, (height, width))
    window = _window(pixels, thing)
    window[thing.mask] = hue + draws.integer(0, 2)
    window[inner] = hue + shade[inner]


def _draw_thing(draws: Draws, min_side: int = 16, max_side: int = 160) -> Thing:
    sides = [s for s in _SIDES if min_side <= s <= max_side]
    width = draws.choice(sides)
    height = min(max(width * draws.integer(80, 126) // 100, 16), 160)
    label = draws.integer(0, len(CLASS_NAMES))
    mask = shape_mask(_CLASS_SHAPES[label], width, height)
    return Thing(label, draws.integer(0, SIZE - width + 1), draws.integer(0, SIZE - height + 1), mask)


def _box_share(box, other) -> float:
    """The share of ``box`` that ``other`` covers."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return max(width, 0) * max(height, 0) / ((box[2] - box[0]) * (box[3] - box[1]))


def _apart(thing: Thing, others: list[Thing]) -> bool:
    return all(max(_box_share(thing.box, o.box), _box_share(o.box, thing.box)) < 0.08 for o in others)


def _place_free(draws: Draws, things: list[Thing], crowd: list[Thing]) -> Thing | None:
    for _ in range(60):
        thing = _draw_thing(draws)
        if _apart(thing, things + crowd):
            return thing
    return None


def _place_over(draws: Draws, things: list[Thing], crowd: list[Thing], free: list[int]) -> tuple[Thing, int] | None:
    """A larger thing that hides a part of one of the ``free`` things, and the number of that one."""
    number = draws.choice(free)
    victim = things[number]
    side = max(victim.mask.shape)
    if side > 100:
        return None
    others = [t for i, t in enumerate(things) if i != number] + crowd
    for _ in range(80):
        thing = _draw_thing(draws, min_side=side * 5 // 4, max_side=side * 5 // 2)
        height, width = thing.mask.shape
        x1, y1, x2, y2 = victim.box
        thing.x = min(max(draws.integer(x1 - width + 1, x2), 0), SIZE - width)
        thing.y = min(max(draws.integer(y1 - height + 1, y2), 0), SIZE - height)
        hidden = 100 * hidden_shares([victim, thing])[0]
        if _HIDDEN_RANGE[0] <= hidden <= _HIDDEN_RANGE[1] and _box_share(thing.box, victim.box) < 0.18 and _apart(thing, others):
            return thing, number
    return None


def _crowd(draws: Draws) -> list[Thing]:
    """A heap of small things of one class inside 120 x 90 px."""
    label, left, top = draws.integer(0, len(CLASS_NAMES)), draws.integer(10, 190), draws.integer(10, 220)
    heap = []
    for _ in range(24):
        mask = shape_mask(_CLASS_SHAPES[label], 20, 20)
        heap.append(Thing(label, left + draws.integer(0, 101), top + draws.integer(0, 71), mask))
    return heap


def make_scenes(seed: int, split: str, count: int) -> list[Scene]:
    """The ``count`` scenes of one split; image 0 holds the crowd region, image 1 and every eighth after it no object."""
    scenes, total, hidden = [], 0, 0
    for index in range(count):
        draws = Draws(VERSION, seed, {"train": 0, "val": 1}[split], index)
        scene = Scene(_background(draws), crowd=_crowd(draws) if index == 0 else [])
        free: list[int] = []
        wanted = 0 if index % EMPTY_EVERY == 1 else draws.choice(_NUM_OBJECTS)
        for _ in range(wanted):
            over = _place_over(draws, scene.things, scene.crowd, free) if free and 3 * hidden < total + 1 else None
            thing = over[0] if over else _place_free(draws, scene.things, scene.crowd)
            if thing is None:
                continue
            if over:
                free.remove(over[1])
                hidden += 1
            else:
                free.append(len(scene.things))
            scene.things.append(thing)
            total += 1
        for thing in scene.crowd + scene.things:
            _paint(draws, scene.pixels, thing)
        scenes.append(scene)
    return scenes


def encode_png(pixels: np.ndarray) -> bytes:
    """A palette PNG of (H, W) uint8 indices; stored deflate blocks, so the bytes depend on nothing but the pixels."""
    height, width = pixels.shape
    raw = np.pad(pixels, ((0, 0), (1, 0))).tobytes()  # filter type 0 before every row
    blocks = [raw[i : i + 65535] for i in range(0, len(raw), 65535)]
    stored = [struct.pack("<BHH", i + 1 == len(blocks), len(b), len(b) ^ 0xFFFF) + b for i, b in enumerate(blocks)]
    data = b"\x78\x01" + b"".join(stored) + struct.pack(">I", zlib.adler32(raw))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette().tobytes()), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def _annotations(scene: Scene, image_id: int, first_id: int) -> list[dict]:
    rows = []
    for thing in scene.things:
        rows.append((thing.label, thing.box, int(np.count_nonzero(thing.mask)), 0))
    if scene.crowd:
        boxes = np.array([t.box for t in scene.crowd])
        union = (*boxes[:, :2].min(0).tolist(), *boxes[:, 2:].max(0).tolist())
        rows.append((scene.crowd[0].label, union, (union[2] - union[0]) * (union[3] - union[1]), 1))
    return [
        {
            "id": first_id + i,
            "image_id": image_id,
            "category_id": label + 1,
            "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
            "area": area,
            "iscrowd": crowd,
        }
        for i, (label, box, area, crowd) in enumerate(rows)
    ]


def _write_split(folder: Path, seed: int, split: str, count: int) -> None:
    images, annotations = [], []
    for index, scene in enumerate(make_scenes(seed, split, count)):
        name = f"{split}_{index:04d}.png"
        (folder / "images" / name).write_bytes(encode_png(scene.pixels))
        images.append({"id": index + 1, "file_name": name, "width": SIZE, "height": SIZE})
        annotations += _annotations(scene, index + 1, len(annotations) + 1)
    content = {
        "info": {"description": f"mmdet demo scenes, version {VERSION}, {split}, seed {seed}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASS_NAMES)],
    }
    text = json.dumps(content, indent=1, sort_keys=True)
    (folder / "annotations" / f"instances_{split}.json").write_bytes(text.encode("ascii"))


def digest(directory: str | Path) -> str:
    """sha256 over names and bytes of all files of a demo set, its marker left out."""
    total = hashlib.sha256()
    folder = Path(directory)
    for path in sorted((*folder.glob("annotations/*"), *folder.glob("images/*")), key=lambda p: p.relative_to(folder).as_posix()):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def make_demo(directory: str | Path, num_train: int = 240, num_val: int = 60, seed: int = 0) -> Path:
    """Writes the demo set in COCO's layout (``annotations/instances_{train,val}.json``, ``images/``), seconds of work.

    A complete set of the same version and arguments that lies there already is left as it is; a damaged or different one is
    replaced. Several processes may call it at once: the set appears by one rename. Returns the directory.

    Raises:
        DataError: the directory holds files that are no demo set.
    """
    facts = {"version": VERSION, "num_train": num_train, "num_val": num_val, "seed": seed}

    def write(folder: Path) -> None:
        for part in ("annotations", "images"):
            (folder / part).mkdir()
        _write_split(folder, seed, "train", num_train)
        _write_split(folder, seed, "val", num_val)

    return write_once(directory, MARKER, facts, digest, write, "the demo data set")
