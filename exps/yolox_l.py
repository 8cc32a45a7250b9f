"""YOLOX-l on COCO.

    python tools/train.py -f exps/yolox_l.py --data path/to/coco -d 8

Numbers: Megvii YOLOX 6ddff48, exps/default/yolox_l.py. AP to expect, as published for 300 epochs at 640 px from scratch:
49.7 on val2017, 50.1 on test-dev (not measured here).
"""

from mmdet.families.yolox.exp import YOLOXExp


class Exp(YOLOXExp):
    depth = 1.0
    width = 1.0
