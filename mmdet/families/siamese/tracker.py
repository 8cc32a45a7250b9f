"""Following one target through a video, frame by frame.

One convention for everything: continuous pixels, a box is xyxy, its centre (x1 + x2) / 2; images are RGB, as in training.
Source of the rules and numbers: design/siamese.md, B13; the penalty and the window are those of Li et al. 2018 (SiamRPN), 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from mmdet.families.siamese.crop import Window, context_side, cut, mean_color


@dataclass(frozen=True)
class TrackerSettings:
    """What a tracker is tuned with."""

    context: float = 0.5  # part of (width + height) added to the target before a crop is cut
    window_influence: float = 0.46  # weight of the window against that of the score
    penalty_k: float = 0.16  # how strongly a change of size or shape is punished
    size_lr: float = 0.30  # how fast the size follows
    min_side: float = 10.0  # px of the frame; the target never becomes smaller


@dataclass(frozen=True)
class TrackerState:
    """All that is known after a frame."""

    x: float  # centre, px of the frame
    y: float
    width: float
    height: float
    score: float  # of the network at the chosen point, in [0, 1]
    template: Any  # what the model's ``encode_template`` gave
    fill: np.ndarray  # (3,) uint8, mean colour of the first frame: what lies beyond the border

    @property
    def box(self) -> np.ndarray:
        """(4,) float64 xyxy px of the frame."""
        half_width, half_height = self.width / 2, self.height / 2
        return np.array([self.x - half_width, self.y - half_height, self.x + half_width, self.y + half_height])


class Choice(NamedTuple):
    """The point that won, in px of the search crop."""

    offset: np.ndarray  # (2,) x, y of the box's centre from the crop's
    size: np.ndarray  # (2,) width, height
    score: float
    penalty: float  # in (0, 1]; 1 if neither size nor shape changed


class Tracker:
    """A model at work: ``start`` on the first frame, then ``follow`` frame after frame.

    Asks of ``model``, in eval mode on ``device``: ``encode_template((1, 3, h, w) uint8) -> state``; ``search(state, (1, 3, H, W)
    uint8) -> (score (1, H', W') in [0, 1], ltrb (1, 4, H', W') px of the search crop)``; its ``exemplar_size``, ``search_size``
    and ``stride`` in px.

    ``inference_mode=False`` only switches gradients off: for a model that will be trained on, which may keep tensors made here.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrackerSettings | None = None,
        device: torch.device | str = "cpu",
        inference_mode: bool = True,
    ) -> None:
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() before it tracks")
        self.model, self.settings, self.device = model, settings or TrackerSettings(), torch.device(device)
        self._no_gradients = torch.inference_mode if inference_mode else torch.no_grad

    def start(self, image: np.ndarray, box: np.ndarray) -> TrackerState:
        """The state after the first frame (H, W, 3) uint8 RGB, whose target is ``box`` (4,) xyxy px.

        Raises:
            ValueError: the box has no area or lies outside the image.
        """
        height, width = image.shape[:2]
        x1, y1, x2, y2 = (float(v) for v in box)
        if not (x2 > x1 and y2 > y1 and x1 < width and y1 < height and x2 > 0 and y2 > 0):
            raise ValueError(f"box {[x1, y1, x2, y2]} (x1, y1, x2, y2) has no area inside the image of {width}x{height} px")
        fill = mean_color(image)
        side = context_side(x2 - x1, y2 - y1, self.settings.context)
        crop = cut(image, Window.around(np.array([x1, y1, x2, y2]), side), self.model.exemplar_size, fill)
        with self._no_gradients():
            template = self.model.encode_template(self._tensor(crop))
        return TrackerState((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 1.0, template, fill)

    def follow(self, state: TrackerState, image: np.ndarray) -> TrackerState:
        """The state after a further frame (H, W, 3) uint8 RGB. Where the network gives nothing finite the target stays."""
        side = context_side(state.width, state.height, self.settings.context)
        scale = self.model.exemplar_size / side
        window = Window(state.x, state.y, *(self.model.search_size / scale,) * 2)
        crop = cut(image, window, self.model.search_size, state.fill)
        with self._no_gradients():
            score, ltrb = self.model.search(state.template, self._tensor(crop))
            maps = torch.cat([score[:, None].float(), ltrb.float()], 1)[0].cpu().numpy().astype(np.float64)
        size = np.array([state.width, state.height])
        choice = choose(maps[0], maps[1:], self.model.stride, size * scale, self.settings)
        if choice is None:
            return replace(state, score=0.0)
        rate = choice.penalty * choice.score * self.settings.size_lr
        return self._clipped(state, choice.offset / scale, size * (1 - rate) + choice.size / scale * rate, choice.score, image)

    def _clipped(self, state: TrackerState, move: np.ndarray, size: np.ndarray, score: float, image: np.ndarray) -> TrackerState:
        """Centre inside the image, no side larger than the image's."""
        limit = np.array(image.shape[1::-1], np.float64)
        x, y = np.clip(np.array([state.x, state.y]) + move, 0, limit)
        width, height = np.minimum(np.maximum(size, self.settings.min_side), limit)
        return replace(state, x=float(x), y=float(y), width=float(width), height=float(height), score=score)

    def _tensor(self, crop: np.ndarray) -> Tensor:
        """(n, n, 3) uint8 -> (1, 3, n, n) uint8, contiguous."""
        return torch.from_numpy(np.stack(cv2.split(crop))[None]).to(self.device)


def choose(score: np.ndarray, ltrb: np.ndarray, stride: float, size: np.ndarray, settings: TrackerSettings) -> Choice | None:
    """The best point of a search crop, None if no point is finite.

    Args:
        score: (H', W') in [0, 1].
        ltrb: (4, H', W') px, distances from a point to the sides of its box.
        stride: px between points; they lie symmetrically about the crop's centre.
        size: (2,) width, height of the target so far, px of the crop.
        settings: ``penalty_k`` and ``window_influence``.
    """
    rows, columns = score.shape
    left, top, right, bottom = ltrb
    width, height = left + right, top + bottom
    with np.errstate(all="ignore"):  # boxes that make no sense lose below
        scale_change = _change(_padded(width, height) / _padded(*size))
        shape_change = _change((size[0] / size[1]) / (width / height))
        penalty = np.exp(-(scale_change * shape_change - 1) * settings.penalty_k)
        rated = penalty * score * (1 - settings.window_influence) + _window(rows, columns) * settings.window_influence
    sound = np.isfinite(rated) & np.isfinite(ltrb).all(0) & (width > 0) & (height > 0)
    if not sound.any():
        return None
    row, column = np.unravel_index(np.argmax(np.where(sound, rated, -np.inf)), score.shape)
    best = row, column
    point = (np.array([column, row]) - (np.array([columns, rows]) - 1) / 2) * stride
    offset = point + np.array([right[best] - left[best], bottom[best] - top[best]]) / 2
    return Choice(offset, np.array([width[best], height[best]]), float(score[best]), float(penalty[best]))


def _change(ratio: np.ndarray) -> np.ndarray:
    return np.maximum(ratio, 1 / ratio)


def _padded(width: np.ndarray, height: np.ndarray) -> np.ndarray:
    """The side of a square of a box's area with its context: here always half of (width + height)."""
    margin = (width + height) / 2
    return np.sqrt((width + margin) * (height + margin))


@lru_cache(maxsize=8)
def _window(rows: int, columns: int) -> np.ndarray:
    """(H', W') product of two Hann windows. The border's points keep a weight above 0: those of zero lie one cell outside."""
    return np.outer(np.hanning(rows + 2)[1:-1], np.hanning(columns + 2)[1:-1])
