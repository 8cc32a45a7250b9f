"""PP-YOLOE+-s on COCO.

    python tools/train.py -f exps/ppyoloe_plus_s.py --data path/to/coco -d 8 -c objects365_weights.pth

Numbers: PaddleDetection 666f597, configs/ppyoloe/ppyoloe_plus_crn_s_80e_coco.yml. AP to expect, as published for 80 epochs at
640 px from weights pretrained on Objects365: 43.7 on val2017 (not measured here).
"""

from mmdet.families.ppyoloe.exp import PPYOLOEPlusExp


class Exp(PPYOLOEPlusExp):
    depth = 0.33
    width = 0.5
