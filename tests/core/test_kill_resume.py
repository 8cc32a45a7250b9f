"""SIGKILL anywhere, ``--resume``, and the run is the one that was never killed: bit for bit, whatever the workers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import make_toy

from mmdet.core import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]

# Kills itself at the end of the step that KILL_AT names, and writes down which images each step saw.
EXP_FILE = """
import json, os, signal
from mmdet.core.hooks import Hook
from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Kill(Hook):
    def on_step_end(self, trainer):
        if trainer.step == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


class Mine(PPYOLOEExp):
    depth = 0.33
    width = 0.25
    input_size = 64
    test_size = 64
    multiscale = (1.0, 2.0)
    batch_size = 4
    recipe_batch_size = 4
    max_epoch = 3
    warmup_epochs = 1
    static_assigner_epoch = 1
    eval_interval = 1
    print_interval = 1
    save_interval_steps = 2

    def get_hooks(self):
        return [Kill()]

    def get_prefetcher(self, batches, device):
        with open(os.environ["SEEN"], "a") as file:
            for batch in super().get_prefetcher(batches, device):
                print(json.dumps([batch.step, batch.image_ids, int(batch.images.sum())]), file=file, flush=True)
                yield batch
"""


def train(folder, *words, kill_at=0, workers=0):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KILL_AT": str(kill_at), "SEEN": str(folder / "seen.txt")}
    command = [sys.executable, str(ROOT / "tools/train.py"), "-f", str(folder.parent / "mine.py"), "--device", "cpu"]
    command += ["--data", str(folder.parent / "data"), "--output", str(folder), "--workers", str(workers), *words]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    wanted = -signal.SIGKILL if kill_at else 0
    assert result.returncode == wanted, result.stdout + result.stderr
    return result.stderr


def seen(folder):
    """Step -> what it was trained on; a step that was done again after the kill must have seen the same."""
    rows = {}
    for line in (folder / "seen.txt").read_text().splitlines():
        step, *what = json.loads(line)
        assert rows.setdefault(step, what) == what
    return rows


def rates(folder):
    lines = [json.loads(line) for line in next(folder.rglob("metrics.jsonl")).read_text().splitlines()]
    return {line["step"]: line["lr"] for line in lines if line["kind"] == "train"}


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def final_state(folder):
    return read_checkpoint(next(folder.rglob("last.pth")))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate, cases", [(1, [(5, 0, 1), (7, 1, 2), (3, 2, 0), (4, 2, 1)]), (2, [(7, 0, 0)])])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, accumulate, cases):
    """12 images, 3 steps an epoch, saves at every second step and at epoch ends: kills inside epochs and at a boundary."""
    make_toy(tmp_path / "data", 12, 3)
    (tmp_path / "mine.py").write_text(EXP_FILE)
    words = [f"grad_accum={accumulate}"]
    for name in ("whole", *(f"cut{i}" for i in range(len(cases)))):
        (tmp_path / name).mkdir()
    train(tmp_path / "whole", *words)
    whole = final_state(tmp_path / "whole")
    for i, (kill_at, before, after) in enumerate(cases):
        folder = tmp_path / f"cut{i}"
        train(folder, *words, kill_at=kill_at, workers=before)
        log = train(folder, *words, "--resume", workers=after)
        assert "resumed from" in log
        state = final_state(folder)
        for key in ("model", "ema", "optimizer", "scaler", "step", "position", "best"):
            assert equal(state[key], whole[key]), (kill_at, key)
        assert seen(folder) == seen(tmp_path / "whole") and rates(folder) == rates(tmp_path / "whole")
