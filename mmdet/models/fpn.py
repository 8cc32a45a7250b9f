"""Feature pyramid network (arXiv 1612.03144, section 3) with further levels on top. B images; s a level's stride."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class FPN(nn.Module):
    """Maps (B, C_l, H / s, W / s), fine first -> maps (B, out, H / s, W / s) of the same strides and of ``num_extra`` further,
    each twice the one before, fine first.

    A coarse map is enlarged by its nearest neighbours and added to the finer one's 1x1 convolution. The first extra level is a
    3x3 convolution of stride 2 of the coarsest output; each next one is that of the level before, with ``extra_relu`` after a
    ReLU (arXiv 1708.02002, section 4: P6 and P7).
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int = 256, num_extra: int = 2, extra_relu: bool = True) -> None:
        super().__init__()
        self.extra_relu = extra_relu
        self.out_channels = (out_channels,) * (len(in_channels) + num_extra)
        self.lateral = nn.ModuleList(nn.Conv2d(c, out_channels, 1) for c in in_channels)
        self.output = nn.ModuleList(nn.Conv2d(out_channels, out_channels, 3, padding=1) for _ in in_channels)
        self.extra = nn.ModuleList(nn.Conv2d(out_channels, out_channels, 3, 2, 1) for _ in range(num_extra))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (*self.lateral, *self.output, *self.extra):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        merged = [conv(x) for conv, x in zip(self.lateral, maps, strict=True)]
        for i in range(len(merged) - 1, 0, -1):
            finer = merged[i - 1]
            merged[i - 1] = finer + F.interpolate(merged[i], size=finer.shape[-2:], mode="nearest")
        levels = [conv(x) for conv, x in zip(self.output, merged, strict=True)]
        for i, conv in enumerate(self.extra):
            levels.append(conv(F.relu(levels[-1]) if i and self.extra_relu else levels[-1]))
        return levels
