"""The tracker's network: one backbone for both crops, a correlation, and a head on a grid of points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mmdet.core.load_rules import LoadRules
from mmdet.data.structures import LossOutput
from mmdet.families.siamese.head import LTRBHead, Predictions
from mmdet.families.siamese.layers import joined
from mmdet.families.siamese.structures import PairBatch


class SiamesePoint(nn.Module):
    """``backbone`` on both crops, ``template_branch`` and ``search_branch``, ``correlation`` of the two, ``head``.

    Letters: see structures.py. C channels of both branches.

    Args:
        normalize: crops (B, 3, ., .) -> the network's input.
        backbone: crop -> list of (B, C_l, side / stride, side / stride), all of one size.
        template_branch: (B, sum of C_l, h', w') -> (B, C, h', w').
        search_branch: (B, sum of C_l, H', W') -> (B, C, H', W').
        correlation: search and template features -> (B, K, H', W').
        head: (B, K + C, H', W') -> Predictions.
        criterion: ``(predictions, batch) -> LossOutput``.
        exemplar_size: h = w, px.
        search_size: H = W, px.
        stride: px between points.
        load_rules: what checkpoint loading must know about this model.
    """

    def __init__(
        self,
        normalize: nn.Module,
        backbone: nn.Module,
        template_branch: nn.Module,
        search_branch: nn.Module,
        correlation: nn.Module,
        head: LTRBHead,
        criterion: Callable[..., LossOutput],
        exemplar_size: int,
        search_size: int,
        stride: int,
        load_rules: LoadRules | None = None,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        self.template_branch = template_branch
        self.search_branch = search_branch
        self.correlation = correlation
        self.head = head
        self.criterion = criterion
        self.exemplar_size, self.search_size, self.stride = exemplar_size, search_size, stride
        self.load_rules = LoadRules() if load_rules is None else load_rules

    def encode_template(self, templates: Tensor) -> Tensor:
        """What is kept of a target: templates (B, 3, h, w), uint8 RGB or already normalised -> (B, C, h', w')."""
        return self.template_branch(self._features(templates))

    def search(self, state: Tensor, searches: Tensor) -> tuple[Tensor, Tensor]:
        """Where the target is in search crops.

        Args:
            state: (B, C, h', w') of ``encode_template``, or (1, C, h', w'): one target, looked for in every crop.
            searches: (B, 3, H, W), uint8 RGB or already normalised.

        Returns:
            Scores (B, H', W') in [0, 1] and distances left, top, right, bottom (B, 4, H', W') px of the search crop, from the
            points ``(column + 0.5, row + 0.5) * stride``; both at least float32.
        """
        predictions = self.predict(state, searches)
        return predictions.scores(), predictions.ltrb

    def predict(self, state: Tensor, searches: Tensor) -> Predictions:
        """The head's raw predictions; arguments as of ``search``."""
        search = self.search_branch(self._features(searches))
        state = state.expand(len(search), -1, -1, -1)
        return self.head(torch.cat([self.correlation(search, state), search], 1))

    def _features(self, images: Tensor) -> Tensor:
        # Contiguous whatever came in: the convolutions' own weights decide the memory format of everything after the first layer.
        return joined(self.backbone(self.normalize(images.contiguous())))

    def forward(self, batch: PairBatch) -> LossOutput | tuple[Tensor, Tensor]:
        """In training the losses; in evaluation the scores and distances of ``search``."""
        state = self.encode_template(batch.templates)
        if self.training:
            return self.criterion(self.predict(state, batch.searches), batch)
        return self.search(state, batch.searches)

    def validate(self, batch: PairBatch) -> LossOutput:
        """The losses as a validation pass compares them between epochs: labels of the first phase, equal weights."""
        return self.criterion(self.predict(self.encode_template(batch.templates), batch.searches), batch, validating=True)
