"""FCOS with ResNet-50 on COCO, 12 epochs.

    python tools/train.py -f exps/fcos_r50.py --data path/to/coco -d 8 pretrained_backbone=resnet50.pth

Numbers: PaddleDetection 666f597, configs/fcos/fcos_r50_fpn_1x_coco.yml. AP to expect, as published at a short side of 800 px from
a backbone pretrained on ImageNet: 39.6 on val2017 (not measured here).
"""

from mmdet.families.fcos.exp import FCOSExp


class Exp(FCOSExp):
    pass
