"""The experiment FCOS with ResNet-50: the recipe's numbers and how the model is put together.

Source of the numbers: PaddleDetection 666f597, configs/fcos, and miemiedetection 4d6fb32 (design/recipes.md, 3.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from loguru import logger
from torch import nn

from mmdet.core.optim import ParamRule
from mmdet.core.schedules import Schedule, warmup_multistep
from mmdet.data.keep_ratio import KeepRatioPlan, KeepRatioTrainPipeline, KeepRatioTransform, padded
from mmdet.data.loader import EvalLoader, TrainDataset, TrainLoader
from mmdet.data.structures import Sample
from mmdet.exp.detection import DetectionExp
from mmdet.families.fcos.compat import LOAD_RULES
from mmdet.families.fcos.head import FCOSHead
from mmdet.families.fcos.loss import FCOSCriterion
from mmdet.models.assign import ASSIGN_BYTES
from mmdet.models.detector import Detector, Normalize
from mmdet.models.fpn import FPN
from mmdet.models.norms import FrozenBatchNorm2d
from mmdet.models.resnet import Norm, ResNet

BACKBONE_STAGES = (3, 4, 5)


class FCOSExp(DetectionExp):
    """FCOS: 12 epochs on COCO from a pretrained backbone, 8 devices x 2 images."""

    variant: Literal["a", "b"] = "b"  # of the ResNet-50: stride in a block's 1x1 or in its 3x3 convolution
    norm: Literal["batch", "frozen", "affine"] = "frozen"  # of the backbone; as pretrained; "affine": but scale and shift learn
    freeze_at: int = 2  # the backbone's last stage that is not trained; 1 is the stem, 0: all is trained
    deform_stages: tuple[int, ...] = ()  # of the backbone, with deformable 3x3 convolutions
    deform_head: bool = False  # deformable convolutions in the head's towers
    channels: int = 256  # of pyramid and head; a multiple of 32
    extra_relu: bool = True  # a ReLU before the pyramid's seventh level
    level_bounds: tuple[float, ...] = (64, 128, 256, 512)  # px, distances that part the levels; one fewer than levels
    center_radius: float = 1.5  # strides around a box's centre within which points learn it; 0: anywhere inside
    box_loss: Literal["giou", "iou", "linear_iou"] = "giou"  # 1 - GIoU, -log IoU or 1 - IoU
    quality: Literal["centerness", "iou"] = "centerness"  # what multiplies the class score, learned on the regression branch
    focal_alpha: float = 0.25  # weight of the positives in the class loss
    focal_gamma: float = 2.0  # exponent of the class loss's modulating factor
    assign_bytes: int = ASSIGN_BYTES  # bytes that the assigner's intermediate tensors may take together
    pixel_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # of the scaled RGB
    pixel_std: tuple[float, float, float] = (0.229, 0.224, 0.225)  # of the scaled RGB
    pixel_scale: float = 1 / 255  # multiplies the pixel before all else

    max_epoch = 12
    milestones: tuple[float, ...] = (8, 11)  # epochs after which the learning rate falls to a tenth
    warmup_steps: int = 500  # steps of warm-up, at most an epoch; 0: warmup_epochs of them
    warmup_epochs = 1
    warmup_start: float = 1 / 3  # factor of the learning rate at the start of the warm-up
    tower_bias_lr: float = 2.0  # factor of the learning rate for the biases of the head's towers
    batch_size = 16
    recipe_batch_size = 16
    basic_lr_per_img = 0.01 / 16
    weight_decay = 1e-4
    ema = False
    eval_interval = 1

    input_size = (800, 1333)  # (short, long) px: the short side becomes this, or the long one that if it is reached first
    test_size = (800, 1333)  # likewise
    short_step: int = 32  # px between the short sides of multi-scale training
    size_divisor = 128
    flip_prob: float = 0.5  # probability of mirroring
    score_threshold = 0.025
    nms_type = "multilabel"

    def validate(self) -> None:
        super().validate()
        self._expect("freeze_at", 0 <= self.freeze_at <= 4, "0 to 4")
        self._expect("deform_stages", set(self.deform_stages) <= set(BACKBONE_STAGES), f"some of {BACKBONE_STAGES}")
        self._expect("channels", self.channels >= 32 and self.channels % 32 == 0, "a multiple of 32")
        bounds = self.level_bounds
        ascending = len(bounds) >= 2 and list(bounds) == sorted(set(bounds)) and bounds[0] > 0
        self._expect("level_bounds", ascending, "ascending numbers above 0, two at least: there are three levels or more")
        self._expect("center_radius", self.center_radius >= 0, "0 or more")
        self._expect("assign_bytes", self.assign_bytes >= 1, "at least 1")
        self._expect("pixel_std", min(self.pixel_std) > 0, "positive numbers")
        self._expect("milestones", list(self.milestones) == sorted(self.milestones), "ascending epochs")
        self._expect("warmup_steps", self.warmup_steps >= 0, "0 or more")
        for name in ("warmup_start", "flip_prob", "post_threshold"):
            self._expect(name, 0 <= getattr(self, name) <= 1, "0 to 1")

    def _expect_sizes(self) -> None:
        for name in ("input_size", "test_size"):
            short, long = getattr(self, name)
            self._expect(name, 32 <= short <= long, "the short and the long side, 32 <= short <= long")
        self._expect("short_step", self.short_step >= 1, "at least 1")
        self._expect("multiscale", len(self.short_sides()) > 0, f"a range that holds a multiple of {self.short_step} px")

    def prepare(self) -> None:
        super().prepare()
        if self.milestones and self.milestones[0] >= self.max_epoch:
            logger.warning(
                f"milestones={self.milestones} are not reached in max_epoch={self.max_epoch}: the learning rate never falls. The "
                f"recipe's first is at 2/3 of the epochs; that would be milestones=({self.max_epoch * 2 / 3:g},)"
            )
        if (self.freeze_at or self.norm != "batch") and not self.pretrained_backbone:
            logger.warning(
                f"freeze_at={self.freeze_at} and norm={self.norm} keep parts of the backbone as they are, and there is no "
                "pretrained_backbone: unless -c brings trained weights, use freeze_at=0 norm=batch"
            )

    # -- the model ------------------------------------------------------------------------------------------------------

    def frozen(self, epoch: int) -> Sequence[str]:
        stages = ["conv1", *(f"res{stage}" for stage in range(2, self.freeze_at + 1))] if self.freeze_at else []
        return [rf"backbone\.{stage}\." for stage in stages]

    def _norm(self) -> Norm:
        return nn.BatchNorm2d if self.norm == "batch" else partial(FrozenBatchNorm2d, affine_trained=self.norm == "affine")

    def get_model(self) -> Detector:
        num_levels = len(self.level_bounds) + 1
        backbone = ResNet(50, self.variant, BACKBONE_STAGES, self.deform_stages, self._norm())
        neck = FPN(backbone.out_channels, self.channels, num_levels - len(BACKBONE_STAGES), self.extra_relu)
        strides = [backbone.strides[0] * 2**i for i in range(num_levels)]
        head = FCOSHead(self.channels, self.num_classes, strides, self.deform_head)
        criterion = FCOSCriterion(
            num_classes=self.num_classes,
            level_bounds=self.level_bounds,
            radius=self.center_radius,
            box_kind=self.box_loss,
            quality=self.quality,
            alpha=self.focal_alpha,
            gamma=self.focal_gamma,
            assign_bytes=self.assign_bytes,
        )
        normalize = Normalize(self.pixel_mean, self.pixel_std, self.pixel_scale, pad=0.0)
        return Detector(normalize, backbone, neck, head, criterion, self.get_postprocess(), LOAD_RULES)

    # -- sizes and data -------------------------------------------------------------------------------------------------

    def short_sides(self) -> list[int]:
        """The short sides, px, that training images may have."""
        low, high = (round(self.input_size[0] * factor) for factor in self.multiscale)
        if low == high:
            return [low]
        step = self.short_step
        return list(range(-(-low // step) * step, high + 1, step))

    def train_sizes(self) -> list[tuple[int, int]]:
        """The largest (H, W) that a batch of wide images has, for each short side; of high images it is the reverse."""
        long = self.input_size[1]
        return [padded((short, max(short, long)), self.size_divisor) for short in self.short_sides()]

    def train_plan(self, data_seed: int = 0) -> KeepRatioPlan:
        """Which training images share a batch and how large they are."""
        sizes, long = self.dataset("train").sizes, self.input_size[1]
        return KeepRatioPlan(sizes, self.short_sides(), long, self.size_divisor, self.batch_size, self.seed, data_seed)

    def train_pipeline(self) -> KeepRatioTrainPipeline:
        return KeepRatioTrainPipeline(self.train_plan(), self.flip_prob)

    def get_train_loader(self, workers: int = 2, rank: int = 0, world: int = 1, data_seed: int = 0) -> TrainLoader:
        plan = self.train_plan(data_seed)
        data = TrainDataset(self.dataset("train"), KeepRatioTrainPipeline(plan, self.flip_prob), self.seed, data_seed)
        return TrainLoader(data, self.batch_size, self.size_at, workers, rank, world, self.seed, data_seed, plan=plan)

    def eval_transform(self) -> Callable[[Sample], Sample]:
        return KeepRatioTransform(*self.test_size, self.size_divisor)

    def get_eval_loader(
        self, split: str = "val", batch_size: int = 8, workers: int = 2, rank: int = 0, world: int = 1
    ) -> EvalLoader:
        data, transform = self._judged_dataset(split), self.eval_transform()
        return EvalLoader(data, transform, batch_size, workers, rank, world, frames=transform.frames(np.asarray(data.sizes)))

    def summary_size(self) -> tuple[int, int]:
        return padded(self.test_size, self.size_divisor)

    # -- time and the optimizer -----------------------------------------------------------------------------------------

    def get_lr_schedule(self, steps_per_epoch: int) -> Schedule:
        warmup = min(self.warmup_steps, steps_per_epoch) or self.warmup_epochs * steps_per_epoch
        return warmup_multistep(warmup, [round(e * steps_per_epoch) for e in self.milestones], start=self.warmup_start)

    def param_rules(self) -> Sequence[ParamRule]:
        """As PaddleDetection's optimizer has it (its names files: ``lr_mult``, ``no_decay``): the towers' biases do decay, unless
        their convolutions are deformable."""
        decay = 0.0 if self.deform_head else 1.0
        towers = r"^head\.(cls|reg)_convs\.\d+\.conv(_offset)?\.bias$"
        return (
            ParamRule("norm", norm=True, decay_factor=0.0),
            ParamRule("tower_bias", towers, lr_factor=self.tower_bias_lr, decay_factor=decay),
        )

    def demo_settings(self) -> dict[str, Any]:
        """From scratch on two cores: everything is trained, because nothing is pretrained; images of 192 px with the borders of
        the levels in proportion; gradients are clipped, because a fresh head's are several times the usual size."""
        levels = len(self.level_bounds)
        return {
            "norm": "batch",
            "freeze_at": 0,
            "max_epoch": 12,
            "milestones": (10.0,),
            "warmup_steps": 0,
            "warmup_epochs": 1.0,
            "eval_interval": 4,
            "batch_size": 8,
            "recipe_batch_size": 8,
            "basic_lr_per_img": 0.01 / 8,
            "clip_norm": 10.0,
            "input_size": (192, 192),
            "test_size": (192, 192),
            "multiscale": (1.0, 1.0),
            "level_bounds": tuple(float(24 * 2**i) for i in range(levels)),
            "size_divisor": 32,
            "channels_last": True,
        }
