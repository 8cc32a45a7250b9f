"""YOLOX-m on COCO.

    python tools/train.py -f exps/yolox_m.py --data path/to/coco -d 8

Numbers: Megvii YOLOX 6ddff48, exps/default/yolox_m.py. AP to expect, as published for 300 epochs at 640 px from scratch:
46.9 on val2017, 47.2 on test-dev (not measured here).
"""

from mmdet.families.yolox.exp import YOLOXExp


class Exp(YOLOXExp):
    depth = 0.67
    width = 0.75
