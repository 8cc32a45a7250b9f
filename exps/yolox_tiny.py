"""YOLOX-tiny on COCO.

    python tools/train.py -f exps/yolox_tiny.py --data path/to/coco -d 8

Numbers: Megvii YOLOX 6ddff48, exps/default/yolox_tiny.py. AP to expect, as published for 300 epochs at 416 px from scratch:
32.8 on val2017 (not measured here).
"""

from mmdet.families.yolox.exp import YOLOXExp


class Exp(YOLOXExp):
    depth = 0.33
    width = 0.375
    input_size = (416, 416)
    test_size = (416, 416)
    multiscale = (320 / 416, 640 / 416)
    mosaic_scale = (0.5, 1.5)
    mixup_prob = 0.0
