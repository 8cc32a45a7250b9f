"""A Siamese tracker with a RepVGG-A0 backbone on GOT-10k: templates of 128 px, search crops of 256 px.

    python tools/train.py -f exps/siamese_repvgg_a0.py --data path/to/got10k pretrained_backbone=RepVGG-A0-train.pth

Data: the folder that holds GOT-10k's train/ and val/ with their list.txt. Backbone: the ImageNet weights published with arXiv
2101.03697, in their form for training. Numbers: design/siamese.md, B1 (mined negatives from epoch 32 on, the backbone as it
came). No AUC is published for this recipe, and none was measured here.
"""

from mmdet.families.siamese.exp import SiameseExp


class Exp(SiameseExp):
    variant = "A0"
    pairs_per_epoch = 62_800
    validation_pairs = 1_800
