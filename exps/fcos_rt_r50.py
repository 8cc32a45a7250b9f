"""Real-time FCOS with ResNet-50 on COCO: three levels, small images, 48 epochs.

    python tools/train.py -f exps/fcos_rt_r50.py --data path/to/coco -d 8 pretrained_backbone=resnet50.pth

Numbers: miemiedetection 4d6fb32, exps/fcos/fcos_rt_r50_fpn_4x.py; the backbone halves in its 1x1 convolutions, and so should the
pretrained one (Caffe's do, torchvision's do not). AP to expect: none was published with these numbers.
"""

from mmdet.families.fcos.exp import FCOSExp


class Exp(FCOSExp):
    variant = "a"
    norm = "batch"
    level_bounds = (64, 128)
    pixel_mean = (123.675, 116.28, 103.53)
    pixel_std = (1.0, 1.0, 1.0)
    pixel_scale = 1.0
    max_epoch = 48
    milestones = (32, 44)
    warmup_steps = 0
    ema = True
    input_size = (608, 900)
    test_size = (512, 736)
    multiscale = (256 / 608, 1.0)  # short sides of 256 to 608 px
    size_divisor = 32
    score_threshold = 0.01
    nms_type = "matrix"
    nms_top_k = 500
