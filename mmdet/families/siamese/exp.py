"""The experiment of the point-based Siamese tracker: the recipe's numbers and how the model is put together.

Source of the numbers: design/siamese.md, B1, B2 and B6 to B9. Data, pairs and the judge: data_exp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from loguru import logger
from torch import nn

from mmdet.core.hooks import Hook
from mmdet.core.norm_log import NormLog
from mmdet.core.optim import ParamRule, build_param_groups
from mmdet.core.schedules import Schedule, by_epoch, spaced
from mmdet.families.siamese.compat import LOAD_RULES
from mmdet.families.siamese.data_exp import TrackDataExp
from mmdet.families.siamese.export import NetworkPart, parts_of
from mmdet.families.siamese.head import LTRBHead
from mmdet.families.siamese.labels import LabelSettings
from mmdet.families.siamese.layers import CORRELATIONS, TemplateBranch, rep_stack
from mmdet.families.siamese.loss import LossWeights, SiameseCriterion
from mmdet.families.siamese.model import SiamesePoint
from mmdet.families.siamese.pairs import FixedPairs
from mmdet.families.siamese.sampler import PairSource
from mmdet.families.siamese.structures import PairBatch
from mmdet.families.siamese.validation import ValidationPass
from mmdet.models.detector import Normalize
from mmdet.models.repvgg import REPVGG_SIZES, RepVGG

STRIDES = (2, 2, 2, 1, 1)  # of the backbone's stages: 8 px between points
STRIDE = 8
OUT_STAGES = (2, 3)  # whose features are joined
STAGES = ("stage0", "stage1", "stage2", "stage3")
PRIOR_PART = 1 / 8  # half the target's side as a part of the search crop, by the crop's geometry
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the scaled RGB, as the backbones were trained


class SiameseExp(TrackDataExp):
    """The reference's run: 40 epochs with 8 pairs a step from a pretrained backbone, the last 8 with mined negatives."""

    variant: Literal["A0", "A1", "A2", "B0", "B1", "B2", "B3", "tiny"] = "A0"  # of the RepVGG backbone
    num_blocks: tuple[int, int, int, int] = (2, 4, 8, 1)  # of its stages 1 to 4; the published A networks have 14 in the third
    correlation: Literal["pixel", "depthwise"] = "pixel"  # of template and search features
    channels: int = 256  # of branches and head
    branch_blocks: int = 3  # of template branch, search branch, and where the head joins correlation and features
    tower_blocks: int = 4  # of each of the head's towers

    self_epoch: int = 32  # epochs before negatives are mined from the model's own scores
    pos_radius: float = 4.0  # positives lie within width / this and height / this of the target's centre
    neg_radius: float = 2.0  # negatives lie outside of that ellipse
    pos_num: int = 16  # positive points of an image, about
    neg_num: int = 48  # negative points of an image, about
    easy_num: int = 16  # mined negatives with a small overlap, about
    hard_num: int = 32  # mined negatives with a high score as well, about
    neg_iou: float = 0.10  # mined negatives overlap the target less
    neg_score: float = 0.30  # hard ones score at least this
    weighted: bool = True  # points of an image differ in weight, by score and overlap, from the second epoch on
    loss_weights: tuple[float, float, float, float] = (0.666, 0.333, 1.2, 0.0)  # factors of pos, neg, iou and l1
    self_loss_weights: tuple[float, float, float, float] = (0.75, 0.25, 1.2, 0.0)  # the same from self_epoch on

    freeze_epochs: int = 30  # first epochs in which the whole backbone is frozen
    train_stages: tuple[str, ...] = ()  # stages of the backbone that are trained from then on
    backbone_lr: float = 0.1  # factor of the backbone's learning rate

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr_curve: Literal["log", "linear", "cos", "step", "multi-step"] = "log"  # after the warm-up; constant in an epoch
    lr_final: float = 0.01  # factor of the learning rate at its end
    lr_step: int = 10  # epochs between falls, with lr_curve="step"
    lr_milestones: tuple[int, ...] = ()  # epochs of the falls, with lr_curve="multi-step"
    warmup_curve: Literal["log", "linear", "cos", "step"] = "step"  # "step" reaches the full rate in the epoch after the warm-up
    warmup_start: float = 0.4  # factor of the learning rate in the first epoch
    validation_pairs: int = 0  # fixed pairs whose losses are compared after every epoch; 0: none
    log_norms: Literal["off", "part", "tensor"] = "off"  # norms of gradients and weights beside the log lines

    max_epoch = 40
    warmup_epochs = 4
    batch_size = 8
    recipe_batch_size = 8
    basic_lr_per_img = 1e-4 / 8
    weight_decay = 1e-4
    clip_norm = 10.0
    max_loss = 1e4
    ema = False
    eval_interval = 1
    print_interval = 20

    def validate(self) -> None:
        super().validate()
        for name in ("exemplar_size", "search_size"):
            self._expect(name, getattr(self, name) % STRIDE == 0, f"a multiple of {STRIDE} px")
        for name in ("channels", "branch_blocks", "tower_blocks", "pos_num", "neg_num", "easy_num", "hard_num", "lr_step"):
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        for name in ("self_epoch", "freeze_epochs", "validation_pairs"):
            self._expect(name, getattr(self, name) >= 0, "0 or more")
        self._expect("num_blocks", min(self.num_blocks) >= 1, "at least 1 each")
        self._expect("neg_radius", 0 < self.neg_radius <= self.pos_radius, f"0 < neg_radius <= pos_radius={self.pos_radius}")
        for name in ("loss_weights", "self_loss_weights"):
            values = getattr(self, name)
            self._expect(name, min(values) >= 0 and sum(values) > 0, "0 or more each, not all of them 0")
        unknown = sorted(set(self.train_stages) - set(STAGES))
        self._expect("train_stages", not unknown, f"some of {', '.join(STAGES)}")
        for name in ("backbone_lr", "lr_final", "warmup_start"):
            self._expect(name, 0 < getattr(self, name) <= 1, "more than 0, at most 1")
        self._expect("warmup_epochs", self.warmup_epochs == int(self.warmup_epochs), "whole epochs")
        if self.lr_curve == "multi-step":
            milestones = list(self.lr_milestones)
            self._expect("lr_milestones", milestones and milestones == sorted(milestones), "ascending epochs, one at least")

    def prepare(self) -> None:
        super().prepare()
        if self.frozen(0) and not self.pretrained_backbone:
            logger.warning(
                f"freeze_epochs={self.freeze_epochs} and train_stages={self.train_stages} keep the backbone as it is at first, "
                "and there is no pretrained_backbone: unless -c brings trained weights, it keeps random ones. Give a file with "
                f'pretrained_backbone=FILE, or train from scratch with freeze_epochs=0 "train_stages={STAGES}" backbone_lr=1'
            )

    # -- the model ------------------------------------------------------------------------------------------------------

    def label_settings(self) -> LabelSettings:
        """How points are labelled."""
        return LabelSettings(
            pos_radius=self.pos_radius,
            neg_radius=self.neg_radius,
            pos_num=self.pos_num,
            neg_num=self.neg_num,
            easy_num=self.easy_num,
            hard_num=self.hard_num,
            neg_iou=self.neg_iou,
            neg_score=self.neg_score,
        )

    def get_model(self) -> SiamesePoint:
        backbone = RepVGG(self.variant, STRIDES, self.num_blocks, OUT_STAGES)
        joined, channels = sum(backbone.out_channels), self.channels
        correlation = CORRELATIONS[self.correlation]()
        correlated = correlation.out_channels(channels, (self.exemplar_size // STRIDE) ** 2)
        prior = self.search_size * PRIOR_PART
        criterion = SiameseCriterion(
            stride=STRIDE,
            settings=self.label_settings(),
            first=LossWeights(*self.loss_weights),
            second=LossWeights(*self.self_loss_weights),
            self_epoch=self.self_epoch,
            weighted=self.weighted,
            seed=self.seed,
        )
        return SiamesePoint(
            normalize=Normalize(PIXEL_MEAN, PIXEL_STD),
            backbone=backbone,
            template_branch=TemplateBranch(joined, channels, self.branch_blocks),
            search_branch=rep_stack(joined, channels, self.branch_blocks),
            correlation=correlation,
            head=LTRBHead(correlated + channels, channels, prior, self.branch_blocks, self.tower_blocks),
            criterion=criterion,
            exemplar_size=self.exemplar_size,
            search_size=self.search_size,
            stride=STRIDE,
            load_rules=LOAD_RULES,
        )

    def export_parts(self, model: SiamesePoint) -> list[NetworkPart]:
        """The two networks that tracking needs, for ``tools/export.py``."""
        return parts_of(model)

    def summary_input(self) -> tuple[Callable[[nn.Module], Any], str]:
        sizes = (self.exemplar_size, self.search_size)
        templates, searches = (torch.zeros((1, 3, n, n), dtype=torch.uint8, device="meta") for n in sizes)
        text = f"{sizes[0]}x{sizes[0]} and {sizes[1]}x{sizes[1]}"
        return lambda model: model.search(model.encode_template(templates), searches), text

    def largest_batch(self, loader: Any) -> PairBatch:
        share = self.batch_size // loader.world
        images = (torch.zeros((share, 3, n, n), dtype=torch.uint8) for n in (self.exemplar_size, self.search_size))
        box = torch.tensor([0.375, 0.375, 0.625, 0.625]) * self.search_size
        positive, none = torch.ones(share, dtype=torch.bool), torch.zeros(share, 0, 4)
        return PairBatch(*images, box.repeat(share, 1), positive, none, none[..., 0].bool(), [""] * share)

    # -- time and the optimizer -----------------------------------------------------------------------------------------

    def frozen(self, epoch: int) -> Sequence[str]:
        if epoch < self.freeze_epochs or not self.train_stages:
            return (r"backbone\.",)
        return tuple(rf"backbone\.{stage}\." for stage in STAGES if stage not in self.train_stages)

    def get_lr_schedule(self, steps_per_epoch: int) -> Schedule:
        warmup = min(int(self.warmup_epochs), self.max_epoch)
        rest = self.max_epoch - warmup
        milestones = [m - warmup for m in self.lr_milestones]
        factors = spaced(self.warmup_curve, self.warmup_start, 1.0, warmup)
        factors += spaced(self.lr_curve, 1.0, self.lr_final, rest, self.lr_step, milestones)
        return by_epoch(factors, steps_per_epoch)

    def param_rules(self) -> Sequence[ParamRule]:
        """Norms decay like the rest, as in the reference."""
        return (ParamRule("backbone", r"^backbone\.", lr_factor=self.backbone_lr),)

    def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = build_param_groups(model, self.param_rules(), self.learning_rate, self.weight_decay)
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)
        return torch.optim.AdamW(groups, lr=self.learning_rate)

    def get_hooks(self) -> Iterable[Hook]:
        hooks: list[Hook] = []
        if self.validation_pairs:
            hooks.append(ValidationPass(self.fixed_pairs, self.batch_size))
        if self.log_norms != "off":
            hooks.append(NormLog(self.log_norms))
        return hooks

    def fixed_pairs(self) -> FixedPairs:
        """The pairs of the validation pass: of the split that judges the tracker."""
        return FixedPairs(PairSource(self.sources("val")), self.pair_settings(), self.validation_pairs)

    def demo_settings(self) -> dict[str, Any]:
        """From scratch on two cores: the smallest network on small crops, nothing frozen, and a moving average against the
        ups and downs of so short a run. About 7 minutes."""
        return {
            "variant": "tiny",
            "num_blocks": REPVGG_SIZES["tiny"].num_blocks,
            "channels": 48,
            "branch_blocks": 2,
            "tower_blocks": 2,
            "exemplar_size": 64,
            "search_size": 128,
            "max_epoch": 20,
            "self_epoch": 16,
            "warmup_epochs": 1.0,
            "freeze_epochs": 0,
            "train_stages": STAGES,
            "backbone_lr": 1.0,
            "batch_size": 32,
            "recipe_batch_size": 32,
            "basic_lr_per_img": 2e-3 / 32,
            "lr_curve": "cos",
            "pairs_per_epoch": 960,
            "eval_interval": 5,
            "validation_pairs": 64,
            "ema": True,
            "ema_decay": 0.998,
            "channels_last": True,
        }
