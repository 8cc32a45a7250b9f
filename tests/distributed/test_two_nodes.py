"""Two nodes, each with an address of its own and one process, give what one node with two processes gives."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dist_train import make_data

from mmdet.core import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("two_nodes.sh")
STEPS = 30


def namespaces_are_allowed() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "setsid", "bash"))):
        return False
    name = f"mmdetprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    probe = ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    good = subprocess.run(probe, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return good


needs_namespaces = pytest.mark.skipif(
    not namespaces_are_allowed(), reason="network namespaces need Linux, root, iproute2 (ip) and permission to make them"
)


def train(folder, launcher):
    """The last checkpoint of 30 steps with YOLOX-nano, and its log lines."""
    words = ["batch_size=4", "recipe_batch_size=4", "max_epoch=10", "eval_interval=10", "no_aug_epochs=3", "warmup_epochs=1"]
    words += ["input_size=64", "test_size=64", "multiscale=(1,1)", "print_interval=1", "clip_norm=10", "ema_decay=0.9"]
    words += [f"basic_lr_per_img={0.01 / 4}", "warmup_pass=off"]
    command = [*launcher, str(ROOT / "tools/train.py"), "-n", "yolox_nano", "--device", "cpu", "--workers", "0", *words]
    command += ["--data", str(folder.parent / "data"), "--output", str(folder), "-expn", "run"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    result = subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    run = folder / "yolox_nano" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return read_checkpoint(run / "last.pth"), [line for line in lines if line["kind"] == "train"]


@pytest.mark.slow
@needs_namespaces
def test_two_nodes_are_one(tmp_path):
    make_data(tmp_path / "data")
    one, one_log = train(tmp_path / "one", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])
    two, two_log = train(tmp_path / "two", ["bash", str(SCRIPT), sys.executable])
    assert one["step"] == two["step"] == STEPS and one["conditions"]["world"] == two["conditions"]["world"] == 2
    losses = [[{k: v for k, v in line.items() if k.startswith("loss")} for line in log] for log in (one_log, two_log)]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]
    for part in (lambda s: s["model"], lambda s: s["ema"]["model"]):
        assert part(one).keys() == part(two).keys()
        assert all(torch.equal(value, part(two)[name]) for name, value in part(one).items())
