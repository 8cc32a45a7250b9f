"""torchrun starts a job again, after one of its processes was killed: nothing of the first start is in the way of the second."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from table import Row, record

from mmdet.core import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
EXP_FILE = """
import os, signal, time
from toy_task import LineExp
from mmdet.core.hooks import Hook


class Fault(Hook):
    def on_step_end(self, trainer):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if trainer.step == 6 and first and os.environ["RANK"] == os.environ.get("KILLED"):
            os.kill(os.getpid(), signal.SIGKILL)
        if not first:
            time.sleep(1.5)  # longer than processes wait for each other once one has failed


class Mine(LineExp):
    output_dir = "out"
    save_interval_steps = 1

    def get_hooks(self):
        return [Fault()]
"""


def start(name, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = ["-f", "mine.py", "--device", "cpu", "--workers", "0", "-expn", name, "--resume", "auto"]
    begin = time.monotonic()
    done = subprocess.run([*launcher, str(ROOT / "tools/train.py"), *words], env=env, capture_output=True, text=True, timeout=150)
    return done, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_starts_a_killed_job_again(tmp_path, monkeypatch, rank):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(EXP_FILE)
    assert start("whole")[0].returncode == 0
    done, seconds = start("a", KILLED=rank)
    assert done.returncode == 0 and done.stderr.count("resumed from") == 1, done.stderr[-4000:]
    whole, again = (read_checkpoint(Path("out", "mine", name, "last.pth")) for name in ("whole", "a"))
    assert again["step"] == 16 and all(torch.equal(v, whole["model"][k]) for k, v in again["model"].items())
    record(Row(f"SIGKILL of rank {rank}, torchrun --max-restarts", "torchrun starts it again, to the end", 0, seconds, "1 step"))
