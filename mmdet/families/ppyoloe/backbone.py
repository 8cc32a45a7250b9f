"""CSPRepResNet, the backbone of PP-YOLOE (arXiv 2203.16250, section 2.2; numbers: PaddleDetection 666f597, measured)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmdet.models.layers import ConvBNAct, EffectiveSE, init_he
from mmdet.models.repvgg import RepVGGBlock

LAYERS = (3, 6, 6, 3)  # blocks per stage at depth 1
CHANNELS = (64, 128, 256, 512, 1024)  # stem and stages at width 1


def scaled(values: Sequence[int], factor: float) -> tuple[int, ...]:
    """Numbers of blocks or channels times ``factor``, rounded half-even as in the recipe, at least 1."""
    return tuple(max(round(v * factor), 1) for v in values)


class BasicBlock(nn.Module):
    """3x3 convolution, then a RepVGG block, with or without a shortcut: (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int, shortcut: bool, use_alpha: bool = False) -> None:
        super().__init__()
        self.conv1 = ConvBNAct(channels, channels, 3)
        self.conv2 = RepVGGBlock(channels, channels, use_alpha)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.shortcut else y


class CSPResStage(nn.Module):
    """Halves the resolution: (B, in, H, W) -> (B, out, H / 2, W / 2); half of the channels go through the blocks."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, use_alpha: bool) -> None:
        super().__init__()
        middle = (in_channels + out_channels) // 2
        half = middle // 2
        self.conv_down = ConvBNAct(in_channels, middle, 3, stride=2)
        self.conv1 = ConvBNAct(middle, half)
        self.conv2 = ConvBNAct(middle, half)
        self.blocks = nn.Sequential(*[BasicBlock(half, True, use_alpha) for _ in range(num_blocks)])
        self.attn = EffectiveSE(2 * half)
        self.conv3 = ConvBNAct(2 * half, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_down(x)
        x = torch.cat([self.conv1(x), self.blocks(self.conv2(x))], 1)
        return self.conv3(self.attn(x))


class CSPRepResNet(nn.Module):
    """Images (B, 3, H, W), H and W multiples of 32 -> three maps (B, C, H / s, W / s) of strides 8, 16, 32.

    ``out_channels`` and ``strides`` describe them in that order. ``use_alpha`` is PP-YOLOE+'s weight of the 1x1 branches.
    """

    strides = (8, 16, 32)

    def __init__(self, depth: float = 1.0, width: float = 1.0, use_alpha: bool = False) -> None:
        super().__init__()
        blocks = scaled(LAYERS, depth)
        channels = scaled(CHANNELS, width)
        stem, half_stem = channels[0], channels[0] // 2
        self.stem = nn.Sequential()
        self.stem.add_module("conv1", ConvBNAct(3, half_stem, 3, stride=2))
        self.stem.add_module("conv2", ConvBNAct(half_stem, half_stem, 3))
        self.stem.add_module("conv3", ConvBNAct(half_stem, stem, 3))
        self.stages = nn.ModuleList(
            CSPResStage(c_in, c_out, n, use_alpha) for c_in, c_out, n in zip(channels, channels[1:], blocks, strict=False)
        )
        self.out_channels = channels[2:]
        init_he(self)

    def forward(self, images: Tensor) -> list[Tensor]:
        height, width = images.shape[-2:]
        if height % 32 or width % 32:
            raise ValueError(f"the input size must be a multiple of 32 px on both sides, got {height} x {width} (H x W)")
        x = self.stem(images)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps[1:]
