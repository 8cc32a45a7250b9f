"""RepVGG: two branches in training, one convolution in deployment (arXiv 2101.03697)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.layers import ConvBNAct


class RepVGGBlock(nn.Module):
    """``act(bn(conv3x3(x)) + alpha * bn(conv1x1(x)))``: (B, in, H, W) -> (B, out, H, W).

    ``alpha`` (only with ``use_alpha``) is one learned scalar, 1 at the start, and multiplies the 1x1 branch whatever its value.
    After ``fuse()`` the block holds the single equivalent 3x3 convolution with bias and can no longer be trained as two.
    """

    def __init__(self, in_channels: int, out_channels: int, use_alpha: bool = False, act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.conv1 = ConvBNAct(in_channels, out_channels, 3, act=None)
        self.conv2 = ConvBNAct(in_channels, out_channels, 1, act=None)
        self.alpha = nn.Parameter(torch.ones(1)) if use_alpha else None
        self.fused: nn.Conv2d | None = None
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return self.act(self.fused(x))
        pointwise = self.conv2(x)
        if self.alpha is not None:
            pointwise = self.alpha * pointwise
        return self.act(self.conv1(x) + pointwise)

    @torch.no_grad()
    def fuse(self) -> None:
        """Replaces both branches, with their running statistics, by one convolution; in place, idempotent."""
        if self.fused is not None:
            return
        kernel, bias = _absorb_norm(self.conv1)
        pointwise, pointwise_bias = _absorb_norm(self.conv2)
        alpha = 1.0 if self.alpha is None else self.alpha.double()
        kernel = kernel + alpha * F.pad(pointwise, (1, 1, 1, 1))
        bias = bias + alpha * pointwise_bias
        self.fused = _biased_conv(self.conv1.conv, kernel, bias)
        del self.conv1, self.conv2
        self.alpha = None


def _absorb_norm(layer: ConvBNAct) -> tuple[Tensor, Tensor]:
    """Kernel (out, in, k, k) and bias (out,) in float64 of the convolution that equals ``layer`` in evaluation."""
    norm = layer.bn
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    kernel = layer.conv.weight.double() * scale.reshape(-1, 1, 1, 1)
    return kernel, norm.bias.double() - norm.running_mean.double() * scale


def _biased_conv(like: nn.Conv2d, kernel: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution of the geometry, device and dtype of ``like`` with the given kernel and bias."""
    conv = nn.Conv2d(like.in_channels, like.out_channels, like.kernel_size, like.stride, like.padding, groups=like.groups)
    conv = conv.to(device=like.weight.device, dtype=like.weight.dtype)
    conv.weight.copy_(kernel)
    conv.bias.copy_(bias)
    return conv


@torch.no_grad()
def deploy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in evaluation mode with every RepVGG block fused and every batch norm folded into its convolution.

    Its outputs equal those of ``model.eval()`` up to float32 rounding; ``model`` itself is not changed.
    """
    copied = copy.deepcopy(model).eval()
    for module in list(copied.modules()):
        if isinstance(module, RepVGGBlock):
            module.fuse()
    for module in list(copied.modules()):
        if isinstance(module, ConvBNAct) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = _biased_conv(module.conv, *_absorb_norm(module))
            module.bn = nn.Identity()
    return copied
