"""CustomCSPPAN, the neck of PP-YOLOE (arXiv 2203.16250, section 2.2; numbers: PaddleDetection 666f597, measured)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.families.ppyoloe.backbone import BasicBlock, scaled
from mmdet.models.layers import SPP, ConvBNAct, init_he

CHANNELS = (768, 384, 192)  # of strides 32, 16, 8 at width 1
NUM_BLOCKS = 3  # per stage at depth 1


class CSPStage(nn.Module):
    """(B, in, H, W) -> (B, out, H, W): half of the channels go through blocks without shortcut, SPP in their middle."""

    def __init__(self, in_channels: int, out_channels: int, num_blocks: int, use_spp: bool) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = ConvBNAct(in_channels, half)
        self.conv2 = ConvBNAct(in_channels, half)
        self.convs = nn.Sequential()
        for i in range(num_blocks):
            self.convs.add_module(str(i), BasicBlock(half, shortcut=False))
            if use_spp and i == (num_blocks - 1) // 2:
                self.convs.add_module("spp", SPP(half, half))
        self.conv3 = ConvBNAct(2 * half, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.conv1(x), self.convs(self.conv2(x))], 1))


class CustomCSPPAN(nn.Module):
    """Maps (B, C, H / s, W / s) of strides 8, 16, 32 -> maps of strides 32, 16, 8 (coarse first) with ``out_channels``."""

    def __init__(self, in_channels: Sequence[int], depth: float = 1.0, width: float = 1.0) -> None:
        super().__init__()
        coarse_first = tuple(in_channels)[::-1]
        channels = scaled(CHANNELS, width)
        (num_blocks,) = scaled((NUM_BLOCKS,), depth)
        self.out_channels = channels
        # Every stage is one CSPStage; the Sequential around it keeps the parameter names of the published files.
        self.fpn_stages = nn.ModuleList()
        self.fpn_routes = nn.ModuleList()
        for i, (c_in, c_out) in enumerate(zip(coarse_first, channels, strict=True)):
            from_coarser = channels[i - 1] // 2 if i else 0
            self.fpn_stages.append(nn.Sequential(CSPStage(c_in + from_coarser, c_out, num_blocks, use_spp=i == 0)))
            if i < len(channels) - 1:
                self.fpn_routes.append(ConvBNAct(c_out, c_out // 2))
        self.pan_stages = nn.ModuleList()
        self.pan_routes = nn.ModuleList()
        for coarse, fine in zip(channels, channels[1:], strict=False):
            self.pan_routes.append(ConvBNAct(fine, fine, 3, stride=2))
            self.pan_stages.append(nn.Sequential(CSPStage(coarse + fine, coarse, num_blocks, use_spp=False)))
        init_he(self)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        top_down: list[Tensor] = []
        for i, x in enumerate(reversed(maps)):
            if i:
                route = F.interpolate(self.fpn_routes[i - 1](top_down[-1]), scale_factor=2.0, mode="nearest")
                x = torch.cat([route, x], 1)
            top_down.append(self.fpn_stages[i](x))
        bottom_up = [top_down[-1]]
        for i in reversed(range(len(self.pan_stages))):
            x = torch.cat([self.pan_routes[i](bottom_up[-1]), top_down[i]], 1)
            bottom_up.append(self.pan_stages[i](x))
        return bottom_up[::-1]
