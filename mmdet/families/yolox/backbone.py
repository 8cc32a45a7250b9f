"""The backbones: CSPDarknet of YOLOX, and Darknet-53 (arXiv 1804.02767) of its YOLOv3 variant (numbers: Megvii 6ddff48)."""

from __future__ import annotations

from torch import Tensor, nn

from mmdet.families.yolox.layers import Act, CSPLayer, Focus, ResBlock, SPPBottleneck, conv3x3
from mmdet.models.layers import ConvBNAct


def _stages(backbone: nn.Module, images: Tensor) -> list[Tensor]:
    """The maps of stages 3, 4 and 5, after a check of the size."""
    height, width = images.shape[-2:]
    if height % 32 or width % 32:
        raise ValueError(f"the input size must be a multiple of 32 px on both sides, got {height} x {width} (H x W)")
    dark3 = backbone.dark3(backbone.dark2(backbone.stem(images)))
    dark4 = backbone.dark4(dark3)
    return [dark3, dark4, backbone.dark5(dark4)]


class CSPDarknet(nn.Module):
    """Images (B, 3, H, W), H and W multiples of 32 -> three maps (B, C, H / s, W / s) of strides 8, 16, 32.

    ``out_channels`` and ``strides`` describe them in that order.
    """

    strides = (8, 16, 32)

    def __init__(self, depth: float = 1.0, width: float = 1.0, depthwise: bool = False, act: Act = nn.SiLU) -> None:
        super().__init__()
        base = int(64 * width)
        blocks = max(round(3 * depth), 1)

        def stage(factor: int, num_blocks: int, *before: nn.Module, shortcut: bool = True) -> nn.Sequential:
            """Halves the resolution and doubles the channels to ``factor * base``."""
            channels = factor * base
            down = conv3x3(channels // 2, channels, 2, depthwise, act)
            return nn.Sequential(down, *before, CSPLayer(channels, channels, num_blocks, shortcut, depthwise, act))

        self.stem = Focus(base, act)
        self.dark2 = stage(2, blocks)
        self.dark3 = stage(4, 3 * blocks)
        self.dark4 = stage(8, 3 * blocks)
        self.dark5 = stage(16, blocks, SPPBottleneck(16 * base, 16 * base, act), shortcut=False)
        self.out_channels = (4 * base, 8 * base, 16 * base)

    def forward(self, images: Tensor) -> list[Tensor]:
        return _stages(self, images)


class Darknet53(nn.Module):
    """The same interface as :class:`CSPDarknet`, from residual stages of 1, 2, 8, 8 and 4 blocks and pyramid pooling."""

    strides = (8, 16, 32)
    out_channels = (256, 512, 512)

    def __init__(self, act: Act) -> None:
        super().__init__()

        def stage(channels: int, num_blocks: int) -> list[nn.Module]:
            """Halves the resolution and doubles the channels to ``channels``."""
            blocks = [ResBlock(channels, act) for _ in range(num_blocks)]
            return [ConvBNAct(channels // 2, channels, 3, stride=2, act=act), *blocks]

        self.stem = nn.Sequential(ConvBNAct(3, 32, 3, act=act), *stage(64, 1))
        self.dark2 = nn.Sequential(*stage(128, 2))
        self.dark3 = nn.Sequential(*stage(256, 8))
        self.dark4 = nn.Sequential(*stage(512, 8))
        self.dark5 = nn.Sequential(
            *stage(1024, 4),
            ConvBNAct(1024, 512, act=act),
            ConvBNAct(512, 1024, 3, act=act),
            SPPBottleneck(1024, 512, act),
            ConvBNAct(512, 1024, 3, act=act),
            ConvBNAct(1024, 512, act=act),
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        return _stages(self, images)
