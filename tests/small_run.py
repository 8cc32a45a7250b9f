"""The command lines run in this process, with the smallest detector on tiny data, and what a run left behind."""

import json
from pathlib import Path

from mmdet.core.cli import run_command
from tools import eval as eval_tool
from tools import train as train_tool

NAME = "ppyoloe_s"
DEVICE = ("--device", "cpu")
SIZES = ("width=0.25", "depth=0.33", "input_size=160", "test_size=160", "multiscale=(1,1)", "print_interval=1")
# Settings that learn a handful of images by heart in some dozen steps: no augmentation, a quick average.
BY_HEART = ("expand_prob=0", "random_crop=False", "distort_prob=0", "ema_decay=0.8", "warmup_epochs=1")


def train(*words, exp=("-n", NAME), workers=0) -> int:
    """The exit code of ``train.py`` on ``words``."""
    return run_command(train_tool.run, [*exp, *DEVICE, "--workers", str(workers), *SIZES, *map(str, words)])


def evaluate(*words) -> int:
    """The exit code of ``eval.py`` on ``words``."""
    return run_command(eval_tool.run, [*DEVICE, "--workers", "0", *map(str, words)])


class RunFolder:
    """What a run wrote."""

    def __init__(self, path):
        self.path = Path(path)
        self.log = (self.path / "train_log.txt").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        self.steps = [line for line in lines if line["kind"] == "train"]
        self.evaluations = [line for line in lines if line["kind"] == "eval"]

    def __truediv__(self, name):
        return self.path / name

    def losses(self) -> list[dict]:
        """Every loss term of every step, for comparison bit for bit."""
        return [{k: v for k, v in line.items() if k == "loss" or k.startswith("loss_")} for line in self.steps]
