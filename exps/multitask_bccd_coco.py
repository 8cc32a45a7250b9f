"""Blood cells beside COCO: a small data set learns on a backbone and a neck that a large one keeps general.

    python tools/train.py -f exps/multitask_bccd_coco.py --data DIR -d 4

DIR holds ``bccd`` and ``coco``, both in COCO's layout. Start from a YOLOX-nano that this package trained or loaded with
``-c FILE --load-map '^head\\.=heads.coco.'``. Numbers: exps/yolox_nano.py. Its AP was not measured here.
"""

from mmdet.data.affine import RandomAffine
from mmdet.data.hsv import HSVJitter
from mmdet.data.letterbox import LetterboxTransform
from mmdet.data.mosaic import MosaicTrainPipeline
from mmdet.families.multitask.exp import MultiTaskExp
from mmdet.families.multitask.sources import CocoFolder
from mmdet.families.multitask.task import TaskSpec
from mmdet.families.yolox.backbone import CSPDarknet
from mmdet.families.yolox.head import DecoupledHead
from mmdet.families.yolox.loss import YOLOXCriterion
from mmdet.families.yolox.neck import PAFPN
from mmdet.models.detector import Normalize


class Exp(MultiTaskExp):
    max_iter = 90000
    eval_interval = 9000
    save_interval = 9000
    warmup_iters = 1000
    basic_lr_per_img = 0.01 / 64
    input_size = (416, 416)
    test_size = (416, 416)
    multiscale = (320 / 416, 640 / 416)
    clip = {"backbone": 35.0, "neck": 35.0, "head": 35.0}

    def get_tasks(self):
        def task(name, classes, shards):
            return TaskSpec(
                name,
                "detection",
                data=CocoFolder(name, classes),
                batch_size=16,
                shards=shards,
                weight=shards,
                head=lambda channels: DecoupledHead(channels, classes, channels=64, depthwise=True),
                criterion=lambda: YOLOXCriterion(classes, l1_from_epoch=0),
                pipeline=lambda: MosaicTrainPipeline(
                    RandomAffine(10.0, 0.1, (0.5, 1.5), 2.0), None, HSVJitter(1.0, (5, 30, 30)), plain_from=10**9, mosaic_prob=0.5
                ),
                eval_transform=LetterboxTransform,
            )

        return [task("bccd", 3, shards=1), task("coco", 80, shards=3)]

    def get_normalize(self):
        return Normalize(scale=1.0, bgr=True)

    def get_backbone(self):
        return CSPDarknet(depth=0.33, width=0.25, depthwise=True)

    def get_neck(self, channels):
        return PAFPN(channels, depth=0.33, depthwise=True)
