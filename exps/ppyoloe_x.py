"""PP-YOLOE-x on COCO.

    python tools/train.py -f exps/ppyoloe_x.py --data path/to/coco -d 8

Numbers: PaddleDetection 666f597, configs/ppyoloe/ppyoloe_crn_x_300e_coco.yml. AP to expect, as published for 300 epochs at
640 px from a backbone pretrained on ImageNet: 52.3 on val2017, 52.4 on test-dev (not measured here).
"""

from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Exp(PPYOLOEExp):
    depth = 1.33
    width = 1.25
