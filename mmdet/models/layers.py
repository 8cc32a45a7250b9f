"""Layers that several architectures share. B images, C channels, H and W cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvBNAct(nn.Module):
    """Convolution without bias, batch norm, activation: (B, in, H, W) -> (B, out, ceil(H / stride), ceil(W / stride))."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        stride: int = 1,
        groups: int = 1,
        act: Callable[[], nn.Module] | None = nn.SiLU,
    ) -> None:
        super().__init__()
        padding = (kernel_size - 1) // 2
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        self.act = nn.Identity() if act is None else act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class EffectiveSE(nn.Module):
    """Channel attention with a single layer (arXiv 1911.06667, section 3.3): (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class PyramidPool(nn.Module):
    """The input beside its maxima over growing windows: (B, C, H, W) -> (B, (1 + n) * C, H, W), n windows.

    ``kernel_sizes`` are odd and ascending. The maximum over a 9x9 window is the 5x5 maximum of 5x5 maxima, so each window is
    pooled from the one before it: the same values for a fraction of the reads.
    """

    def __init__(self, kernel_sizes: Sequence[int] = (5, 9, 13)) -> None:
        super().__init__()
        steps = [b - a + 1 for a, b in zip((1, *kernel_sizes[:-1]), kernel_sizes, strict=True)]
        if any(k % 2 == 0 or k < 1 for k in steps):
            raise ValueError(f"pyramid pooling needs odd ascending kernel sizes, got {tuple(kernel_sizes)}")
        self.steps = tuple(steps)

    def forward(self, x: Tensor) -> Tensor:
        levels = [x]
        for k in self.steps:
            levels.append(F.max_pool2d(levels[-1], k, stride=1, padding=k // 2))
        return torch.cat(levels, 1)


class SPP(nn.Module):
    """Spatial pyramid pooling, then a convolution: (B, in, H, W) -> (B, out, H, W)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_sizes: Sequence[int] = (5, 9, 13),
        act: Callable[[], nn.Module] | None = nn.SiLU,
    ) -> None:
        super().__init__()
        self.pool = PyramidPool(kernel_sizes)
        self.conv = ConvBNAct(in_channels * (len(kernel_sizes) + 1), out_channels, act=act)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pool(x))


def init_he(module: nn.Module) -> None:
    """Normal weights of variance ``2 / fan_in`` and zero biases for every convolution inside ``module``: PaddlePaddle's default
    (``nn.Conv2D``), which the published weights of its detectors started from. Norms keep scale 1, shift 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
