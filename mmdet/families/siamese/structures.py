"""What a tracker is trained on: pairs of a template, which shows the target, and a search crop, where it is to be found.

Letters, in all docstrings of this family: B pairs in a batch, h and w height and width of the template in pixels, H and W those
of the search crop, H' and W' the cells of its feature map, N = H'W' points, Z positions of the template, M most distractors
of any pair. A box is ``xyxy``, float32, in continuous pixels of the search crop: ``x2 = x1 + width``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from torch import Tensor


@dataclass
class PairSample:
    """One pair, on the CPU, as NumPy arrays."""

    template: np.ndarray  # (h, w, 3) uint8 RGB
    search: np.ndarray  # (H, W, 3) uint8 RGB
    box: np.ndarray  # (4,) float32 xyxy px of the search crop: the target; in a negative pair, where one would expect it
    positive: bool  # whether the search crop shows the template's target
    distractors: np.ndarray  # (M, 4) float32 xyxy px of the search crop: other annotated objects in it
    image_id: str = ""  # where the pair came from, for messages
    position: int = -1  # of the pair in the epoch, over all ranks; -1: that in the batch


@dataclass
class PairBatch:
    """Pairs of one batch; it can move itself. Labels are made of it on the device, by the criterion."""

    templates: Tensor  # (B, 3, h, w) contiguous; uint8 RGB, or floating: then taken as already normalised
    searches: Tensor  # (B, 3, H, W) likewise
    boxes: Tensor  # (B, 4) float32 xyxy px of the search crop
    positive: Tensor  # (B,) bool
    distractors: Tensor  # (B, M, 4) float32 xyxy px of the search crop, zeros on padding
    distractor_valid: Tensor  # (B, M) bool, False on padding
    image_ids: list[str]
    positions: Tensor | None = None  # (B,) int64, of the pairs in the epoch; the randomness of labels depends on them
    epoch: int = 0
    step: int = 0  # counted from the start of training

    def __post_init__(self) -> None:
        for name in ("templates", "searches"):
            images = getattr(self, name)
            if images.ndim != 4 or images.shape[1] != 3:
                raise ValueError(f"{name} must be (B, 3, height, width), got {tuple(images.shape)}")
        if not len(self.templates) == len(self.searches) == len(self.boxes) == len(self.positive):
            raise ValueError(
                f"{len(self.templates)} templates, {len(self.searches)} searches, {len(self.boxes)} boxes and "
                f"{len(self.positive)} positive flags: expected as many of each"
            )
        if self.positions is None:
            self.positions = torch.arange(len(self.templates), device=self.boxes.device)

    def __len__(self) -> int:
        return len(self.templates)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PairBatch:
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PairBatch:
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream) -> None:
        """Tells CUDA's allocator that ``stream`` uses these tensors (they were made on a side stream)."""
        self._map(lambda t: t.record_stream(stream) or t)

    def _tensors(self) -> dict[str, Tensor]:
        names = ("templates", "searches", "boxes", "positive", "distractors", "distractor_valid", "positions")
        return {name: getattr(self, name) for name in names}

    def _map(self, fn) -> PairBatch:
        return replace(self, **{name: fn(tensor) for name, tensor in self._tensors().items()})

    def split(self, parts: int) -> list[PairBatch]:
        """``parts`` batches of equal length, in order. B must be divisible by ``parts``."""
        if len(self) % parts:
            raise ValueError(f"a batch of {len(self)} pairs cannot be split into {parts} equal parts")
        n = len(self) // parts
        return [
            replace(
                self,
                **{name: tensor[i : i + n] for name, tensor in self._tensors().items()},
                image_ids=self.image_ids[i : i + n],
            )
            for i in range(0, len(self), n)
        ]

    def facts(self) -> dict[str, object]:
        """What a log line says about the batch."""
        return {"size": f"{self.searches.shape[2]}x{self.searches.shape[3]}", "images": len(self)}


def collate_pairs(samples: Sequence[PairSample], epoch: int = 0, step: int = 0, size: tuple[int, int] | None = None) -> PairBatch:
    """A batch with images as (B, 3, height, width) uint8, contiguous: torch 2.13's strided 1x1 convolution over three channels
    damages the heap on images that are only a transposed view (design/siamese.md, B18).

    ``size`` is what a detector's collate gets; pairs know their sizes.

    Raises:
        ValueError: no samples, or an image that is no (height, width, 3) uint8 array or has another size than the first one.
    """
    if not samples:
        raise ValueError("a batch needs at least one pair")
    most = max(len(s.distractors) for s in samples)
    distractors = torch.zeros(len(samples), most, 4)
    valid = torch.zeros(len(samples), most, dtype=torch.bool)
    for i, sample in enumerate(samples):
        count = len(sample.distractors)
        distractors[i, :count] = torch.from_numpy(np.asarray(sample.distractors, np.float32).reshape(-1, 4))
        valid[i, :count] = True
    positions = [sample.position if sample.position >= 0 else i for i, sample in enumerate(samples)]
    return PairBatch(
        templates=_stack([s.template for s in samples], [s.image_id for s in samples], "template"),
        searches=_stack([s.search for s in samples], [s.image_id for s in samples], "search crop"),
        boxes=torch.from_numpy(np.stack([np.asarray(s.box, np.float32).reshape(4) for s in samples])),
        positive=torch.tensor([bool(s.positive) for s in samples]),
        distractors=distractors,
        distractor_valid=valid,
        image_ids=[s.image_id for s in samples],
        positions=torch.tensor(positions, dtype=torch.int64),
        epoch=epoch,
        step=step,
    )


def _stack(images: Sequence[np.ndarray], names: Sequence[str], what: str) -> Tensor:
    """(h, w, 3) uint8 each -> (B, 3, h, w) uint8, contiguous."""
    height, width = images[0].shape[:2]
    stacked = torch.empty((len(images), 3, height, width), dtype=torch.uint8)
    for planes, image, name in zip(stacked.numpy(), images, names, strict=True):
        if image.dtype != np.uint8 or image.shape != (height, width, 3):
            raise ValueError(
                f"the {what} of pair {name!r} is {image.dtype} {image.shape}; expected uint8 {(height, width, 3)}, "
                "as of the first pair of the batch"
            )
        cv2.split(image, list(planes))  # writes into the batch
    return stacked
