"""Layers of the two necks. B images, C channels, H and W cells."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.layers import ConvBNAct

Grid = Literal["full", "half"]


class LeakyReLU(nn.LeakyReLU):
    """The activation of PPYOLOFPN: slope 0.1 (PaddleDetection 666f597, ppdet/modeling/backbones/darknet.py)."""

    def __init__(self) -> None:
        super().__init__(0.1, inplace=True)


class CoordConv(nn.Module):
    """A convolution that also sees where it is (arXiv 1807.03247): (B, in, H, W) -> (B, out, H, W).

    Two channels are appended, the column and the row of the cell. ``grid`` "full": from -1 to 1, as the published weights were
    trained; "half": from -1 to -0.5, as PaddleDetection 666f597 computes it now.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, act: type[nn.Module], grid: Grid = "full") -> None:
        super().__init__()
        if grid not in ("full", "half"):
            raise ValueError(f"grid must be 'full' or 'half', got {grid!r}")
        self.span = 2.0 if grid == "full" else 0.5
        self.conv = ConvBNAct(in_channels + 2, out_channels, kernel_size, act=act)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        column, row = (self._positions(n, x) for n in (width, height))
        grid = torch.stack([column.expand(height, width), row.unsqueeze(1).expand(height, width)])
        return self.conv(torch.cat([x, grid.expand(batch, -1, -1, -1)], 1))

    def _positions(self, count: int, like: Tensor) -> Tensor:
        steps = torch.arange(count, device=like.device, dtype=torch.float32) * (self.span / max(count - 1, 1))
        return (steps - 1).to(like.dtype)


class DropBlock(nn.Module):
    """Zeroes square blocks of each channel in training (arXiv 1810.12890, algorithm 1) and scales up the rest.

    ``keep_prob`` is the share of cells that stay, a plain attribute; with 1, and in evaluation, nothing happens. A block that
    reaches over the border is cut, and a map smaller than ``block_size`` loses whole channels.
    """

    def __init__(self, block_size: int = 3, keep_prob: float = 0.9) -> None:
        super().__init__()
        if block_size % 2 == 0:
            raise ValueError(f"block_size must be odd, got {block_size}")
        self.block_size = block_size
        self.keep_prob = keep_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep_prob >= 1:
            return x
        size = self.block_size
        rate = (1 - self.keep_prob) / size**2
        for side in x.shape[2:]:
            rate *= side / max(side - size + 1, 1)
        centers = (torch.rand(x.shape, device=x.device) < rate).float()
        kept = 1 - F.max_pool2d(centers, size, stride=1, padding=size // 2)
        return x * (kept * (kept.numel() / kept.sum().clamp(min=1))).to(x.dtype)
