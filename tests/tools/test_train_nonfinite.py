"""Case N06: a poisoned image and an absurd learning rate stop the run, say why, and leave only finite files."""

import torch
from small_run import BY_HEART, NAME, train
from toy import make_toy

from mmdet.core import read_checkpoint

POISON = """
import torch
from dataclasses import replace
from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Mine(PPYOLOEExp):
    depth = 0.33
    width = 0.25

    def get_prefetcher(self, batches, device):
        for batch in super().get_prefetcher(batches, device):
            images = batch.images.float() / 255
            for row, image_id in enumerate(batch.image_ids):
                if image_id == 5:
                    images[row] = float("nan")
            yield replace(batch, images=images)
"""


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors(v)


def assert_finite_files(folder):
    for path in folder.rglob("*.pth"):
        assert all(torch.isfinite(t).all() for t in tensors(read_checkpoint(path)) if t.is_floating_point()), path


def test_a_poisoned_image(tmp_path, capsys):
    make_toy(tmp_path / "toy", 8, 1)
    (tmp_path / "mine.py").write_text(POISON)
    words = ("--data", tmp_path / "toy", "--output", tmp_path / "out", "-expn", "a", "-b", "2", *BY_HEART)
    assert train(*words, "max_epoch=2", "save_interval_steps=1", exp=("-f", str(tmp_path / "mine.py"))) == 3
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in last for word in ("2 of its 8 steps", "non-finite", "iteration", "loss_iou nan", "lr", "t_0005.png"))
    assert_finite_files(tmp_path / "out")


def test_an_absurd_learning_rate(tmp_path, capsys):
    make_toy(tmp_path / "toy", 8, 1)
    words = ("--data", tmp_path / "toy", "--output", tmp_path / "out", "-expn", "a", "-b", "4", *BY_HEART)
    lr = 1e6 * 0.01 / 64
    assert train(*words, "max_epoch=20", "eval_interval=20", f"basic_lr_per_img={lr}", "save_interval_steps=1") == 3
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "finite" in last and "training done" not in last and "step" in last and "basic_lr_per_img" in last
    assert_finite_files(tmp_path / "out" / NAME)
