"""FCOS with ResNet-50 on COCO, 12 epochs, whose class scores are multiplied by the predicted IoU of the box.

    python tools/train.py -f exps/fcos_r50_iou.py --data path/to/coco -d 8 pretrained_backbone=resnet50.pth

Numbers: PaddleDetection 666f597, configs/fcos/fcos_r50_fpn_iou_1x_coco.yml; the branch that predicts centre-ness elsewhere learns
the IoU here (arXiv 2006.09214, section 3.1). AP to expect: that of fcos_r50 (39.6 on val2017, as published) or a little more.
"""

from mmdet.families.fcos.exp import FCOSExp


class Exp(FCOSExp):
    quality = "iou"
