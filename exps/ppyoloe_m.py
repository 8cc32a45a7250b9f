"""PP-YOLOE-m on COCO.

    python tools/train.py -f exps/ppyoloe_m.py --data path/to/coco -d 8

Numbers: PaddleDetection 666f597, configs/ppyoloe/ppyoloe_crn_m_300e_coco.yml. AP to expect, as published for 300 epochs at
640 px from a backbone pretrained on ImageNet: 49.0 on val2017, 49.1 on test-dev (not measured here).
"""

from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Exp(PPYOLOEExp):
    depth = 0.67
    width = 0.75
