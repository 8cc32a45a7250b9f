"""YOLOX-s on COCO.

    python tools/train.py -f exps/yolox_s.py --data path/to/coco -d 8

Numbers: Megvii YOLOX 6ddff48, exps/default/yolox_s.py. AP to expect, as published for 300 epochs at 640 px from scratch:
40.5 on val2017, 40.5 on test-dev (not measured here).
"""

from mmdet.families.yolox.exp import YOLOXExp


class Exp(YOLOXExp):
    depth = 0.33
    width = 0.5
