"""Moving shapes: generated videos in GOT-10k's layout, the same bytes on every machine.

In front of a textured ground move three things (rectangles and ellipses of two colours) with constant velocity; they bounce off
the borders and slowly change their size. The target is the one in the middle of the stack: one passes below it, one above.
No random function of NumPy's ``Generator`` is used (they may change between versions), only raw bits, and only the arithmetic
that IEEE 754 fixes; PNG files hold 16 colours in stored deflate blocks.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdet.data.generated import Draws, write_once

VERSION = 1
MARKER = "shapes.json"
_TRAIN_SEED, _VAL_SEED = 0, 999
_GROUND = 10  # colours of the ground; the other six belong to the three things
_SIDES = (20.0, 46.0)  # px of a thing at scale 1, in a frame of 180 px height
_SCALES = (0.75, 1.35)
_GROWTH = 0.012  # largest change of the scale in a frame
_SPEED = 4.5  # largest px per frame and axis


@dataclass
class _Thing:
    """One moving shape; centre and velocity in px."""

    x: float
    y: float
    width: float  # at scale 1
    height: float
    velocity: list[float]
    scale: float
    growth: float
    is_ellipse: bool
    pattern: int

    @property
    def box(self) -> np.ndarray:
        """(4,) float64 xyxy."""
        half_width, half_height = self.scale * self.width / 2, self.scale * self.height / 2
        return np.array([self.x - half_width, self.y - half_height, self.x + half_width, self.y + half_height])

    def move(self, size: tuple[int, int]) -> None:
        """One frame on, inside an image of ``size`` (w, h)."""
        self.scale += self.growth
        if not _SCALES[0] <= self.scale <= _SCALES[1]:
            self.scale, self.growth = min(max(self.scale, _SCALES[0]), _SCALES[1]), -self.growth
        self.x, self.velocity[0] = _bounce(self.x + self.velocity[0], self.velocity[0], self.scale * self.width / 2, size[0])
        self.y, self.velocity[1] = _bounce(self.y + self.velocity[1], self.velocity[1], self.scale * self.height / 2, size[1])

    def paint(self, pixels: np.ndarray, color: int) -> np.ndarray:
        """Draws on (H, W) uint8 indices, in place, with ``color`` and the next one; returns the (H, W) bool mask of its pixels,
        those whose centre it covers."""
        x1, y1, x2, y2 = self.box
        u = (np.arange(pixels.shape[1]) + 0.5 - x1) / (x2 - x1)  # 0 to 1 over the width
        v = ((np.arange(pixels.shape[0]) + 0.5 - y1) / (y2 - y1))[:, None]
        inside = (u >= 0) & (u < 1) & (v >= 0) & (v < 1)
        if self.is_ellipse:
            inside = (2 * u - 1) * (2 * u - 1) + (2 * v - 1) * (2 * v - 1) <= 1
        middle = (np.abs(2 * u - 1) < 0.5) & (np.abs(2 * v - 1) < 0.5)
        second = (u < 0.5, v < 0.5, middle, ((3 * u).astype(int) + (3 * v).astype(int)) % 2 == 0)[self.pattern]
        pixels[inside] = color
        pixels[inside & second] = color + 1
        return inside


def _bounce(position: float, velocity: float, half: float, limit: int) -> tuple[float, float]:
    """Back from the border by as much as it was passed."""
    if position < half:
        position, velocity = min(2 * half - position, limit - half), abs(velocity)
    elif position > limit - half:
        position, velocity = max(2 * (limit - half) - position, half), -abs(velocity)
    return position, velocity


@dataclass
class ShapesVideo:
    """One generated video of F frames."""

    palette: np.ndarray  # (16, 3) uint8 RGB
    pixels: np.ndarray  # (F, H, W) uint8 indices of the palette
    boxes: np.ndarray  # (F, 4) float64 xyxy px, exact
    cover: np.ndarray  # (F,) int64, visible eighths of the target, rounded up

    def frames(self) -> Iterator[np.ndarray]:
        """(H, W, 3) uint8 RGB, one after the other."""
        for pixels in self.pixels:
            yield self.palette[pixels]


@dataclass(frozen=True)
class MovingShapes:
    """A set of generated videos: a pure function of its fields and the number of the video."""

    videos: int = 80
    frames: int = 30
    size: tuple[int, int] = (240, 180)  # (w, h) px
    seed: int = 0

    def video(self, number: int) -> ShapesVideo:
        chance = Draws(VERSION, self.seed, number)
        palette, ground = _palette(chance), _ground(chance, self.size)
        things = _things(chance, self.size)
        pixels = np.empty((self.frames, self.size[1], self.size[0]), np.uint8)
        boxes, cover = np.empty((self.frames, 4)), np.empty(self.frames, np.int64)
        for frame in range(self.frames):
            pixels[frame] = ground
            masks = [thing.paint(pixels[frame], _GROUND + 2 * place) for place, thing in enumerate(things)]
            boxes[frame] = things[1].box
            visible, whole = np.count_nonzero(masks[1] & ~masks[2]), np.count_nonzero(masks[1])
            cover[frame] = -(-8 * visible // whole)
            for thing in things:
                thing.move(self.size)
        return ShapesVideo(palette, pixels, boxes, cover)

    def write(self, folder: Path) -> None:
        """One split in GOT-10k's layout: ``list.txt`` and a folder per video."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"shapes_{number:04d}" for number in range(self.videos)]
        for number, name in enumerate(names):
            video = self.video(number)
            images = [encode_png(pixels, video.palette) for pixels in video.pixels]
            write_video(folder / name, images, video.boxes, video.cover, self.size)
        (folder / "list.txt").write_text("".join(f"{name}\n" for name in names), encoding="ascii", newline="\n")


