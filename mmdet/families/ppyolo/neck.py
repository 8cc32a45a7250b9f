"""The necks of PP-YOLO (arXiv 2007.12099, section 3) and PP-YOLOv2 (arXiv 2104.10419, section 3).

Channel numbers: PaddleDetection 666f597, ppdet/modeling/necks/yolo_fpn.py; they agree with the published files. Both map
(B, C, H / s, W / s), fine first, to maps of the same sizes, coarse first, of ``out_channels``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.families.ppyolo.layers import CoordConv, DropBlock, Grid, LeakyReLU
from mmdet.models.layers import SPP, ConvBNAct, init_he


def upsampled_beside(route: Tensor, x: Tensor) -> Tensor:
    """The coarser map at the size of ``x``, and ``x``: (B, C + C', H, W)."""
    return torch.cat([F.interpolate(route, scale_factor=2.0, mode="nearest"), x], 1)


class DetectionBlock(nn.Module):
    """(B, in, H, W) -> route (B, channels, H, W), for the next level, and tip (B, 2 * channels, H, W), for the head."""

    def __init__(
        self, in_channels: int, channels: int, num_pairs: int, coord: bool, spp: bool, drop: DropBlock | None, grid: Grid
    ) -> None:
        super().__init__()

        def conv(c_in: int, c_out: int, kernel_size: int) -> nn.Module:
            if coord:
                return CoordConv(c_in, c_out, kernel_size, LeakyReLU, grid)
            return ConvBNAct(c_in, c_out, kernel_size, act=LeakyReLU)

        layers: list[tuple[str, nn.Module]] = []
        width = in_channels
        for i in range(num_pairs):
            layers.append((f"conv{2 * i}", conv(width, channels, 1)))
            layers.append((f"conv{2 * i + 1}", ConvBNAct(channels, 2 * channels, 3, act=LeakyReLU)))
            width = 2 * channels
        drop_at = 2
        if spp:
            pooled = channels if num_pairs else width
            layers.insert(3, ("spp", SPP(pooled, pooled, act=LeakyReLU)))
            drop_at = 5
        if drop is not None:
            layers.insert(drop_at if num_pairs else len(layers), ("drop", drop))
        self.conv_module = nn.Sequential()
        for name, layer in layers:
            self.conv_module.add_module(name, layer)
        self.conv_module.add_module("route", conv(width, channels, 1))
        self.tip = conv(channels, 2 * channels, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        route = self.conv_module(x)
        return route, self.tip(route)


class PPYOLOFPN(nn.Module):
    """The neck of PP-YOLO: from coarse to fine.

    Args:
        in_channels: of the maps, fine first.
        num_pairs: pairs of a 1x1 and a 3x3 convolution in each block before its route.
        coord: CoordConv in place of the 1x1 convolutions and the tip.
        spp: spatial pyramid pooling in the coarsest block.
        keep_prob: of DropBlock.
        block_size: of DropBlock.
        grid: of CoordConv.
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        num_pairs: int = 2,
        coord: bool = True,
        spp: bool = True,
        keep_prob: float = 0.9,
        block_size: int = 3,
        grid: Grid = "full",
    ) -> None:
        super().__init__()
        levels = len(in_channels)
        channels = [64 * 2 ** (levels - i) for i in range(levels)]
        self.out_channels = tuple(2 * c for c in channels)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for i, c_in in enumerate(reversed(in_channels)):
            c_in += 512 // 2**i if i else 0
            drop = DropBlock(block_size, keep_prob)
            self.blocks.append(DetectionBlock(c_in, channels[i], num_pairs, coord, spp and i == 0, drop, grid))
            if i < levels - 1:
                self.transitions.append(ConvBNAct(channels[i], 256 // 2**i, 1, act=LeakyReLU))
        init_he(self)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        route, tip = self.blocks[0](maps[-1])
        tips = [tip]
        for i, x in enumerate(reversed(maps[:-1])):
            route, tip = self.blocks[i + 1](upsampled_beside(self.transitions[i](route), x))
            tips.append(tip)
        return tips


class CSPBlock(nn.Module):
    """(B, in, H, W) -> (B, 2 * channels, H, W): half of the channels go through ``num_pairs`` of 1x1 and 3x3 convolutions.

    With ``spp`` the second pair's 3x3 convolution is spatial pyramid pooling instead. ``drop`` follows the second pair.
    """

    def __init__(self, in_channels: int, channels: int, num_pairs: int, spp: bool, drop: DropBlock) -> None:
        super().__init__()
        self.conv1 = ConvBNAct(in_channels, channels, 1, act=nn.Mish)
        self.conv2 = ConvBNAct(in_channels, channels, 1, act=nn.Mish)
        self.conv_module = nn.Sequential()
        for i in range(num_pairs):
            self.conv_module.add_module(f"{i}_0", ConvBNAct(channels, channels, 1, act=nn.Mish))
            if spp and i == 1:
                self.conv_module.add_module("spp", SPP(channels, channels, act=nn.Mish))
            else:
                self.conv_module.add_module(f"{i}_1", ConvBNAct(channels, channels, 3, act=nn.Mish))
            if i == 1:
                self.conv_module.add_module("drop", drop)
        self.conv3 = ConvBNAct(2 * channels, 2 * channels, 1, act=nn.Mish)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.conv_module(self.conv1(x)), self.conv2(x)], 1))


class PPYOLOPAN(nn.Module):
    """The neck of PP-YOLOv2: from coarse to fine and back, with Mish. Arguments as ``PPYOLOFPN``'s."""

    def __init__(
        self, in_channels: Sequence[int], num_pairs: int = 3, spp: bool = True, keep_prob: float = 0.9, block_size: int = 3
    ) -> None:
        super().__init__()
        levels = len(in_channels)
        channels = [512 // 2**i for i in range(levels)]
        self.out_channels = tuple(2 * c for c in channels)

        def block(c_in: int, i: int, spp: bool) -> CSPBlock:
            return CSPBlock(c_in, channels[i], num_pairs, spp, DropBlock(block_size, keep_prob))

        self.fpn = nn.ModuleList()
        self.fpn_transitions = nn.ModuleList()
        for i, c_in in enumerate(reversed(in_channels)):
            self.fpn.append(block(c_in + (channels[i - 1] if i else 0), i, spp and i == 0))
            if i < levels - 1:
                self.fpn_transitions.append(ConvBNAct(self.out_channels[i], channels[i], 1, act=nn.Mish))
        self.pan = nn.ModuleList()
        self.pan_transitions = nn.ModuleList()
        for i in range(levels - 1):
            coarse, fine = self.out_channels[i : i + 2]
            self.pan_transitions.append(ConvBNAct(fine, fine, 3, stride=2, act=nn.Mish))
            self.pan.append(block(coarse + fine, i, spp=False))
        init_he(self)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        top_down: list[Tensor] = []
        for i, x in enumerate(reversed(maps)):
            if i:
                x = upsampled_beside(self.fpn_transitions[i - 1](top_down[-1]), x)
            top_down.append(self.fpn[i](x))
        bottom_up = [top_down[-1]]
        for i in reversed(range(len(self.pan))):
            bottom_up.append(self.pan[i](torch.cat([self.pan_transitions[i](bottom_up[-1]), top_down[i]], 1)))
        return bottom_up[::-1]
