"""PP-YOLOv2 with ResNet50-vd and deformable convolutions on COCO.

    python tools/train.py -f exps/ppyolov2_r50vd.py --data path/to/coco -d 8

Numbers: PaddleDetection 666f597, configs/ppyolo/ppyolov2_r50vd_dcn_365e_coco.yml. AP to expect, as published for 365 epochs at
640 px from a backbone pretrained on ImageNet: 49.1 on val2017, 49.5 on test-dev (not measured here).
"""

from mmdet.families.ppyolo.exp import PPYOLOv2Exp


class Exp(PPYOLOv2Exp):
    depth = 50
