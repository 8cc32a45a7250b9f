"""RepVGG: parallel branches in training, one convolution in deployment (arXiv 2101.03697)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdet.models.layers import ConvBNAct


class RepVGGBlock(nn.Module):
    """``act(bn(conv3x3(x)) + alpha * bn(conv1x1(x)) + bn(x))``: (B, in, H, W) -> (B, out, ceil(H / stride), ceil(W / stride)).

    The last term is there with ``identity``, where input and output have one shape. ``alpha`` (only with ``use_alpha``) is one
    learned scalar, 1 at the start, and multiplies the 1x1 branch whatever its value. After ``fuse()`` the block holds the single
    equivalent 3x3 convolution with bias and can no longer be trained as several.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        use_alpha: bool = False,
        act: type[nn.Module] = nn.SiLU,
        stride: int = 1,
        groups: int = 1,
        identity: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = ConvBNAct(in_channels, out_channels, 3, stride, groups, act=None)
        self.conv2 = ConvBNAct(in_channels, out_channels, 1, 1, groups, act=None)
        self.stride = stride
        same_shape = in_channels == out_channels and stride == 1
        self.identity = nn.BatchNorm2d(in_channels) if identity and same_shape else None
        self.alpha = nn.Parameter(torch.ones(1)) if use_alpha else None
        self.fused: nn.Conv2d | None = None
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return self.act(self.fused(x))
        # What a strided 1x1 convolution reads, taken beforehand: torch 2.13 and 2.14 crash on the CPU in the backward pass of one
        # over three channels in channels_last memory, such as a first block's (design/siamese.md, B18).
        pointwise = self.conv2(x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride])
        if self.alpha is not None:
            pointwise = self.alpha * pointwise
        total = self.conv1(x) + pointwise
        if self.identity is not None:
            total = total + self.identity(x)
        return self.act(total)

    @torch.no_grad()
    def fuse(self) -> None:
        """Replaces the branches, with their running statistics, by one convolution; in place, idempotent. It learns if the 3x3
        convolution did."""
        if self.fused is not None:
            return
        kernel, bias = _absorb_norm(self.conv1)
        pointwise, pointwise_bias = _absorb_norm(self.conv2)
        alpha = 1.0 if self.alpha is None else self.alpha.double()
        kernel = kernel + alpha * F.pad(pointwise, (1, 1, 1, 1))
        bias = bias + alpha * pointwise_bias
        if self.identity is not None:
            scale, shift = _scale_and_shift(self.identity)
            inputs = kernel.shape[
                1
            ]  # of a group; output channel i takes input channel i, which is number i % inputs of its group
            rows = torch.arange(len(kernel), device=kernel.device)
            kernel[rows, rows % inputs, 1, 1] += scale
            bias = bias + shift
        self.fused = _biased_conv(self.conv1.conv, kernel, bias)
        del self.conv1, self.conv2
        self.identity = self.alpha = None


def _scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """What a batch norm does in evaluation, ``x * scale + shift``, each (C,) float64."""
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def _absorb_norm(layer: ConvBNAct) -> tuple[Tensor, Tensor]:
    """Kernel (out, in, k, k) and bias (out,) in float64 of the convolution that equals ``layer`` in evaluation."""
    scale, shift = _scale_and_shift(layer.bn)
    return layer.conv.weight.double() * scale.reshape(-1, 1, 1, 1), shift


