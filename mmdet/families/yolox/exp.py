"""The experiments YOLOX and its YOLOv3 variant: the recipe's numbers and how the model is put together.

Source of the numbers: Megvii YOLOX 6ddff48, yolox/exp/yolox_base.py and exps/default (design/recipes.md, 3.1). Sizes differ in
``depth`` and ``width``; the two smallest have a milder augmentation as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from mmdet.core.hooks import Hook, KeepCheckpoint
from mmdet.core.optim import ParamRule, build_param_groups
from mmdet.core.schedules import Schedule, quadratic_warmup_cosine
from mmdet.data.affine import RandomAffine
from mmdet.data.hsv import HSVJitter
from mmdet.data.letterbox import LetterboxTransform
from mmdet.data.mosaic import MosaicTrainPipeline, ScaledMixUp
from mmdet.data.structures import Sample
from mmdet.exp.detection import DetectionExp
from mmdet.families.yolox.backbone import CSPDarknet, Darknet53
from mmdet.families.yolox.compat import LOAD_RULES
from mmdet.families.yolox.head import DecoupledHead
from mmdet.families.yolox.layers import ACTIVATIONS, set_norms
from mmdet.families.yolox.loss import YOLOXCriterion
from mmdet.families.yolox.neck import PAFPN, DarknetFPN
from mmdet.models.assign import ASSIGN_BYTES
from mmdet.models.detector import Detector, Normalize

LAST_MOSAIC = "last_mosaic.pth"


class YOLOXExp(DetectionExp):
    """YOLOX: 300 epochs on COCO from scratch, 8 devices x 8 images, the last 15 without mosaic and with an L1 loss."""

    depth: float = 1.0  # factor of the number of blocks
    width: float = 1.0  # factor of the number of channels
    depthwise: bool = False  # 3x3 convolutions channel by channel (nano)
    act: Literal["silu", "leaky_relu"] = "silu"  # activation everywhere

    weight_iou: float = 5.0  # factor of the IoU loss
    weight_obj: float = 1.0  # factor of the objectness loss
    weight_cls: float = 1.0  # factor of the class loss
    weight_l1: float = 1.0  # factor of the L1 loss
    assign_bytes: int = ASSIGN_BYTES  # bytes that the assigner's intermediate tensors may take together

    no_aug_epochs = 15  # without mosaic, affine and mix-up, with the L1 loss, at the lowest learning rate
    min_lr_factor: float = 0.05  # of the learning rate in the last no_aug_epochs
    nesterov: bool = True  # look-ahead momentum
    ema_decay_type = "exponential"
    multiscale = (0.75, 1.25)  # 480 to 800 px
    multiscale_interval = 10
    nms_threshold = 0.65
    nms_type = "argmax"
    keep_top_k = 1000  # the reference keeps all; the judge counts 100 of a class
    clip_boxes = False  # as its AP was measured; cutting them gives a little more

    pad_value: int = 114  # of every channel where an image does not reach
    mosaic_prob: float = 1.0  # probability of four images in one, followed by an affine map
    mosaic_scale: tuple[float, float] = (0.1, 2.0)  # range of the affine map's scale
    degrees: float = 10.0  # largest rotation, either way
    translate: float = 0.1  # largest shift, either way, as a part of the side
    shear: float = 2.0  # largest shear, either way, degrees
    mixup_prob: float = 1.0  # probability of blending a mosaic with one more image
    mixup_scale: tuple[float, float] = (0.5, 1.5)  # range of that image's scale
    hsv_prob: float = 1.0  # probability of changing colours
    hsv_gains: tuple[int, int, int] = (5, 30, 30)  # largest change of hue (of 180), saturation and value (of 255)
    flip_prob: float = 0.5  # probability of mirroring

    def validate(self) -> None:
        super().validate()
        for name in ("depth", "width"):
            self._expect(name, getattr(self, name) > 0, "a positive number")
        self._expect("assign_bytes", self.assign_bytes >= 1, "at least 1")
        self._expect("pad_value", 0 <= self.pad_value <= 255, "0 to 255")
        for name in ("mosaic_prob", "mixup_prob", "hsv_prob", "flip_prob", "min_lr_factor"):
            self._expect(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("mosaic_scale", "mixup_scale"):
            low, high = getattr(self, name)
            self._expect(name, 0 < low <= high, "0 < smallest factor <= largest factor")
        self._expect("shear", 0 <= self.shear < 45, "0 <= shear < 45")
        self._expect("hsv_gains", all(0 <= gain <= 255 for gain in self.hsv_gains), "three numbers, 0 to 255")

    @property
    def plain_from(self) -> int:
        """The first epoch, counted from 0, of the last ``no_aug_epochs``."""
        return max(self.max_epoch - self.no_aug_epochs, 0)

    # -- the model ------------------------------------------------------------------------------------------------------

    def body(self) -> tuple[nn.Module, nn.Module]:
        """Backbone and neck."""
        act = ACTIVATIONS[self.act]
        backbone = CSPDarknet(self.depth, self.width, self.depthwise, act)
        return backbone, PAFPN(backbone.out_channels, self.depth, self.depthwise, act)

    def get_model(self) -> Detector:
        backbone, neck = self.body()
        head = DecoupledHead(
            neck.out_channels,
            self.num_classes,
            channels=int(256 * self.width),
            depthwise=self.depthwise,
            act=ACTIVATIONS[self.act],
        )
        criterion = YOLOXCriterion(
            num_classes=self.num_classes,
            l1_from_epoch=self.plain_from,
            weight_iou=self.weight_iou,
            weight_obj=self.weight_obj,
            weight_cls=self.weight_cls,
            weight_l1=self.weight_l1,
            assign_bytes=self.assign_bytes,
        )
        model = Detector(Normalize(scale=1.0, bgr=True), backbone, neck, head, criterion, self.get_postprocess(), LOAD_RULES)
        set_norms(model)
        return model

    # -- data -----------------------------------------------------------------------------------------------------------

    def train_pipeline(self) -> Callable[..., Sample]:
        return MosaicTrainPipeline(
            mosaic_prob=self.mosaic_prob,
            affine=RandomAffine(self.degrees, self.translate, self.mosaic_scale, self.shear),
            mixup=ScaledMixUp(self.mixup_prob, self.mixup_scale, self.pad_value) if self.mixup_prob else None,
            hsv=HSVJitter(self.hsv_prob, self.hsv_gains) if self.hsv_prob else None,
            flip_prob=self.flip_prob,
            fill=self.pad_value,
            plain_from=self.plain_from,
        )

    def most_boxes(self) -> int:
        """Of a mosaic, and of the image that is blended in."""
        return super().most_boxes() * ((4 if self.mosaic_prob else 1) + (1 if self.mosaic_prob and self.mixup_prob else 0))

    def eval_transform(self) -> Callable[[Sample], Sample]:
        return LetterboxTransform(self.test_size, self.pad_value)

    # -- time -----------------------------------------------------------------------------------------------------------

    def get_lr_schedule(self, steps_per_epoch: int) -> Schedule:
        epochs = self.warmup_epochs, self.max_epoch, self.no_aug_epochs
        return quadratic_warmup_cosine(*(n * steps_per_epoch for n in epochs), lowest=self.min_lr_factor)

    def eval_interval_at(self, epoch: int) -> int:
        return self.eval_interval if epoch < self.plain_from else 1

    def get_hooks(self) -> Iterable[Hook]:
        """The state before the plain epochs is kept: training can go on from there with others."""
        return (KeepCheckpoint(self.plain_from, LAST_MOSAIC),) if 0 < self.plain_from < self.max_epoch else ()

    # -- the optimizer --------------------------------------------------------------------------------------------------

    def param_rules(self) -> Sequence[ParamRule]:
        return (
            ParamRule("norm_weight", r"\.weight$", norm=True, decay_factor=0.0),
            ParamRule("weight", r"\.weight$"),
            ParamRule("bias", r"\.bias$", decay_factor=0.0),
        )

    def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = build_param_groups(model, self.param_rules(), self.learning_rate, self.weight_decay)
        return torch.optim.SGD(
            groups, lr=self.learning_rate, momentum=self.momentum, nesterov=self.nesterov and self.momentum > 0
        )

    def demo_settings(self) -> dict[str, Any]:
        """From scratch in minutes on two cores: a mild augmentation, because so short a run has no time for the full one."""
        return {
            "max_epoch": 30,
            "warmup_epochs": 1.0,
            "no_aug_epochs": 8,
            "eval_interval": 10,
            "batch_size": 8,
            "recipe_batch_size": 8,
            "basic_lr_per_img": 0.01 / 8,
            "ema_decay": 0.998,
            "input_size": (192, 192),
            "test_size": (192, 192),
            "multiscale": (1.0, 1.0),
            "mosaic_prob": 0.5,
            "mosaic_scale": (0.5, 1.5),
            "mixup_prob": 0.0,
            "channels_last": True,
        }


class YOLOv3Exp(YOLOXExp):
    """Darknet-53 and a top-down pyramid under the same head, losses and recipe."""

    act = "leaky_relu"

    def body(self) -> tuple[nn.Module, nn.Module]:
        act = ACTIVATIONS[self.act]
        return Darknet53(act), DarknetFPN(act)
