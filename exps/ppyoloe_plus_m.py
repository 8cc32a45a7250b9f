"""PP-YOLOE+-m on COCO.

    python tools/train.py -f exps/ppyoloe_plus_m.py --data path/to/coco -d 8 -c objects365_weights.pth

Numbers: PaddleDetection 666f597, configs/ppyoloe/ppyoloe_plus_crn_m_80e_coco.yml. AP to expect, as published for 80 epochs at
640 px from weights pretrained on Objects365: 49.8 on val2017 (not measured here).
"""

from mmdet.families.ppyoloe.exp import PPYOLOEPlusExp


class Exp(PPYOLOEPlusExp):
    depth = 0.67
    width = 0.75
