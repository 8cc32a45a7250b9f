"""The batch that every detector of this package is trained on. Read this file first.

Letters, used in all docstrings: B images in a batch, M most boxes in any image of it, I most ignore regions,
N boxes of one image, A points over all levels, C classes, K kept detections, H and W height and width in pixels.

Between modules a box is ``xyxy``, float32, in continuous pixels of the network's input frame: ``x2 = x1 + width``, nowhere
a minus or plus one. Any other form lives inside one function and carries its name (``boxes_cxcywh``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class SampleKey(NamedTuple):
    """Which sample is wanted, and everything its randomness depends on.

    ``size`` is the (H, W) that the batch tensor will have; ``position`` counts the samples of the epoch from 0 over all
    ranks, so the step inside the epoch is ``position // total_batch``.
    """

    index: int
    epoch: int
    position: int
    size: tuple[int, int]


@dataclass
class Sample:
    """One image with its boxes, on the CPU, as NumPy arrays.

    ``transform`` maps original pixels to the pixels of ``image``: ``(x, y, 1)_now = transform @ (x, y, 1)_original``.
    """

    image: np.ndarray  # (H, W, 3) uint8 RGB
    boxes: np.ndarray  # (N, 4) float32 xyxy px
    labels: np.ndarray  # (N,) int64 in [0, C)
    weights: np.ndarray  # (N,) float32, mix-up score, 1 by default
    ignore: np.ndarray  # (I, 4) float32 xyxy px, crowd regions: neither object nor background
    image_id: int | str
    original_size: tuple[int, int]  # (H, W) of the file, px
    transform: np.ndarray = field(default_factory=lambda: np.eye(3))  # (3, 3) float64

    @classmethod
    def from_arrays(cls, image, boxes=None, labels=None, ignore=None, image_id: int | str = 0) -> Sample:
        """A sample with the dtypes of this file from whatever array-likes there are; weights are 1."""
        boxes = np.asarray([] if boxes is None else boxes, dtype=np.float32).reshape(-1, 4)
        labels = np.asarray([] if labels is None else labels, dtype=np.int64).reshape(-1)
        ignore = np.asarray([] if ignore is None else ignore, dtype=np.float32).reshape(-1, 4)
        if len(boxes) != len(labels):
            raise ValueError(f"image {image_id!r}: {len(boxes)} boxes but {len(labels)} labels")
        return cls(image, boxes, labels, np.ones(len(boxes), np.float32), ignore, image_id, tuple(image.shape[:2]))

    def replace(self, **changes) -> Sample:
        """A copy with the given fields exchanged."""
        return replace(self, **changes)


@dataclass(frozen=True)
class ImageMeta:
    """What must be known about one image of a batch besides its pixels."""

    size: tuple[int, int]  # unpadded (h, w) inside the batch tensor, px
    original_size: tuple[int, int]  # (h, w) of the file, px
    image_id: int | str = 0
    transform: tuple[tuple[float, ...], ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))  # original -> network


@dataclass
class Targets:
    """Boxes of a batch, padded to the fullest image. Never cast down under mixed precision."""

    boxes: Tensor  # (B, M, 4) float32 xyxy px
    labels: Tensor  # (B, M) int64
    valid: Tensor  # (B, M) bool, False on padding
    weights: Tensor  # (B, M) float32
    ignore: Tensor  # (B, I, 4) float32 xyxy px, zeros on padding

    @classmethod
    def from_lists(
        cls, boxes: Sequence, labels: Sequence, weights: Sequence | None = None, ignore: Sequence | None = None
    ) -> Targets:
        """Pads per-image arrays or tensors: boxes (N_i, 4), labels (N_i,), weights (N_i,), ignore (I_i, 4)."""
        if len(boxes) != len(labels):
            raise ValueError(f"boxes of {len(boxes)} images but labels of {len(labels)}")
        box_rows = [torch.as_tensor(b, dtype=torch.float32).reshape(-1, 4) for b in boxes]
        label_rows = [torch.as_tensor(v, dtype=torch.int64).reshape(-1) for v in labels]
        weight_rows = (
            [torch.ones(len(b)) for b in box_rows]
            if weights is None
            else [torch.as_tensor(v, dtype=torch.float32).reshape(-1) for v in weights]
        )
        ignore_rows = [torch.as_tensor(v, dtype=torch.float32).reshape(-1, 4) for v in (ignore or [()] * len(box_rows))]
        for i, (b, lab, w) in enumerate(zip(box_rows, label_rows, weight_rows, strict=True)):
            if not len(b) == len(lab) == len(w):
                raise ValueError(f"image {i} of the batch: {len(b)} boxes, {len(lab)} labels and {len(w)} weights")
        valid_rows = [torch.ones(len(b), dtype=torch.bool) for b in box_rows]
        return cls(_pad(box_rows), _pad(label_rows), _pad(valid_rows), _pad(weight_rows), _pad(ignore_rows))

    def map(self, fn) -> Targets:
        """The same targets with ``fn`` applied to every tensor."""
        return Targets(fn(self.boxes), fn(self.labels), fn(self.valid), fn(self.weights), fn(self.ignore))

    def __getitem__(self, rows: slice) -> Targets:
        return self.map(lambda t: t[rows])


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)


@dataclass
class Batch:
    """Images with what belongs to them; it can move itself, so that no consumer needs to know the architecture."""

    images: Tensor  # (B, 3, H, W) contiguous; uint8 RGB, or floating: then taken as already normalised
    targets: Targets | None = None
    meta: list[ImageMeta] | None = None  # one per image; default: nothing padded, nothing transformed
    epoch: int = 0
    step: int = 0  # counted from the start of training

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(f"images must be (B, 3, H, W), got {tuple(self.images.shape)}")
        if self.meta is None:
            size = (self.images.shape[2], self.images.shape[3])
            self.meta = [ImageMeta(size, size, i) for i in range(len(self.images))]

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream) -> None:
        """Tells CUDA's allocator that ``stream`` uses these tensors (they were made on a side stream)."""
        self._map(lambda t: t.record_stream(stream) or t)

    def _map(self, fn) -> Batch:
        targets = None if self.targets is None else self.targets.map(fn)
        return replace(self, images=fn(self.images), targets=targets)

    def split(self, parts: int) -> list[Batch]:
        """``parts`` batches of equal length, in order. B must be divisible by ``parts``."""
        if len(self) % parts:
            raise ValueError(f"a batch of {len(self)} images cannot be split into {parts} equal parts")
        n = len(self) // parts
        return [
            replace(
                self,
                images=self.images[i : i + n],
                targets=None if self.targets is None else self.targets[i : i + n],
                meta=self.meta[i : i + n],
            )
            for i in range(0, len(self), n)
        ]

    def facts(self) -> dict[str, object]:
        """What a log line says about the batch."""
        return {"size": f"{self.images.shape[2]}x{self.images.shape[3]}", "images": len(self)}

    @property
    def image_ids(self) -> list[int | str]:
        return [m.image_id for m in self.meta]


