"""Boxes drawn into images: what a detector found beside what is there."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from mmdet.data.structures import Detections

_FONT = cv2.FONT_HERSHEY_SIMPLEX  # OpenCV 5 draws any script with it, OpenCV 4 puts a question mark for what it lacks
_GREY = (150, 150, 150)


def draw_detections(
    image_rgb: np.ndarray,
    detections: Detections,
    class_names: Sequence[str],
    min_score: float = 0.3,
    show_scores: bool = True,
    ignore: np.ndarray | None = None,
) -> np.ndarray:
    """A copy of the image with a box and a label per detection, the best on top.

    Args:
        image_rgb: (H, W, 3) uint8.
        detections: in px of this image; those below ``min_score`` are left out.
        class_names: by class index; an index without a name is shown as a number.
        min_score: in [0, 1].
        show_scores: writes the score after the name.
        ignore: (I, 4) xyxy px, drawn thin and grey.

    Returns:
        (H, W, 3) uint8 RGB.
    """
    canvas = np.ascontiguousarray(image_rgb).copy()
    thickness = max(1, round(min(canvas.shape[:2]) / 300))
    for corners in np.asarray([] if ignore is None else ignore, dtype=float).reshape(-1, 4):
        _rectangle(canvas, corners, _GREY, 1)
    detections = detections.cpu()
    scores = detections.scores.float().numpy()
    shown = np.flatnonzero(scores >= min_score)
    shown = shown[np.argsort(scores[shown], kind="stable")]
    boxes, labels = detections.boxes.float().numpy(), detections.labels.numpy()
    shown = [n for n in shown.tolist() if np.isfinite(boxes[n]).all()]
    for n in shown:
        _rectangle(canvas, boxes[n], class_color(int(labels[n])), thickness)
    for n in shown:  # after all boxes, so that no line crosses a label
        label = int(labels[n])
        name = str(class_names[label]) if 0 <= label < len(class_names) else str(label)
        _label(canvas, boxes[n], f"{name} {scores[n]:.2f}" if show_scores else name, class_color(label))
    return canvas


def draw_comparison(sample: dict[str, Any], class_names: Sequence[str], min_score: float = 0.3) -> np.ndarray:
    """Ground truth (left) beside detections (right) of one of an evaluation's ``samples``: (h, 2 w + gap, 3) uint8 RGB.

    Small images are enlarged to a height of about 320 px, so that the labels can be read.
    """
    image = sample["image"]
    scale = max(1, round(320 / image.shape[0]))
    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
    truth, found = _scaled(sample["truth"], scale), _scaled(sample["detections"], scale)
    ignore = np.asarray(sample.get("ignore", []), dtype=float).reshape(-1, 4) * scale
    left = draw_detections(image, truth, class_names, 0.0, show_scores=False, ignore=ignore)
    right = draw_detections(image, found, class_names, min_score)
    shown = int((found.scores >= min_score).sum())
    left = _titled(left, f"truth: {len(truth)} objects")
    right = _titled(right, f"found: {shown} with score >= {min_score:g}")
    return np.concatenate([left, np.full((left.shape[0], 4, 3), 255, np.uint8), right], axis=1)


def save_image(path: str | Path, image_rgb: np.ndarray) -> None:
    """Writes an RGB image in the format of the path's suffix; the path may hold any characters."""
    ok, data = cv2.imencode(Path(path).suffix, cv2.cvtColor(image_rgb, cv2.COLOR_RGB2BGR))
    if not ok:
        raise OSError(f"{path}: the image could not be encoded")
    Path(path).write_bytes(data.tobytes())


def class_color(label: int) -> tuple[int, int, int]:
    """A colour (R, G, B) per class index; neighbours differ strongly (hues a golden section apart)."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1.0, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _scaled(detections: Detections, scale: int) -> Detections:
    return Detections(detections.boxes * scale, detections.scores, detections.labels)


def _rectangle(canvas: np.ndarray, corners: np.ndarray, color: tuple[int, int, int], thickness: int) -> None:
    height, width = canvas.shape[:2]
    x1, y1, x2, y2 = np.clip(corners, -1, [width, height, width, height]).round().astype(int).tolist()
    cv2.rectangle(canvas, (x1, y1), (x2 - 1, y2 - 1), color, thickness)


def _label(canvas: np.ndarray, corners: np.ndarray, text: str, color: tuple[int, int, int]) -> None:
    """White or black text on a plate of the box's colour, above the box or, at the image's border, inside it."""
    height, width = canvas.shape[:2]
    scale = float(np.clip(min(height, width) / 900, 0.4, 1.2))
    (text_width, text_height), baseline = cv2.getTextSize(text, _FONT, scale, 1)
    plate = text_height + baseline + 2
    left = int(np.clip(corners[0], 0, max(0, width - text_width - 4)))
    top = int(corners[1]) - plate
    if top < 0:
        top = int(np.clip(corners[1], 0, max(0, height - plate)))
    cv2.rectangle(canvas, (left, top), (left + text_width + 3, top + plate - 1), color, -1)
    dark = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] < 140  # luma, ITU-R BT.601
    ink = (255, 255, 255) if dark else (0, 0, 0)
    cv2.putText(canvas, text, (left + 2, top + text_height + 1), _FONT, scale, ink, 1, cv2.LINE_AA)


def _titled(image: np.ndarray, title: str) -> np.ndarray:
    bar = np.full((22, image.shape[1], 3), 255, np.uint8)
    cv2.putText(bar, title, (6, 16), _FONT, 0.5, (0, 0, 0), 1, cv2.LINE_AA)
    return np.concatenate([bar, image])
