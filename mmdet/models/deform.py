"""Modulated deformable convolution (arXiv 1811.11168, section 3.2). B images, k kernel size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula
from torchvision.ops import deform_conv2d

from mmdet.models.boxes import at_least_float32


def offset_conv(in_channels: int, kernel_size: int = 3, stride: int = 1) -> nn.Conv2d:
    """The convolution that says where each tap looks; zero at the start, which is a plain convolution with all taps halved.

    Its ``3 * k * k`` channels: for each tap the shift (y, x) in cells, then one mask logit per tap. The layout is that of the
    published weights and, for the shifts, torchvision's (design/recipes.md, gotcha 22).
    """
    return zero_init(nn.Conv2d(in_channels, 3 * kernel_size**2, kernel_size, stride, kernel_size // 2))


def zero_init(conv: nn.Conv2d) -> nn.Conv2d:
    """The same convolution with weights and bias 0."""
    nn.init.zeros_(conv.weight)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def deformable(x: Tensor, conv: nn.Conv2d, conv_offset: nn.Conv2d) -> Tensor:
    """``conv`` applied to (B, in, H, W) with the taps that ``conv_offset`` asks for -> (B, out, H', W') in the type of ``x``.

    Computed in at least float32 with autocast off: a half type has no fractions of a cell left on a large map.
    """
    kind = "cpu" if x.is_meta else x.device.type  # on meta only operations are counted
    with torch.autocast(kind, enabled=False):
        full = at_least_float32(x)
        weight, bias, shift_weight, shift_bias = (
            None if p is None else p.to(full.dtype) for p in (conv.weight, conv.bias, conv_offset.weight, conv_offset.bias)
        )
        wanted = F.conv2d(full, shift_weight, shift_bias, conv_offset.stride, conv_offset.padding)
        taps = conv.kernel_size[0] * conv.kernel_size[1]
        shifts, mask = wanted.split([2 * taps, taps], 1)
        # torchvision reads memory that is not the map's where a shift is NaN. Outside the map a tap gives 0, times a mask that is
        # NaN as well: the fault still shows in the result.
        shifts = shifts.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
        out = deform_conv2d(full, shifts, weight, bias, conv.stride, conv.padding, conv.dilation, mask.sigmoid())
    return out.to(x.dtype)


@register_flop_formula(torch.ops.torchvision.deform_conv2d)
def _count_operations(_input, weight, *_args, out_shape, **_kwargs) -> int:
    """Of shapes: what the plain convolution takes, two operations per multiply-add; the sampling is not counted."""
    return 2 * torch.Size(out_shape).numel() * torch.Size(weight[1:]).numel()