def write_video(folder: Path, images: list[bytes], boxes: np.ndarray, cover: np.ndarray, size: tuple[int, int]) -> None:
    """A video in GOT-10k's layout: PNG files, boxes (F, 4) xyxy px as ``x,y,w,h`` with four decimals, labels, ``size`` (w, h)."""
    folder.mkdir()
    for number, image in enumerate(images, start=1):
        (folder / f"{number:08d}.png").write_bytes(image)
    sizes = boxes[:, 2:] - boxes[:, :2]
    lines = [",".join(f"{value:.4f}" for value in row) for row in np.concatenate([boxes[:, :2], sizes], 1)]
    cut = (boxes[:, :2] < 0).any(1) | (boxes[:, 2:] > np.array(size)).any(1)
    texts = {
        "groundtruth.txt": lines,
        "cover.label": [str(int(value)) for value in cover],
        "absence.label": [str(int(value == 0)) for value in cover],
        "cut_by_image.label": [str(int(value)) for value in cut],
        "meta_info.ini": ["[METAINFO]", "url: generated", f"resolution: ({size[0]}, {size[1]})", "object_class: shape"],
    }
    for name, rows in texts.items():
        (folder / name).write_text("".join(f"{row}\n" for row in rows), encoding="ascii", newline="\n")


def _palette(chance: Draws) -> np.ndarray:
    """A ground between two muted colours, and three pairs of colours that may be anything."""
    ends = chance.array(50, 190, (2, 3))
    steps = np.arange(_GROUND)[:, None]
    ground = (ends[0] * (_GROUND - 1 - steps) + ends[1] * steps) // (_GROUND - 1)
    return np.concatenate([ground, chance.array(0, 256, (6, 3))]).astype(np.uint8)


