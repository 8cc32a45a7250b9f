"""The one detector class: every detection architecture is a composition of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mmdet.core.load_rules import LoadRules
from mmdet.data.structures import Batch, Detections, ImageMeta, LossOutput


class Normalize(nn.Module):
    """uint8 RGB (B, 3, H, W) in [0, 255] -> floating ``(channel * scale - mean) / std`` of the same shape.

    Floating images pass through untouched: they count as normalised.
    """

    def __init__(
        self,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        scale: float = 1 / 255,
        bgr: bool = False,
        pad: float | None = None,
    ) -> None:
        """Args:
        mean: of the scaled channels, in the order that the network sees.
        std: likewise.
        scale: multiplies the pixel before all else.
        bgr: the network sees blue first.
        pad: value, after normalisation, of pixels beyond an image's unpadded size; None leaves them as they are.
        """
        super().__init__()
        if len(mean) != 3 or len(std) != 3:
            raise ValueError(f"mean and std must have three values, got {tuple(mean)} and {tuple(std)}")
        if min(std) <= 0:
            raise ValueError(f"std must be positive, got {tuple(std)}")
        self.bgr = bgr
        self.pad = pad
        gain = torch.tensor([scale / s for s in std]).reshape(1, 3, 1, 1)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).reshape(1, 3, 1, 1)
        self.register_buffer("gain", gain, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, images: Tensor, meta: Sequence[ImageMeta] | None = None) -> Tensor:
        if images.is_floating_point():
            return images
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8 (pixels) or floating (already normalised), got {images.dtype}")
        if self.bgr:
            images = images.flip(1)
        normalized = images.to(self.gain.dtype) * self.gain + self.shift
        if self.pad is not None and meta is not None:
            for image, entry in zip(normalized, meta, strict=True):
                height, width = entry.size
                image[:, height:] = self.pad
                image[:, :, width:] = self.pad
        return normalized


class Head(Protocol):
    """What a head must be: predictions in training, boxes and scores from them."""

    def __call__(self, features: list[Tensor]) -> tuple: ...

    def decode(self, predictions: tuple) -> tuple[Tensor, Tensor]: ...


class Detector(nn.Module):
    """``normalize -> backbone -> neck -> head``, then ``criterion`` in training or ``decode`` and ``postprocess``.

    Letters: B images, A points over all levels, C classes.

    Args:
        normalize: images (B, 3, H, W) -> the network's input.
        backbone: images -> list of (B, C_l, H / s_l, W / s_l).
        neck: list -> list.
        head: list -> predictions (a NamedTuple); its ``decode(predictions)`` gives ``(boxes (B, A, 4), scores (B, A, C))``.
        criterion: ``(predictions, batch) -> LossOutput``.
        postprocess: ``(boxes, scores, meta) -> list[Detections]``.
        load_rules: what checkpoint loading must know about this model.
    """

    def __init__(
        self,
        normalize: nn.Module,
        backbone: nn.Module,
        neck: nn.Module,
        head: nn.Module,
        criterion: Callable[..., LossOutput],
        postprocess: Callable[..., list[Detections]],
        load_rules: LoadRules | None = None,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        self.neck = neck
        self.head = head
        self.criterion = criterion
        self.postprocess = postprocess
        self.load_rules = LoadRules() if load_rules is None else load_rules

    def predict(self, images: Tensor, meta: Sequence[ImageMeta] | None = None) -> tuple:
        """The head's raw predictions for images (B, 3, H, W), uint8 or already normalised."""
        # Contiguous NCHW whatever came in: torch 2.13 and 2.14 crash on the CPU in a strided 1x1 convolution over three channels
        # of a channels_last image. The convolutions' own weights decide the memory format of everything after the first layer.
        normalized = self.normalize(images.contiguous(), meta)
        return self.head(self.neck(self.backbone(normalized)))

    def decode(self, images: Tensor, meta: Sequence[ImageMeta] | None = None) -> tuple[Tensor, Tensor]:
        """Before suppression: boxes (B, A, 4) xyxy px of the input frame, scores (B, A, C) in [0, 1]; at least float32."""
        predictions = self.predict(images, meta)
        with torch.autocast(images.device.type, enabled=False):
            return self.head.decode(predictions)

    def forward(self, batch: Batch) -> LossOutput | list[Detections]:
        """In training the losses; in evaluation one Detections per image, in the network's frame."""
        if self.training:
            if batch.targets is None:
                raise ValueError("training needs batch.targets; for detections call model.eval() first")
            return self.criterion(self.predict(batch.images, batch.meta), batch)
        boxes, scores = self.decode(batch.images, batch.meta)
        return self.postprocess(boxes, scores, batch.meta)
