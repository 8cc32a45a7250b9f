"""The frames of a video file or of a folder of images, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from loguru import logger

from mmdet.data.errors import DataError
from mmdet.data.image_io import load_image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FOLDER_FPS = 25.0  # frames per second that a folder of images is shown with


class FrameReader:
    """Frames in order, read when asked for; can be iterated over again. ``fps``: frames per second.

    Raises (when it is made):
        DataError: there is no such file or folder, it holds no image, or the video cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            found = (p for p in self.path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
            self._files = sorted(found, key=lambda p: _natural(p.name))
            self.fps, self._announced = _FOLDER_FPS, len(self._files)
            if not self._files:
                raise DataError(f"folder {self.path} holds no image ({', '.join(IMAGE_SUFFIXES)})")
            return
        if not self.path.exists():
            raise DataError(f"no such file or folder: {self.path}")
        self._files = []
        capture = self._open()
        fps = capture.get(cv2.CAP_PROP_FPS)
        self.fps = float(fps) if 0 < fps < 1000 else _FOLDER_FPS
        self._announced = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        capture.release()

    def __iter__(self) -> Iterator[np.ndarray]:
        """(H, W, 3) uint8 RGB each.

        Raises:
            DataError: an image of a folder is broken; the message names it.
        """
        if self._files:
            yield from map(load_image, self._files)
            return
        capture, count = self._open(), 0
        try:
            while True:
                there, image = capture.read()
                if not there:
                    break
                count += 1
                yield cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        finally:
            capture.release()
        if count < self._announced:
            logger.warning(f"video {self.path} announces {self._announced} frames, {count} could be decoded")

    def _open(self) -> cv2.VideoCapture:
        capture = cv2.VideoCapture(str(self.path))
        if not capture.isOpened() or not capture.grab():
            capture.release()
            raise DataError(f"video {self.path} cannot be read: no format that OpenCV knows, or no frame in it")
        capture.release()
        return cv2.VideoCapture(str(self.path))  # grabbing went past the first frame


class VideoFile:
    """A video that is being written; frames of another size than the first one are an error.

    Raises (when the first frame is added):
        DataError: the file cannot be written, or not in the format of its suffix.
    """

    CODECS = {".mp4": "mp4v", ".avi": "MJPG"}

    def __init__(self, path: str | Path, fps: float) -> None:
        self.path, self.fps = Path(path), fps
        self._writer: cv2.VideoWriter | None = None

    def add(self, image: np.ndarray) -> None:
        """(H, W, 3) uint8 RGB."""
        if self._writer is None:
            code = cv2.VideoWriter_fourcc(*self.CODECS[self.path.suffix.lower()])
            self._writer = cv2.VideoWriter(str(self.path), code, self.fps, image.shape[1::-1])
            if not self._writer.isOpened():
                raise DataError(f"video {self.path} cannot be written: no permission, or OpenCV lacks the codec")
            self._size = image.shape
        if image.shape != self._size:
            raise ValueError(f"a frame of {image.shape} does not fit into a video of {self._size}")
        self._writer.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.release()
            self._writer = None


def _natural(name: str) -> list:
    """Numbers in a name count as numbers: 2.jpg comes before 10.jpg."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
