"""Three tasks on one backbone: two detection label spaces, with a YOLOX and a PP-YOLOE head, and the colours of small images.

    python tools/train.py -f exps/multitask_det2_cls1.py --demo

Measured on the demo data, 600 iterations, 5 minutes of one CPU core: AP50 0.75 and 0.71, top-1 100 % (docs/multitask.md).
"""

from mmdet.families.multitask.exp import MultiTaskExp
from mmdet.families.multitask.heads import PooledLinear
from mmdet.families.multitask.sources import CocoFolder, ImageFolder
from mmdet.families.multitask.task import TaskSpec
from mmdet.families.ppyoloe.head import ETHead
from mmdet.families.ppyoloe.loss import PPYOLOECriterion
from mmdet.families.yolox.backbone import CSPDarknet
from mmdet.families.yolox.head import DecoupledHead
from mmdet.families.yolox.loss import YOLOXCriterion
from mmdet.families.yolox.neck import PAFPN


class Exp(MultiTaskExp):
    data_dir = "demo"
    max_iter = 600
    eval_interval = 200
    warmup_iters = 50
    print_interval = 20
    optimizer = "adamw"
    basic_lr_per_img = 1e-3 / 32
    recipe_batch_size = 32
    weight_decay = 0.05
    ema_decay = 0.99
    ema_decay_type = "normal"
    input_size = (160, 160)
    test_size = (160, 160)
    clip = {"backbone": 10.0, "neck": 10.0, "head": 10.0}

    tasks = [
        TaskSpec(
            "detA",
            "detection",
            data=CocoFolder("shapesA", classes=3),
            batch_size=8,
            head=lambda channels: DecoupledHead(channels, 3, channels=64),
            criterion=lambda: YOLOXCriterion(3, l1_from_epoch=0),
        ),
        TaskSpec(
            "detB",
            "detection",
            data=CocoFolder("shapesB", classes=5),
            batch_size=8,
            head=lambda channels: ETHead(channels, 5),
            levels=(2, 1, 0),
            criterion=lambda: PPYOLOECriterion(5, static_assigner_epoch=6),
        ),
        TaskSpec(
            "cls",
            "classification",
            data=ImageFolder("colours", classes=4),
            batch_size=16,
            head=lambda channels: PooledLinear(4, channels),
            share={"backbone": 0},
            input_size=(64, 64),
            test_size=(64, 64),
        ),
    ]

    def get_backbone(self):
        return CSPDarknet(depth=0.33, width=0.25)

    def get_neck(self, channels):
        return PAFPN(channels, depth=0.33)
