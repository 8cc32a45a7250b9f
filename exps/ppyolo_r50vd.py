"""PP-YOLO with ResNet50-vd and deformable convolutions on COCO.

    python tools/train.py -f exps/ppyolo_r50vd.py --data path/to/coco -d 8

Numbers: PaddleDetection 666f597, configs/ppyolo/ppyolo_r50vd_dcn_2x_coco.yml. AP to expect, as published for 811 epochs at
608 px from a backbone pretrained on ImageNet: 45.3 on val2017, 45.9 on test-dev (not measured here).
"""

from mmdet.families.ppyolo.exp import PPYOLOExp


class Exp(PPYOLOExp):
    depth = 50
