"""Building blocks of YOLOX. B images, C channels, H and W cells. Attributes are called as in Megvii's published files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mmdet.models.layers import ConvBNAct, PyramidPool

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"silu": nn.SiLU, "leaky_relu": partial(nn.LeakyReLU, 0.1)}
Act = Callable[[], nn.Module]


class DepthwiseConv(nn.Module):
    """A convolution channel by channel, then a 1x1 one: (B, in, H, W) -> (B, out, ceil(H / stride), ceil(W / stride))."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, act: Act = nn.SiLU) -> None:
        super().__init__()
        self.dconv = ConvBNAct(in_channels, in_channels, kernel_size, stride, groups=in_channels, act=act)
        self.pconv = ConvBNAct(in_channels, out_channels, act=act)

    def forward(self, x: Tensor) -> Tensor:
        return self.pconv(self.dconv(x))


def conv3x3(in_channels: int, out_channels: int, stride: int = 1, depthwise: bool = False, act: Act = nn.SiLU) -> nn.Module:
    """The 3x3 convolution of the model, whole or depthwise."""
    if depthwise:
        return DepthwiseConv(in_channels, out_channels, 3, stride, act)
    return ConvBNAct(in_channels, out_channels, 3, stride, act=act)


class Bottleneck(nn.Module):
    """1x1 then 3x3 convolution, with or without a shortcut: (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int, shortcut: bool, depthwise: bool = False, act: Act = nn.SiLU) -> None:
        super().__init__()
        self.conv1 = ConvBNAct(channels, channels, act=act)
        self.conv2 = conv3x3(channels, channels, depthwise=depthwise, act=act)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return x + y if self.shortcut else y


class CSPLayer(nn.Module):
    """(B, in, H, W) -> (B, out, H, W): half of the channels go through bottlenecks (arXiv 1911.11929)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_blocks: int,
        shortcut: bool = True,
        depthwise: bool = False,
        act: Act = nn.SiLU,
    ) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = ConvBNAct(in_channels, half, act=act)
        self.conv2 = ConvBNAct(in_channels, half, act=act)
        self.conv3 = ConvBNAct(2 * half, out_channels, act=act)
        self.m = nn.Sequential(*[Bottleneck(half, shortcut, depthwise, act) for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.m(self.conv1(x)), self.conv2(x)], 1))


class SPPBottleneck(nn.Module):
    """Halves the channels, pools a pyramid, and maps to ``out_channels``: (B, in, H, W) -> (B, out, H, W)."""

    def __init__(self, in_channels: int, out_channels: int, act: Act = nn.SiLU) -> None:
        super().__init__()
        half = in_channels // 2
        self.conv1 = ConvBNAct(in_channels, half, act=act)
        self.pool = PyramidPool((5, 9, 13))
        self.conv2 = ConvBNAct(4 * half, out_channels, act=act)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.pool(self.conv1(x)))


class Focus(nn.Module):
    """Every second pixel into channels, then a convolution: (B, 3, H, W) -> (B, out, H / 2, W / 2).

    Order of the four phases: top-left, bottom-left, top-right, bottom-right (Megvii 6ddff48, network_blocks.py).
    """

    def __init__(self, out_channels: int, act: Act = nn.SiLU) -> None:
        super().__init__()
        self.conv = ConvBNAct(12, out_channels, 3, act=act)

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = x[..., ::2, :], x[..., 1::2, :]
        return self.conv(torch.cat([top[..., ::2], bottom[..., ::2], top[..., 1::2], bottom[..., 1::2]], 1))


class ResBlock(nn.Module):
    """Darknet's residual block: 1x1 to half the channels, 3x3 back, shortcut: (B, C, H, W) -> the same shape."""

    def __init__(self, channels: int, act: Act) -> None:
        super().__init__()
        self.layer1 = ConvBNAct(channels, channels // 2, act=act)
        self.layer2 = ConvBNAct(channels // 2, channels, 3, act=act)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer2(self.layer1(x))


def set_norms(module: nn.Module, eps: float = 1e-3, momentum: float = 0.03) -> None:
    """The recipe's batch norms (Megvii 6ddff48, yolox_base.py: ``init_yolo``)."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps, layer.momentum = eps, momentum
