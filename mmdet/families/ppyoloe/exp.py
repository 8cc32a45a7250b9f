"""The experiments PP-YOLOE and PP-YOLOE+: the recipes' numbers and how the model is put together.

Source of the numbers: PaddleDetection 666f597, configs/ppyoloe (design/recipes.md, 3.2). Sizes differ in ``depth`` and ``width``.
"""

from __future__ import annotations

from typing import Any, Literal

from loguru import logger

from mmdet.core.schedules import Schedule, warmup_cosine
from mmdet.exp.expand_crop import ExpandCropExp
from mmdet.families.ppyoloe.backbone import CSPRepResNet
from mmdet.families.ppyoloe.compat import LOAD_RULES
from mmdet.families.ppyoloe.head import ETHead
from mmdet.families.ppyoloe.loss import PPYOLOECriterion
from mmdet.families.ppyoloe.neck import CustomCSPPAN
from mmdet.models.assign import ASSIGN_BYTES
from mmdet.models.detector import Detector, Normalize


class PPYOLOEExp(ExpandCropExp):
    """PP-YOLOE: 300 epochs on COCO from a pretrained backbone, 8 devices x 8 images."""

    depth: float = 1.0  # factor of the number of blocks
    width: float = 1.0  # factor of the number of channels
    plus: bool = False  # a learned weight on every 1x1 branch of the backbone (PP-YOLOE+)
    reg_max: int = 16  # largest distance from a point to a side of its box, in strides

    static_assigner_epoch: int = 100  # epochs with ATSS before task-aligned assignment begins
    class_loss: Literal["varifocal", "focal"] = "varifocal"
    weight_cls: float = 1.0  # factor of the class loss
    weight_iou: float = 2.5  # factor of the GIoU loss
    weight_dfl: float = 0.5  # factor of the distribution focal loss
    assign_bytes: int = ASSIGN_BYTES  # bytes that the assigner's intermediate tensors may take together

    cosine_horizon: float = 1.2  # where the cosine would reach 0, as a factor of max_epoch (360 of 300, 96 of 80)
    basic_lr_per_img: float = 0.01 / 64
    input_size = (640, 640)
    multiscale = (0.5, 1.2)  # 320 to 768 px
    nms_threshold = 0.7
    keep_top_k = 300

    def validate(self) -> None:
        super().validate()
        for name in ("depth", "width"):
            self._expect(name, getattr(self, name) > 0, "a positive number")
        self._expect("reg_max", self.reg_max >= 1, "at least 1")
        self._expect("static_assigner_epoch", self.static_assigner_epoch >= 0, "0 or more")
        self._expect("assign_bytes", self.assign_bytes >= 1, "at least 1")
        self._expect("cosine_horizon", self.cosine_horizon >= 1, "at least 1")

    def prepare(self) -> None:
        super().prepare()
        if 0 < self.max_epoch <= self.static_assigner_epoch:
            logger.warning(
                f"static_assigner_epoch={self.static_assigner_epoch} is not reached in max_epoch={self.max_epoch}: every epoch "
                f"uses ATSS. The recipe gives it a third of them: static_assigner_epoch={max(self.max_epoch // 3, 1)}"
            )

    def get_model(self) -> Detector:
        backbone = CSPRepResNet(self.depth, self.width, use_alpha=self.plus)
        neck = CustomCSPPAN(backbone.out_channels, self.depth, self.width)
        head = ETHead(neck.out_channels, self.num_classes, reg_max=self.reg_max)
        criterion = PPYOLOECriterion(
            num_classes=self.num_classes,
            static_assigner_epoch=self.static_assigner_epoch,
            reg_max=self.reg_max,
            class_loss=self.class_loss,
            weight_cls=self.weight_cls,
            weight_iou=self.weight_iou,
            weight_dfl=self.weight_dfl,
            assign_bytes=self.assign_bytes,
        )
        normalize = Normalize(self.pixel_mean, self.pixel_std)
        return Detector(normalize, backbone, neck, head, criterion, self.get_postprocess(), LOAD_RULES)

    def get_lr_schedule(self, steps_per_epoch: int) -> Schedule:
        return warmup_cosine(self.warmup_epochs * steps_per_epoch, self.cosine_horizon * self.max_epoch * steps_per_epoch)

    def demo_settings(self) -> dict[str, Any]:
        """From scratch to AP 0.5 and more in minutes on two cores. Without crops, which such a short run has no time to learn
        from; gradients are clipped, because the class loss overshoots after so short a warm-up."""
        return {
            "max_epoch": 24,
            "warmup_epochs": 1.0,
            "static_assigner_epoch": 4,
            "eval_interval": 6,
            "batch_size": 8,
            "recipe_batch_size": 8,
            "basic_lr_per_img": 0.01 / 8,
            "clip_norm": 5.0,
            "input_size": (192, 192),
            "test_size": (192, 192),
            "multiscale": (1.0, 1.0),
            "expand_prob": 0.0,
            "random_crop": False,
            "channels_last": True,
        }


class PPYOLOEPlusExp(PPYOLOEExp):
    """PP-YOLOE+: 80 epochs on COCO from weights trained on Objects365, 8 devices x 8 images."""

    plus = True
    max_epoch = 80
    static_assigner_epoch = 30
    basic_lr_per_img = 0.001 / 64
    pixel_mean = (0.0, 0.0, 0.0)
    pixel_std = (1.0, 1.0, 1.0)
