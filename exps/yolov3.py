"""YOLOv3's Darknet-53 with the head, losses and recipe of YOLOX, on COCO.

    python tools/train.py -f exps/yolov3.py --data path/to/coco -d 8

Numbers: Megvii YOLOX 6ddff48, exps/default/yolov3.py. AP to expect, as published for 300 epochs at 640 px from scratch: 47.7 on
val2017, 48.0 on test-dev (not measured here).
"""

from mmdet.families.yolox.exp import YOLOv3Exp


class Exp(YOLOv3Exp):
    pass
