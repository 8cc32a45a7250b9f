"""FCOS with ResNet-50 on COCO, 24 epochs at changing sizes.

    python tools/train.py -f exps/fcos_r50_ms2x.py --data path/to/coco -d 8 pretrained_backbone=resnet50.pth

Numbers: miemiedetection 4d6fb32, exps/fcos/fcos_r50_fpn_2x.py (weights of PaddleDetection want extra_relu=true). AP to expect, as
published at a short side of 800 px from a backbone pretrained on ImageNet: 41.8 on val2017 (not measured here).
"""

from mmdet.families.fcos.exp import FCOSExp


class Exp(FCOSExp):
    norm = "affine"
    extra_relu = False
    max_epoch = 24
    milestones = (16, 22)
    warmup_steps = 0
    ema = True
    multiscale = (0.8, 1.0)  # short sides of 640 to 800 px
    score_threshold = 0.01
    nms_type = "matrix"
    nms_top_k = 500
