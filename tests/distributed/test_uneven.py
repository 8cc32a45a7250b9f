"""Cases X01 and X03: images that do not divide evenly, ranks whose images have no boxes, ranks without any image."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dist import run_ranks
from perfect import PerfectModel
from toy import make_toy

from mmdet.core import Trainer
from mmdet.core.hooks import Hook
from mmdet.core.run import RunOptions
from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.letterbox import LetterboxTransform
from mmdet.data.loader import EvalLoader
from mmdet.data.structures import Targets
from mmdet.evaluators import CocoEvaluator
from mmdet.exp import get_exp

FIELDS = (
    "input_size=64",
    "test_size=64",
    "multiscale=(1,1)",
    "batch_size=4",
    "max_epoch=2",
    "eval_interval=2",
    "warmup_epochs=0",
)


class Look(Hook):
    """The parameters after each epoch, and how many steps there were."""

    def __init__(self) -> None:
        self.seen = []

    def on_epoch_end(self, trainer) -> None:
        flat = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        self.seen.append((trainer.step, flat))


def train(folder, name, words, without_boxes):
    """``without_boxes``: rank 1's images have none."""
    exp = get_exp(name, [*FIELDS, "warmup_epochs=0", *words])
    for field, value in {"data_dir": f"{folder}/data", "output_dir": f"{folder}/{name}{without_boxes}"}.items():
        exp.set(field, value, "command line")
    prefetch, none = exp.get_prefetcher, ([torch.zeros(0, 4)] * 2, [torch.zeros(0, dtype=torch.int64)] * 2)

    def emptied(batches, device):
        for batch in prefetch(batches, device):
            empty = without_boxes and dist.get_rank() == 1
            yield replace(batch, targets=Targets.from_lists(*none)) if empty else batch

    exp.__dict__["get_prefetcher"] = emptied
    trainer = Trainer(exp, RunOptions(device="cpu", workers=0, experiment_name="run", progress=False))
    look = Look()
    trainer.hooks.append(look)
    trainer.train()
    return look.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [("ppyoloe_s", ("width=0.25", "static_assigner_epoch=1")), ("yolox_nano", ("no_aug_epochs=1",))]
)
@pytest.mark.parametrize("without_boxes", [False, True])
def test_x01_five_images_on_two_ranks(tmp_path, name, words, without_boxes):
    make_toy(tmp_path / "data", 5, 1)
    start = time.monotonic()
    one, other = run_ranks(2, train, 120, str(tmp_path), name, words, without_boxes)
    assert [step for step, _ in one] == [step for step, _ in other] == [2, 4]
    for (_, mine), (_, theirs) in zip(one, other):
        assert (mine == theirs).all()
    assert time.monotonic() - start < 60


def judge(folder):
    source = CocoDataset(*find_coco(folder, "val"))
    loader = EvalLoader(source, LetterboxTransform((160, 160), 114), 2, 0, dist.get_rank(), dist.get_world_size())
    evaluator = CocoEvaluator(loader, source.categories)
    metrics = evaluator.evaluate(PerfectModel(source)).metrics
    return metrics["AP"], [d["image_id"] for d in evaluator.detections], len(loader.indices)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_x03_three_images(tmp_path, ranks):
    """On four ranks one has nothing to judge."""
    make_toy(tmp_path, 3, 1)
    answers = run_ranks(ranks, judge, 150, str(tmp_path))
    for ap, ids, _ in answers:
        assert ap == pytest.approx(1.0) and ids == [1, 2, 3]
    assert [n for *_, n in answers] == ([2, 1] if ranks == 2 else [1, 1, 1, 0])
