"""ResNet, its variants and depths (arXiv 1512.03385; variants: arXiv 1812.01187, section 4).

Parameters carry the names of PaddleDetection's files (666f597, ppdet/modeling/backbones/resnet.py), with torch's names of the
norms' statistics: ``res4.res4b.branch2a.conv.weight``. B images, H and W their sides in px.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.deform import deformable, offset_conv, zero_init
from mmdet.models.layers import init_he

NUM_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # of stages 2 to 5 (table 1)
STAGES = (2, 3, 4, 5)
WIDTHS = (64, 128, 256, 512)

Variant = Literal["a", "b", "d"]  # stride in the 1x1, in the 3x3, in the 3x3 with a deep stem and a pooled shortcut
Norm = Callable[[int], nn.Module]  # channels -> norm


class ConvNorm(nn.Module):
    """Convolution without bias, norm, ReLU where ``act``: (B, in, H, W) -> (B, out, ceil(H / stride), ceil(W / stride))."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        act: bool = True,
        norm: Norm = nn.BatchNorm2d,
        deform: bool = False,
    ) -> None:
        super().__init__()
        self.conv_offset = offset_conv(in_channels, kernel_size, stride) if deform else None
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm = norm(out_channels)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if self.conv_offset is None else deformable(x, self.conv, self.conv_offset)
        x = self.norm(x)
        return F.relu(x, inplace=True) if self.act else x


def _shortcut(in_channels: int, out_channels: int, stride: int, variant: Variant, norm: Norm) -> nn.Module:
    """The projection beside a stage's first block."""
    if variant != "d" or stride == 1:
        return ConvNorm(in_channels, out_channels, 1, stride, act=False, norm=norm)
    shortcut = nn.Sequential()
    shortcut.add_module("pool", nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False))
    shortcut.add_module("conv", ConvNorm(in_channels, out_channels, 1, act=False, norm=norm))
    return shortcut


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (B, in, H, W) -> (B, width, H / stride, W / stride)."""

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, stride: int, project: bool, variant: Variant, norm: Norm, deform: bool
    ) -> None:
        super().__init__()
        self.short = _shortcut(in_channels, width, stride, variant, norm) if project else None
        self.branch2a = ConvNorm(in_channels, width, 3, stride, norm=norm)
        self.branch2b = ConvNorm(width, width, 3, act=False, norm=norm, deform=deform)

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.short is None else self.short(x)
        return F.relu(self.branch2b(self.branch2a(x)) + short, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut: (B, in, H, W) -> (B, 4 * width, H / stride, W / stride)."""

    expansion = 4

    def __init__(
        self, in_channels: int, width: int, stride: int, project: bool, variant: Variant, norm: Norm, deform: bool
    ) -> None:
        super().__init__()
        first, second = (stride, 1) if variant == "a" else (1, stride)
        self.branch2a = ConvNorm(in_channels, width, 1, first, norm=norm)
        self.branch2b = ConvNorm(width, width, 3, second, norm=norm, deform=deform)
        self.branch2c = ConvNorm(width, width * self.expansion, 1, act=False, norm=norm)
        self.short = _shortcut(in_channels, width * self.expansion, stride, variant, norm) if project else None

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.short is None else self.short(x)
        return F.relu(self.branch2c(self.branch2b(self.branch2a(x))) + short, inplace=True)


def block_name(stage: int, number: int, num_blocks: int) -> str:
    """``res2a``, ``res2b``, ...; in a long fourth stage ``res4a``, ``res4b1``, ``res4b2``, ... (Caffe's names)."""
    if stage == 4 and num_blocks > 10 and number:
        return f"res{stage}b{number}"
    return f"res{stage}{chr(ord('a') + number)}"


class ResNet(nn.Module):
    """Images (B, 3, H, W) -> maps (B, C, H / s, W / s) of ``return_stages``, whose C are ``out_channels`` and s ``strides``.

    Stage n has stride ``2 ** n``. Convolutions start with He's normal weights.

    Args:
        depth: 18, 34, 50 or 101.
        variant: "a" halves the map in a block's 1x1 convolution (Caffe's weights), "b" in its 3x3 (torchvision's), "d" is b with
            three 3x3 convolutions as stem and an average pool in the shortcut.
        return_stages: ascending, of 2 to 5; what lies beyond the last is not built.
        deform_stages: stages whose last 3x3 convolutions are deformable.
        norm: makes a norm for a number of channels.
    """

    def __init__(
        self,
        depth: int = 50,
        variant: Variant = "b",
        return_stages: Sequence[int] = (3, 4, 5),
        deform_stages: Sequence[int] = (),
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        if depth not in NUM_BLOCKS:
            raise ValueError(f"depth must be one of {sorted(NUM_BLOCKS)}, got {depth}")
        if variant not in ("a", "b", "d"):
            raise ValueError(f"variant must be 'a', 'b' or 'd', got {variant!r}")
        if not return_stages or list(return_stages) != sorted(set(return_stages) & set(STAGES)):
            raise ValueError(f"return_stages must be ascending numbers from 2 to 5, got {tuple(return_stages)}")
        block = BasicBlock if depth < 50 else Bottleneck
        self.return_stages = tuple(return_stages)
        self.out_channels = tuple(WIDTHS[s - 2] * block.expansion for s in return_stages)
        self.strides = tuple(2**s for s in return_stages)
        self.conv1 = _stem(variant, norm)
        channels = WIDTHS[0]
        for stage in STAGES[: return_stages[-1] - 1]:
            width, num_blocks = WIDTHS[stage - 2], NUM_BLOCKS[depth][stage - 2]
            blocks = nn.Sequential()
            for i in range(num_blocks):
                stride = 2 if i == 0 and stage > 2 else 1
                layer = block(channels, width, stride, i == 0, variant, norm, stage in deform_stages)
                blocks.add_module(block_name(stage, i, num_blocks), layer)
                channels = width * block.expansion
            self.add_module(f"res{stage}", blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_he(self)
        for module in self.modules():
            if isinstance(module, ConvNorm) and module.conv_offset is not None:
                zero_init(module.conv_offset)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = F.max_pool2d(self.conv1(images), 3, 2, 1)
        maps = []
        for stage in range(STAGES[0], self.return_stages[-1] + 1):
            x = self.get_submodule(f"res{stage}")(x)
            if stage in self.return_stages:
                maps.append(x)
        return maps


def _stem(variant: Variant, norm: Norm) -> nn.Sequential:
    """(B, 3, H, W) -> (B, 64, H / 2, W / 2)."""
    stem = nn.Sequential()
    if variant == "d":
        for i, (c_in, c_out) in enumerate(((3, 32), (32, 32), (32, 64))):
            stem.add_module(f"conv1_{i + 1}", ConvNorm(c_in, c_out, 3, 1 if i else 2, norm=norm))
    else:
        stem.add_module("conv1", ConvNorm(3, 64, 7, 2, norm=norm))
    return stem