def _ground(chance: Draws, size: tuple[int, int]) -> np.ndarray:
    """(H, W) uint8 texture: value noise, grain, and still shapes like things in the ground's colours."""
    texture = (5 * _noise(chance, size, 48) + 3 * _noise(chance, size, 12) + 2 * chance.array(0, 256, size[::-1])) // 10
    pixels = (texture * _GROUND // 256).astype(np.uint8)
    for _ in range(chance.integer(6, 15)):
        clutter = _thing(chance, size)
        painted = np.zeros_like(pixels)
        inside = clutter.paint(painted, 1)
        shift = chance.integer(-3, 4)
        pixels[inside] = np.clip(pixels[inside].astype(int) + shift * painted[inside].astype(int), 0, _GROUND - 1)
    return pixels


def _noise(chance: Draws, size: tuple[int, int], cell: int) -> np.ndarray:
    """(H, W) int64 in [0, 255], linear between draws ``cell`` px apart."""
    grid = chance.array(0, 256, (size[1] // cell + 2, size[0] // cell + 2))
    row, column = np.arange(size[1]), np.arange(size[0])
    down, across = (row % cell)[:, None], column % cell
    rows = grid[row // cell] * (cell - down) + grid[row // cell + 1] * down
    return (rows[:, column // cell] * (cell - across) + rows[:, column // cell + 1] * across) // (cell * cell)


def _things(chance: Draws, size: tuple[int, int]) -> list[_Thing]:
    """The one below, the target, the one above. At the start nothing touches the target: a tracker has to see what it is."""
    target, others = _thing(chance, size), []
    while len(others) < 2:
        other = _thing(chance, size)
        gap = np.maximum(other.box[:2] - target.box[2:], target.box[:2] - other.box[2:])
        if gap.max() > 0:
            others.append(other)
    return [others[0], target, others[1]]


def _thing(chance: Draws, size: tuple[int, int]) -> _Thing:
    unit = min(size) / 180
    width = chance.uniform(*_SIDES) * unit
    height = min(max(width * chance.uniform(0.6, 1.67), _SIDES[0] * unit), _SIDES[1] * unit)
    return _Thing(
        x=chance.uniform(width, size[0] - width),
        y=chance.uniform(height, size[1] - height),
        width=width,
        height=height,
        velocity=[chance.uniform(-_SPEED, _SPEED) * unit for _ in range(2)],
        scale=chance.uniform(0.85, 1.15),
        growth=chance.uniform(-_GROWTH, _GROWTH),
        is_ellipse=chance.integer(0, 2) == 1,
        pattern=chance.integer(0, 4),
    )


def encode_png(pixels: np.ndarray, palette: np.ndarray) -> bytes:
    """A PNG of (H, W) uint8 indices below 16 and their (16, 3) uint8 RGB colours. Its bytes depend on nothing but these."""
    height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, width % 2)))
    packed = padded[:, ::2] << 4 | padded[:, 1::2]
    raw = np.pad(packed, ((0, 0), (1, 0))).tobytes()  # filter type 0 before every row
    blocks = [raw[i : i + 65535] for i in range(0, len(raw), 65535)]
    stored = [struct.pack("<BHH", i + 1 == len(blocks), len(b), len(b) ^ 0xFFFF) + b for i, b in enumerate(blocks)]
    data = b"\x78\x01" + b"".join(stored) + struct.pack(">I", zlib.adler32(raw))
    header = struct.pack(">IIBBBBB", width, height, 4, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


# -- the demo set -------------------------------------------------------------------------------------------------------------


def make_shapes(directory: str | Path, train: tuple[int, int] = (80, 30), val: tuple[int, int] = (10, 80), seed: int = 0) -> Path:
    """Writes ``train/`` and ``val/`` of (videos, frames) each in GOT-10k's layout, seconds of work. Returns the directory.

    A complete set of the same version and arguments that lies there already is left as it is; a damaged or different one is
    replaced. Several processes may call it at once: the set appears by one rename.

    Raises:
        DataError: the directory holds files that are no set of moving shapes.
    """
    facts = {"version": VERSION, "train": list(train), "val": list(val), "seed": seed}

    def write(folder: Path) -> None:
        MovingShapes(*train, seed=seed + _TRAIN_SEED).write(folder / "train")
        MovingShapes(*val, seed=seed + _VAL_SEED).write(folder / "val")

    return write_once(directory, MARKER, facts, _digest, write, "the generated videos")


def _digest(folder: Path) -> str:
    """sha256 over names and sizes of all files and the content of the texts; images are not read again at every start."""
    total = hashlib.sha256()
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names if name != MARKER]
    for path in sorted(files, key=lambda p: p.relative_to(folder).as_posix()):
        total.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
        if path.suffix != ".png":
            total.update(path.read_bytes())
    return total.hexdigest()
