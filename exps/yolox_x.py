"""YOLOX-x on COCO.

    python tools/train.py -f exps/yolox_x.py --data path/to/coco -d 8

Numbers: Megvii YOLOX 6ddff48, exps/default/yolox_x.py. AP to expect, as published for 300 epochs at 640 px from scratch:
51.1 on val2017, 51.5 on test-dev (not measured here).
"""

from mmdet.families.yolox.exp import YOLOXExp


class Exp(YOLOXExp):
    depth = 1.33
    width = 1.25
