"""Reading image files: bytes to RGB, one rule for rotated photographs, and cheap checks for broken files.

OpenCV alone is no judge of a file: it returns a full-size array for a JPEG cut in half. So the end mark is looked for too.
"""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np

from mmdet.data.errors import DataError

_HEAD_BYTES = 65536
_TAIL_BYTES = 64
_PNG_END = b"IEND\xaeB`\x82"
_JPEG_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}  # ITU-T T.81, table B.1
_JPEG_SCAN = 0xDA


def read_bytes(path: str | Path) -> bytes:
    """The content of an image file, also where the path is not ASCII.

    Raises:
        DataError: the file is absent, empty or unreadable.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"image file {path} cannot be read: {error.strerror or error}") from error
    if not data:
        raise DataError(f"image file {path} is empty (0 bytes): restore it or remove it from the annotations")
    return data


def load_image(path: str | Path, declared: tuple[int, int] | None = None) -> np.ndarray:
    """(H, W, 3) uint8 RGB of an image file. ``declared`` is the (H, W) that the annotations state.

    Rotation: the photograph is turned as its EXIF tag says; if only the unturned image has the declared size, then the boxes
    were drawn on that one, and it is taken. Without ``declared`` the tag is obeyed.

    Raises:
        DataError: the file is absent, broken or cut short, or neither form has the declared size.
    """
    data = read_bytes(path)
    fault = image_fault(data)
    if fault:
        raise DataError(f"image file {path} {fault}: restore it or remove it from the annotations")
    image = _decode(data, cv2.IMREAD_COLOR, path)
    if declared is not None and image.shape[:2] != tuple(declared):
        unturned = _decode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION, path)
        if unturned.shape[:2] != tuple(declared):
            raise DataError(
                f"image file {path} is {_size_text(image.shape)} but its annotations say {_size_text(declared)}: the boxes may "
                "belong to another version of the image; correct width and height in the annotations, or the file"
            )
        image = unturned
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def _decode(data: bytes, flags: int, path: str | Path) -> np.ndarray:
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise DataError(f"image file {path} cannot be decoded: {' '.join(str(error).split())}") from error
    if image is None:
        raise DataError(f"image file {path} is no image that OpenCV can read: it starts with {data[:12]!r}")
    return image


def _size_text(shape) -> str:
    return f"{shape[1]}x{shape[0]} px (width x height)"


def image_fault(data: bytes) -> str | None:
    """What is wrong with the frame of a JPEG, PNG, BMP or WebP file, as the rest of a sentence; None if nothing is."""
    if data[:2] == b"\xff\xd8":
        _, scan = _walk_jpeg(data)
        # Inside a scan 0xFF is always followed by 0 or a restart mark (ITU-T T.81, B.1.1.5), so the end mark is unmistakable.
        if scan is None or data.find(b"\xff\xd9", scan) < 0:
            return f"is a JPEG cut short at {len(data)} bytes (no end mark)"
    elif data[:4] == b"\x89PNG":
        if data.rfind(_PNG_END) < 0:
            return f"is a PNG cut short at {len(data)} bytes (no end chunk)"
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        if len(data) < struct.unpack("<I", data[4:8])[0] + 8:
            return f"is a WebP cut short at {len(data)} bytes"
    elif data[:2] == b"BM" and len(data) < int.from_bytes(data[2:6], "little"):
        return f"is a BMP cut short at {len(data)} bytes"
    return None


def _walk_jpeg(data: bytes) -> tuple[tuple[int, int] | None, int | None]:
    """The (H, W) of the frame and the offset of the first scan, None where the data end before it. Walking over the segments
    passes over a thumbnail with its own marks."""
    size, at = None, 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            break
        mark = data[at + 1]
        if mark == 0xFF:  # a fill byte
            at += 1
            continue
        if mark in _JPEG_FRAMES:
            size = struct.unpack(">HH", data[at + 5 : at + 9])
        if mark == _JPEG_SCAN:
            return size, at
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return size, None


def _header_size(head: bytes) -> tuple[int, int] | None:
    """(H, W) of the stored, unturned image from the first bytes of a JPEG or PNG file, None where they do not tell."""
    if head[:2] == b"\xff\xd8":
        return _walk_jpeg(head)[0]
    if head[:4] == b"\x89PNG" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return height, width
    return None


def file_fault(path: str | Path, declared: tuple[int, int]) -> str | None:
    """Why ``load_image`` would refuse a file, or None. Reads head and tail only; in doubt the whole file is decoded."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            file.seek(max(file.seek(0, 2) - _TAIL_BYTES, 0))
            tail = file.read()
        ended = tail.rstrip(b"\0").endswith(b"\xff\xd9") if head[:2] == b"\xff\xd8" else _PNG_END in tail
        if ended and _header_size(head) == tuple(declared):
            return None
        load_image(path, declared)
    except OSError as error:
        return f"image file {path} cannot be read: {error.strerror or error}"
    except DataError as error:
        return str(error)
    return None