def _biased_conv(like: nn.Conv2d, kernel: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution with the given kernel and bias, in all else (geometry, device, dtype, training flags) as ``like``."""
    geometry = {name: getattr(like, name) for name in ("stride", "padding", "dilation", "groups", "padding_mode")}
    conv = nn.Conv2d(like.in_channels, like.out_channels, like.kernel_size, **geometry)
    conv = conv.to(device=like.weight.device, dtype=like.weight.dtype)
    conv.weight.copy_(kernel)
    conv.bias.copy_(bias)
    return conv.train(like.training).requires_grad_(like.weight.requires_grad)


@torch.no_grad()
def reparameterize(model: nn.Module, inplace: bool = False) -> nn.Module:
    """``model`` in evaluation mode with every RepVGG block fused and every batch norm folded into its convolution.

    Its outputs equal those of ``model.eval()`` up to rounding; device, dtype and ``requires_grad`` stay. Unless ``inplace`` it
    is a copy and ``model`` itself is not changed.
    """
    changed = (model if inplace else copy.deepcopy(model)).eval()
    for module in list(changed.modules()):
        if isinstance(module, RepVGGBlock):
            module.fuse()
    for module in list(changed.modules()):
        if isinstance(module, ConvBNAct) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = _biased_conv(module.conv, *_absorb_norm(module))
            module.bn = nn.Identity()
    return changed


def deploy(model: nn.Module) -> nn.Module:
    """The form of ``model`` that is fastest to run: a re-parameterised copy in evaluation mode."""
    return reparameterize(model)


class RepVGGSize(NamedTuple):
    """Width and depth of a published network (arXiv 2101.03697, tables 2 and 3)."""

    widths: tuple[int, int, int, int, int]  # channels of stages 0 to 4
    num_blocks: tuple[int, int, int, int]  # of stages 1 to 4; stage 0 is one block


def _published(num_blocks: tuple[int, int, int, int], a: float, b: float) -> RepVGGSize:
    """The widths of multipliers ``a`` (stages 0 to 3) and ``b`` (stage 4)."""
    return RepVGGSize((min(64, int(64 * a)), int(64 * a), int(128 * a), int(256 * a), int(512 * b)), num_blocks)


_BLOCKS_A, _BLOCKS_B = (2, 4, 14, 1), (4, 6, 16, 1)
REPVGG_SIZES = {
    "A0": _published(_BLOCKS_A, 0.75, 2.5),
    "A1": _published(_BLOCKS_A, 1.0, 2.5),
    "A2": _published(_BLOCKS_A, 1.5, 2.75),
    "B0": _published(_BLOCKS_B, 1.0, 2.5),
    "B1": _published(_BLOCKS_B, 2.0, 4.0),
    "B2": _published(_BLOCKS_B, 2.5, 5.0),
    "B3": _published(_BLOCKS_B, 3.0, 5.0),
    "tiny": RepVGGSize((16, 24, 32, 48, 64), (1, 2, 3, 1)),  # for tests and CPUs; not published
}


class RepVGG(nn.Module):
    """Stages of RepVGG blocks: images (B, 3, H, W) -> list of (B, C_k, H / s_k, W / s_k) for k in ``out_stages``.

    Stages beyond the last of ``out_stages`` are not built. ``strides`` holds the stride of each stage's first block; s_k is the
    product up to stage k. ``num_blocks`` (stages 1 to 4) replaces the published depth.

    Raises:
        ValueError: an unknown ``variant``, or ``out_stages`` that are not ascending stages.
    """

    def __init__(
        self,
        variant: str = "A0",
        strides: Sequence[int] = (2, 2, 2, 2, 2),
        num_blocks: Sequence[int] | None = None,
        out_stages: Sequence[int] = (4,),
    ) -> None:
        super().__init__()
        if variant not in REPVGG_SIZES:
            raise ValueError(f"RepVGG variant {variant!r}: expected one of {', '.join(REPVGG_SIZES)}")
        stages = tuple(out_stages)
        if not stages or stages != tuple(sorted(set(stages))) or not 0 <= stages[0] <= stages[-1] <= 4:
            raise ValueError(f"out_stages={stages}: expected ascending numbers of stages, 0 to 4")
        widths, depths = REPVGG_SIZES[variant]
        depths = (1, *(num_blocks or depths))
        self.out_stages = stages
        self.out_channels = [widths[k] for k in stages]
        self.strides = [_product(strides[: k + 1]) for k in stages]
        channels = 3
        for k in range(stages[-1] + 1):
            blocks = []
            for i in range(depths[k]):
                stride = strides[k] if i == 0 else 1
                blocks.append(RepVGGBlock(channels, widths[k], act=nn.ReLU, stride=stride, identity=True))
                channels = widths[k]
            setattr(self, f"stage{k}", nn.Sequential(*blocks))

    def stages(self) -> Iterator[tuple[str, nn.Module]]:
        """Name and module of each stage, first to last."""
        for k in range(self.out_stages[-1] + 1):
            yield f"stage{k}", getattr(self, f"stage{k}")

    def forward(self, images: Tensor) -> list[Tensor]:
        outputs, x = [], images
        for k, (_, stage) in enumerate(self.stages()):
            x = stage(x)
            if k in self.out_stages:
                outputs.append(x)
        return outputs


def _product(values: Sequence[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result