@dataclass
class Detections:
    """What was found in one image, best score first."""

    boxes: Tensor  # (K, 4) float32 xyxy px
    scores: Tensor  # (K,) float32 in [0, 1]
    labels: Tensor  # (K,) int64 in [0, C)

    def __len__(self) -> int:
        return len(self.boxes)

    def map(self, fn) -> Detections:
        return Detections(fn(self.boxes), fn(self.scores), fn(self.labels))

    def cpu(self) -> Detections:
        return self.map(lambda t: t.cpu())

    def to_original(self, meta: ImageMeta, clip: bool = True) -> Detections:
        """Boxes moved from the network's frame to the file's pixels by the inverse of the image's own transform, and with
        ``clip`` cut at the image's border. A rotated frame gives the enclosing box."""
        inverse = torch.linalg.inv(torch.tensor(meta.transform, dtype=torch.float64)).to(self.boxes.device)
        x1, y1, x2, y2 = self.boxes.double().unbind(1)
        corners = torch.stack([x1, y1, x2, y1, x1, y2, x2, y2], 1).reshape(-1, 4, 2)
        moved = corners @ inverse[:2, :2].T + inverse[:2, 2]
        boxes = torch.cat([moved.amin(1), moved.amax(1)], 1)
        if not clip:
            return Detections(boxes.float(), self.scores, self.labels)
        height, width = meta.original_size
        limit = torch.tensor([width, height, width, height], dtype=torch.float64, device=boxes.device)
        return Detections(torch.minimum(boxes.clamp(min=0), limit).float(), self.scores, self.labels)


@dataclass
class LossOutput:
    """What a model returns in training. ``losses`` holds only what the total sums, weights and normalisers applied.

    A model that meets predictions that are not finite does not raise, since other processes would wait for this one: its losses
    are NaN, and ``nonfinite`` says why.
    """

    losses: dict[str, Tensor]  # scalars
    stats: dict[str, Tensor] = field(default_factory=dict)  # scalars that are only logged
    nonfinite: str = ""  # which prediction holds values that are no numbers, how many, and in which images

    @property
    def total(self) -> Tensor:
        """The float32 (float64 where a term is) sum of the losses, ()."""
        terms = list(self.losses.values())
        return torch.stack([t.to(torch.promote_types(t.dtype, torch.float32)) for t in terms]).sum()
