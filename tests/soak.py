"""A run that is killed again and again ends with the weights of one that was not: ``python tests/soak.py``.

Two ranks train YOLOX-nano at 160 px. Once without interruption; once under a supervisor that kills a random process of the job
(SIGKILL: one rank, or all) at random moments and starts the same command again, which goes on by ``--resume auto``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from toy import make_toy  # noqa: E402

from mmdet.core import read_checkpoint  # noqa: E402


def command(folder: Path, name: str, steps: int, save_every: int) -> list[str]:
    """20 images in total batches of 4: five steps an epoch."""
    words = ["-f", str(ROOT / "exps/yolox_nano.py"), "--data", str(folder / "toy"), "--output", str(folder / "out")]
    words += ["-expn", name, "--resume", "auto", "-d", "2", "-b", "4", "--device", "cpu", "--workers", "1"]
    fields = f"input_size=160 test_size=160 multiscale=(0.8,1.2) max_epoch={steps // 5} no_aug_epochs={steps // 20}"
    fields += f" eval_interval={steps // 5} save_interval_steps={save_every} warmup_epochs=1 recipe_batch_size=4"
    return [sys.executable, str(ROOT / "tools/train.py"), *words, *fields.split()]


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher started."""
    found = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


def step_of(log: Path) -> int:
    """Lines of training in a log: more of them, more steps."""
    return log.read_text(errors="replace").count(" eta ") if log.exists() else 0


def supervise(words: list[str], folder: Path, kills: int, draw: random.Random, limit: float) -> int:
    """Runs the command until it ends well, killing it ``kills`` times; returns how often it was started."""
    starts = 0
    while True:
        starts += 1
        log = folder / f"start{starts}.txt"
        with log.open("w") as file:
            job = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if kills:
                kills -= 1
                wait_for_lines(log, draw.randint(2, 8), job, limit)
                time.sleep(draw.uniform(0, 2))
                victims = ranks_of(job.pid)
                for pid in victims if draw.random() < 0.5 else [draw.choice(victims)] if victims else []:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            code = job.wait(timeout=limit)
        sys.stdout.write(f"  start {starts}: exit code {code}\n")
        sys.stdout.flush()
        if code == 0:
            return starts
        if starts > 20:
            raise RuntimeError(f"does not end: {log.read_text()[-2000:]}")


def wait_for_lines(log: Path, lines: int, job: subprocess.Popen, limit: float) -> None:
    end = time.monotonic() + limit
    while step_of(log) < lines and job.poll() is None and time.monotonic() < end:
        time.sleep(0.2)


def largest_difference(one: Path, other: Path) -> float:
    """Over weights, statistics, EMA and momentum."""
    left, right = read_checkpoint(one), read_checkpoint(other)
    assert left["step"] == right["step"], (left["step"], right["step"])
    worst = 0.0
    for key in ("model", "ema"):
        a, b = (side["model"] if key == "model" else side["ema"]["model"] for side in (left, right))
        worst = max(worst, *(float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel()))
    for i, state in left["optimizer"]["state"].items():
        a, b = state["momentum_buffer"], right["optimizer"]["state"][i]["momentum_buffer"]
        if isinstance(a, torch.Tensor):
            worst = max(worst, float((a - b).abs().max()))
    return worst


def soak(folder: Path, steps: int = 500, kills: int = 3, save_every: int = 3, seed: int = 0, limit: float = 1500) -> float:
    """The largest difference between the two runs' final states."""
    make_toy(folder / "toy", 20, 2)
    for name, times in (("whole", 0), ("killed", kills)):
        (folder / name).mkdir()
        starts = supervise(command(folder, name, steps, save_every), folder / name, times, random.Random(seed), limit)
        sys.stdout.write(f"{name}: started {starts} times\n")
    return largest_difference(*(folder / "out" / "yolox_nano" / name / "last.pth" for name in ("whole", "killed")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        worst = soak(Path(folder), args.steps, args.kills, seed=args.seed)
    sys.stdout.write(f"largest difference after {args.steps} steps and {args.kills} kills: {worst}\n")
    return 0 if worst == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
