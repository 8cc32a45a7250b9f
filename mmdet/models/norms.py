"""Norms whose statistics a recipe keeps as they came with the pretrained weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase


class FrozenBatchNorm2d(_NormBase):
    """Batch norm by its running statistics, in training as well: (B, C, H, W) -> the same shape.

    ``affine_trained`` says whether scale and shift learn. The state_dict has the names of ``nn.BatchNorm2d``, so the same files
    fit; it is none to torch, so that synchronising batch norms over devices leaves it alone.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, affine_trained: bool = False) -> None:
        super().__init__(num_features, eps)
        self.weight.requires_grad_(affine_trained)
        self.bias.requires_grad_(affine_trained)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
