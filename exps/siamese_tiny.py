"""A small Siamese tracker for CPUs, in GOT-10k's layout.

    python tools/train.py -f exps/siamese_tiny.py --data path/to/got10k (or --demo)

Numbers: design/siamese.md, B17. AUC on ten unseen clips of moving shapes after 300 iterations: 0.728, precision at 20 px 0.931
(2026-12-01, `pytest -m slow tests/families/siamese/test_st_model_learning.py`; a box that stays: 0.101). Runs differ much.
"""

from mmdet.families.siamese.exp import STAGES, SiameseExp


class Exp(SiameseExp):
    variant = "tiny"
    num_blocks = (1, 2, 3, 1)
    channels = 48
    branch_blocks = 2
    tower_blocks = 2
    exemplar_size = 64
    search_size = 128
    freeze_epochs = 0
    train_stages = STAGES
    backbone_lr = 1.0
    batch_size = 32
    recipe_batch_size = 32
    basic_lr_per_img = 2e-3 / 32
    lr_curve = "cos"
    pairs_per_epoch = 9_600
    ema = True
    ema_decay = 0.998
    channels_last = True
