"""PP-YOLO with ResNet18-vd on COCO: two levels, no CoordConv, pyramid pooling, IoU branch or deformable convolution.

    python tools/train.py -f exps/ppyolo_r18vd.py --data path/to/coco -d 4

Numbers: PaddleDetection 666f597, configs/ppyolo/ppyolo_r18vd_coco.yml. AP to expect, as published for 270 epochs at 512 px from
a backbone pretrained on ImageNet: 29.2 on val2017 (not measured here).
"""

from mmdet.families.ppyolo.exp import PPYOLOExp


class Exp(PPYOLOExp):
    depth = 18
    return_stages = (4, 5)
    deform_stages = ()
    neck_pairs = 0
    coord_conv = spp = iou_aware = False
    anchors = ((10, 14), (23, 27), (37, 58), (81, 82), (135, 169), (344, 319))
    anchor_masks = ((3, 4, 5), (0, 1, 2))
    max_epoch = 270
    milestones = (162, 216)
    batch_size = 128
    recipe_batch_size = 128
    basic_lr_per_img = 0.004 / 128
    test_size = (512, 512)
