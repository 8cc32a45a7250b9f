"""PP-YOLOE-l on COCO.

    python tools/train.py -f exps/ppyoloe_l.py --data path/to/coco -d 8

Numbers: PaddleDetection 666f597, configs/ppyoloe/ppyoloe_crn_l_300e_coco.yml. AP to expect, as published for 300 epochs at
640 px from a backbone pretrained on ImageNet: 51.4 on val2017, 51.6 on test-dev (not measured here).
"""

from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Exp(PPYOLOEExp):
    depth = 1.0
    width = 1.0
