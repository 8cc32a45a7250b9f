"""The parts between backbone and predictions: stacks of RepVGG blocks, the template's attention, correlations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.repvgg import RepVGGBlock


def rep_stack(in_channels: int, channels: int, num_blocks: int) -> nn.Sequential:
    """``num_blocks`` RepVGG blocks of stride 1: (B, in, H, W) -> (B, channels, H, W)."""
    sizes = [in_channels, *[channels] * num_blocks]
    return nn.Sequential(*(RepVGGBlock(a, b, act=nn.ReLU, identity=True) for a, b in zip(sizes, sizes[1:], strict=False)))


class TemplateBranch(nn.Module):
    """What is looked for: the template's features, each position an average over all positions that resemble it.

    (B, in, h', w') -> (B, C, h', w'). With the positions' features F (Z, C) it is ``softmax_rows(F F^T / sqrt(C)) F``. The system
    that this follows leaves the scale out and multiplies from the other side, so that its rows are no averages
    (design/siamese.md, B2, leaves both to us).
    """

    def __init__(self, in_channels: int, channels: int, num_blocks: int = 3) -> None:
        super().__init__()
        self.stack = rep_stack(in_channels, channels, num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stack(x)
        tokens = x.flatten(2).transpose(1, 2)  # (B, Z, C)
        similar = (tokens @ tokens.transpose(1, 2) * tokens.shape[-1] ** -0.5).softmax(-1)
        return (similar @ tokens).transpose(1, 2).reshape(x.shape)


class PixelCorr(nn.Module):
    """Scaled scalar products of every search position with every template position: search (B, C, H', W') and template
    (B, C, h', w') -> (B, h'w', H', W'), channel ``i`` belonging to template position ``i``, row by row.

    The scale ``1 / sqrt(C)`` brings them to the size of the features, to which they are joined.
    """

    def forward(self, search: Tensor, template: Tensor) -> Tensor:
        products = template.flatten(2).transpose(1, 2) @ search.flatten(2)
        return (products * search.shape[1] ** -0.5).unflatten(2, search.shape[2:])

    def out_channels(self, channels: int, positions: int) -> int:
        """``channels`` C and ``positions`` h'w' -> channels of the result."""
        return positions


class DepthwiseCorr(nn.Module):
    """Each channel of the search features correlated with the same channel of the template's middle: search (B, C, H', W') and
    template (B, C, h', w') -> (B, C, H', W'), the mean over the kernel's cells, zeros beyond the border.

    The kernel is the middle half of the template, which the target fills when its crop is twice as large. Where its side is even,
    the result at a cell belongs to the cell's upper left corner.
    """

    def forward(self, search: Tensor, template: Tensor) -> Tensor:
        batch, channels, height, width = search.shape
        kernel = _middle_half(template)
        rows, columns = kernel.shape[2:]
        padding = (columns // 2, columns - 1 - columns // 2, rows // 2, rows - 1 - rows // 2)
        grouped = F.pad(search, padding).reshape(1, batch * channels, height + rows - 1, width + columns - 1)
        result = F.conv2d(grouped, kernel.reshape(batch * channels, 1, rows, columns), groups=batch * channels)
        return result.reshape(batch, channels, height, width) / (rows * columns)

    def out_channels(self, channels: int, positions: int) -> int:
        """``channels`` C and ``positions`` h'w' -> channels of the result."""
        return channels


def _middle_half(template: Tensor) -> Tensor:
    height, width = template.shape[2:]
    top, left = height // 4, width // 4
    return template[:, :, top : height - top, left : width - left]


CORRELATIONS: dict[str, type[PixelCorr] | type[DepthwiseCorr]] = {"pixel": PixelCorr, "depthwise": DepthwiseCorr}


def joined(features: list[Tensor]) -> Tensor:
    """Feature maps of one size, side by side: list of (B, C_l, H', W') -> (B, sum of C_l, H', W')."""
    return torch.cat(features, 1)
