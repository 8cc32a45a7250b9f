"""The experiments PP-YOLO and PP-YOLOv2: the recipes' numbers and how the model is put together.

Source of the numbers: PaddleDetection 666f597, configs/ppyolo (design/recipes.md, 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from loguru import logger
from torch import nn

from mmdet.core.optim import ParamRule
from mmdet.core.schedules import Schedule, warmup_multistep
from mmdet.data.mixup import MixUp
from mmdet.data.structures import Sample
from mmdet.exp.expand_crop import ExpandCropExp
from mmdet.families.ppyolo.anchors import Anchors
from mmdet.families.ppyolo.compat import load_rules
from mmdet.families.ppyolo.head import PPYOLOHead
from mmdet.families.ppyolo.loss import PPYOLOCriterion
from mmdet.families.ppyolo.neck import PPYOLOFPN, PPYOLOPAN
from mmdet.models.assign import ASSIGN_BYTES
from mmdet.models.detector import Detector, Normalize
from mmdet.models.resnet import ResNet

COCO_ANCHORS = ((10, 13), (16, 30), (33, 23), (30, 61), (62, 45), (59, 119), (116, 90), (156, 198), (373, 326))


class PPYOLOExp(ExpandCropExp):
    """PP-YOLO: 811 epochs on COCO from a pretrained backbone, 8 devices x 24 images."""

    depth: int = 50  # layers of the ResNet-vd: 18, 34, 50 or 101
    return_stages: tuple[int, ...] = (3, 4, 5)  # of the backbone, fine first; stage n has stride 2 ** n
    deform_stages: tuple[int, ...] = (5,)  # of the backbone, with deformable 3x3 convolutions
    neck: Literal["fpn", "pan"] = "fpn"  # PP-YOLO's or PP-YOLOv2's
    neck_pairs: int = 2  # pairs of 1x1 and 3x3 convolutions in each of its blocks
    coord_conv: bool = True  # convolutions of the FPN see where they are
    coord_grid: Literal["full", "half"] = "full"  # from -1 to 1, or to -0.5 (PaddleDetection's newer code)
    spp: bool = True  # spatial pyramid pooling in the coarsest block of the neck
    keep_prob: float = 0.9  # share of cells that DropBlock keeps; 1: off
    drop_block_size: int = 3  # side of what it drops, cells
    anchors: tuple[tuple[float, float], ...] = COCO_ANCHORS  # (width, height) px
    anchor_masks: tuple[tuple[int, ...], ...] = ((6, 7, 8), (3, 4, 5), (0, 1, 2))  # anchors of each level, coarse first
    iou_aware: bool = True  # a branch predicts the IoU of each box
    iou_aware_factor: float = 0.4  # exponent of that IoU in the score
    scale_x_y: float = 1.05  # above 1 a centre can reach the rim of its cell

    ignore_threshold: float = 0.7  # IoU with a box above which a cell need not learn that there is none
    weight_iou: float = 2.5  # factor of the IoU loss
    weight_iou_aware: float = 1.0  # factor of the IoU branch's loss
    assign_bytes: int = ASSIGN_BYTES  # bytes that the assigner's intermediate tensors may take together

    max_epoch = 811
    milestones: tuple[float, ...] = (649, 730)  # epochs after which the learning rate falls to a tenth
    batch_size = 192
    recipe_batch_size = 192
    basic_lr_per_img = 0.01 / 192
    clip_norm = 35.0  # the norm over all parameters, as PaddleDetection trained all four (design/recipes.md, 3.3)
    input_size = (608, 608)
    test_size = (608, 608)
    multiscale = (320 / 608, 1.0)  # 320 to 608 px
    nms_type = "matrix"
    nms_top_k = 500

    mixup: bool = True  # every image is mixed with another one, but in the last no_aug_epochs
    mixup_beta: tuple[float, float] = (1.5, 1.5)  # parameters of the beta distribution of its share

    def validate(self) -> None:
        super().validate()
        self._expect("depth", self.depth in (18, 34, 50, 101), "18, 34, 50 or 101")
        stages = self.return_stages
        ascending = len(stages) > 0 and list(stages) == sorted(set(stages) & {2, 3, 4, 5})
        self._expect("return_stages", ascending, "ascending numbers from 2 to 5")
        self._expect("deform_stages", set(self.deform_stages) <= {2, 3, 4, 5}, "some of 2, 3, 4, 5")
        self._expect("anchor_masks", len(self.anchor_masks) == len(self.return_stages), "one for each of return_stages")
        self._expect("neck_pairs", self.neck_pairs >= (2 if self.neck == "pan" else 0), "0 or more, with the PAN at least 2")
        self._expect("keep_prob", 0 < self.keep_prob <= 1, "a share, above 0 and up to 1")
        self._expect("drop_block_size", self.drop_block_size >= 1 and self.drop_block_size % 2 == 1, "an odd number")
        self._expect("anchors", all(min(sides) > 0 for sides in self.anchors), "positive sides")
        self._expect("iou_aware_factor", 0 <= self.iou_aware_factor <= 1, "0 to 1")
        self._expect("ignore_threshold", 0 < self.ignore_threshold <= 1, "0 < ignore_threshold <= 1")
        self._expect("milestones", list(self.milestones) == sorted(self.milestones), "ascending epochs")
        self._expect("mixup_beta", min(self.mixup_beta) > 0, "two positive numbers")
        self._expect("assign_bytes", self.assign_bytes >= 1, "at least 1")
        try:
            self._anchors()
        except ValueError as error:
            self._expect("anchor_masks", False, f"each anchor once, as many on every level ({error})")

    def prepare(self) -> None:
        super().prepare()
        if self.milestones and self.milestones[0] >= self.max_epoch:
            logger.warning(
                f"milestones={self.milestones} are not reached in max_epoch={self.max_epoch}: the learning rate never falls. The "
                f"recipe's are at 0.6 to 0.9 of the epochs; that would be e.g. milestones=({0.8 * self.max_epoch:g},)"
            )

    def _anchors(self) -> Anchors:
        strides = tuple(2**stage for stage in reversed(self.return_stages))
        return Anchors(self.anchors, self.anchor_masks, strides)

    def get_model(self) -> Detector:
        anchors = self._anchors()
        backbone = ResNet(self.depth, "d", self.return_stages, self.deform_stages)
        neck = self._neck(backbone.out_channels)
        head = PPYOLOHead(
            neck.out_channels,
            self.num_classes,
            anchors,
            iou_aware=self.iou_aware,
            iou_aware_factor=self.iou_aware_factor,
            scale_x_y=self.scale_x_y,
        )
        criterion = PPYOLOCriterion(
            self.num_classes,
            anchors,
            iou_aware=self.iou_aware,
            scale_x_y=self.scale_x_y,
            ignore_threshold=self.ignore_threshold,
            weight_iou=self.weight_iou,
            weight_iou_aware=self.weight_iou_aware,
            assign_bytes=self.assign_bytes,
        )
        normalize = Normalize(self.pixel_mean, self.pixel_std)
        rules = load_rules(anchors.per_level, self.iou_aware)
        return Detector(normalize, backbone, neck, head, criterion, self.get_postprocess(), rules)

    def _neck(self, in_channels: Sequence[int]) -> nn.Module:
        drop = {"keep_prob": self.keep_prob, "block_size": self.drop_block_size}
        if self.neck == "pan":
            return PPYOLOPAN(in_channels, self.neck_pairs, self.spp, **drop)
        return PPYOLOFPN(in_channels, self.neck_pairs, self.coord_conv, self.spp, grid=self.coord_grid, **drop)

    def load_step(self) -> Callable[..., Sample]:
        return MixUp(*self.mixup_beta, self.max_epoch - self.no_aug_epochs) if self.mixup else super().load_step()

    def param_rules(self) -> Sequence[ParamRule]:
        """No decay of norms and of the head's biases; the biases of ``conv_offset`` do decay (pure/optim_groups.miemie)."""
        outputs = ParamRule("output_bias", r"^head\.outputs\.\d+\.bias$", decay_factor=0.0)
        return (ParamRule("norm", norm=True, decay_factor=0.0), outputs)

    def get_lr_schedule(self, steps_per_epoch: int) -> Schedule:
        milestones = [epoch * steps_per_epoch for epoch in self.milestones]
        return warmup_multistep(self.warmup_epochs * steps_per_epoch, milestones)

    def demo_settings(self) -> dict[str, Any]:
        """From scratch in minutes on two cores: small images as they are, without mix-up, crops and DropBlock, which such a short
        run has no time to learn from. The rate falls early, because the L1 terms do not settle before it does."""
        return {
            "max_epoch": 30,
            "milestones": (20.0, 27.0),
            "warmup_epochs": 1.0,
            "eval_interval": 15,
            "batch_size": 8,
            "recipe_batch_size": 8,
            "basic_lr_per_img": 0.01 / 8,
            "input_size": (192, 192),
            "test_size": (192, 192),
            "multiscale": (1.0, 1.0),
            "mixup": False,
            "expand_prob": 0.0,
            "random_crop": False,
            "keep_prob": 1.0,
            "channels_last": True,
        }


class PPYOLOv2Exp(PPYOLOExp):
    """PP-YOLOv2: 365 epochs on COCO from a pretrained backbone, 8 devices x 12 images."""

    neck = "pan"
    neck_pairs = 3
    iou_aware_factor = 0.5
    max_epoch = 365
    milestones = (243,)
    batch_size = 96
    recipe_batch_size = 96
    basic_lr_per_img = 0.005 / 96
    input_size = (640, 640)
    test_size = (640, 640)
    multiscale = (0.5, 1.2)  # 320 to 768 px
