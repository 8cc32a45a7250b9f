"""The necks: a path-aggregation pyramid for YOLOX, a top-down one for its YOLOv3 variant (numbers: Megvii 6ddff48).

Both take maps (B, C, H / s, W / s) of strides 8, 16, 32 and return as many, in the same order, with ``out_channels``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.families.yolox.layers import Act, CSPLayer, conv3x3
from mmdet.models.layers import ConvBNAct


def _upsampled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class PAFPN(nn.Module):
    """Top-down, then bottom-up (arXiv 1803.01534), each step a CSPLayer without shortcuts."""

    def __init__(self, in_channels: Sequence[int], depth: float = 1.0, depthwise: bool = False, act: Act = nn.SiLU) -> None:
        super().__init__()
        fine, middle, coarse = in_channels
        blocks = round(3 * depth)

        def csp(channels_in: int, channels_out: int) -> CSPLayer:
            return CSPLayer(channels_in, channels_out, blocks, shortcut=False, depthwise=depthwise, act=act)

        self.lateral_conv0 = ConvBNAct(coarse, middle, act=act)
        self.C3_p4 = csp(2 * middle, middle)
        self.reduce_conv1 = ConvBNAct(middle, fine, act=act)
        self.C3_p3 = csp(2 * fine, fine)
        self.bu_conv2 = conv3x3(fine, fine, 2, depthwise, act)
        self.C3_n3 = csp(2 * fine, middle)
        self.bu_conv1 = conv3x3(middle, middle, 2, depthwise, act)
        self.C3_n4 = csp(2 * middle, coarse)
        self.out_channels = (fine, middle, coarse)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        fine, middle, coarse = maps
        lateral = self.lateral_conv0(coarse)
        reduced = self.reduce_conv1(self.C3_p4(torch.cat([_upsampled(lateral), middle], 1)))
        out_fine = self.C3_p3(torch.cat([_upsampled(reduced), fine], 1))
        out_middle = self.C3_n3(torch.cat([self.bu_conv2(out_fine), reduced], 1))
        out_coarse = self.C3_n4(torch.cat([self.bu_conv1(out_middle), lateral], 1))
        return [out_fine, out_middle, out_coarse]


class DarknetFPN(nn.Module):
    """Top-down only; the coarsest map passes through. ``in_channels`` are those of Darknet-53."""

    out_channels = (128, 256, 512)

    def __init__(self, act: Act, in_channels: Sequence[int] = (256, 512, 512)) -> None:
        super().__init__()
        fine, middle, coarse = in_channels
        self.out1_cbl = ConvBNAct(coarse, 256, act=act)
        self.out1 = self._embedding(middle + 256, 256, act)
        self.out2_cbl = ConvBNAct(256, 128, act=act)
        self.out2 = self._embedding(fine + 128, 128, act)

    @staticmethod
    def _embedding(in_channels: int, channels: int, act: Act) -> nn.Sequential:
        """1x1 and 3x3 convolutions by turns, ending with ``channels``."""
        return nn.Sequential(
            ConvBNAct(in_channels, channels, act=act),
            ConvBNAct(channels, 2 * channels, 3, act=act),
            ConvBNAct(2 * channels, channels, act=act),
            ConvBNAct(channels, 2 * channels, 3, act=act),
            ConvBNAct(2 * channels, channels, act=act),
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        fine, middle, coarse = maps
        out_middle = self.out1(torch.cat([_upsampled(self.out1_cbl(coarse)), middle], 1))
        out_fine = self.out2(torch.cat([_upsampled(self.out2_cbl(out_middle)), fine], 1))
        return [out_fine, out_middle, coarse]
