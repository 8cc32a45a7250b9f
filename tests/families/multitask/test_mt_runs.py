"""MT-13, MT-16 to MT-19, MT-22: the Trainer on several tasks, in one process and in four."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dist import run_ranks
from mt_runs import KEEP, Unjudged, losses_of, moved, part_run, spoilt_runs, state_of, train
from mt_toy import largest_difference, make_data

from mmdet.core.files import read_checkpoint

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("mt"))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """A run of 20 iterations in one process, with a file at 10."""
    trainer, notes, _ = train(data, tmp_path_factory.mktemp("alone"), **KEEP)
    return trainer, state_of(trainer), losses_of(trainer)


@pytest.fixture(scope="module")
def ranks(data, alone, tmp_path_factory):
    return run_ranks(4, spoilt_runs, 280, data, tmp_path_factory.mktemp("ranks"), alone[0].run_dir / "iter_000010.pth")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_is_the_same_bit_for_bit(data, tmp_path, workers):
    """MT-13, with dropout: 10 steps against 5, resume, and 5 more."""
    fields = {"max_iter": 10, "eval_interval": 10, "save_interval": 5, "dropout": 0.3}
    whole, _, _ = train(data, tmp_path / "whole", workers=workers, **fields)
    path = moved(whole.run_dir, tmp_path / "half", "iter_000005.pth")
    resumed, _, _ = train(data, tmp_path, resume=path, workers=workers, **fields)
    first, second = losses_of(whole), losses_of(resumed)
    assert list(second) == [6, 7, 8, 9, 10] and all(second[k] == first[k] for k in second)
    assert largest_difference(state_of(whole), state_of(resumed)) == 0
    assert (whole.run_dir / "final.pth").samefile(whole.run_dir / "last.pth")


def test_nan_on_one_task_skips_the_step_everywhere(ranks):
    """MT-16: iteration 8 (step 7) of task detB, which ranks 1 and 2 train."""
    for rank in ranks:
        states, skipped, error, _ = rank["single"]
        assert error == "" and skipped == [0] * 7 + [1] * 5
        assert states[7] == states[6] and states[8] != states[7]  # weights, momentum, EMA and its count
    log = ranks[0]["single"][3]
    line = next(line for line in log.splitlines() if "was left out" in line)
    assert "iteration 8" in line and "losses on rank 1" in line and "detB/loss_iou nan" in line and "on rank 3" not in line
    assert "first bad gradient: backbones.0" in line


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_nan_again_and_again_brings_the_snapshot_back_and_ends(ranks, optimizer):
    """MT-17: the snapshot of iteration 5 comes back three times, bit for bit, then every rank gives up."""
    for rank in ranks:
        states, skipped, restores, error = rank[optimizer]
        assert states[7] == states[6] != states[4]
        assert restores[8:12] == [0, 1, 1, 1] and states[9] == states[4]
        assert states[12] == states[15] == states[4] and max(restores) == 3
        assert "brought back 3 times" in error


def test_a_run_goes_on_with_another_number_of_processes(data, alone, ranks, tmp_path):
    """MT-19: 1 -> 4, 4 -> 1, against 1 and 4."""
    trainer, state, _ = alone
    assert largest_difference(state, ranks[0]["whole"]) <= 5e-5
    assert largest_difference(state, ranks[0]["resumed"]) <= 5e-5
    back, _, _ = train(data, tmp_path, resume=moved(Path(ranks[0]["half"]).parent, tmp_path / "h", "iter_000010.pth"), **KEEP)
    assert largest_difference(state, state_of(back)) <= 5e-5
    assert all(largest_difference(rank["whole"], ranks[0]["whole"]) == 0 for rank in ranks)


@pytest.mark.slow
def test_four_then_one_then_four_processes(data, alone, tmp_path):
    """MT-19 in one chain."""
    (_, first), *_ = run_ranks(4, part_run, 280, data, tmp_path / "first")
    _, second = part_run(data, tmp_path / "second", f"{first}/iter_000007.pth")
    third = run_ranks(4, part_run, 280, data, tmp_path / "third", f"{second}/iter_000014.pth")
    assert largest_difference(alone[1], third[0][0]) <= 5e-5
    assert all(largest_difference(rank[0], third[0][0]) == 0 for rank in third)


def test_the_log_speaks_of_tasks(data, alone, ranks):
    """MT-22: tags per task, one line per task and interval, values that are means over shards."""
    trainer, _, one = alone
    log = (trainer.run_dir / "train_log.txt").read_text()
    for name in ("detA", "detB", "cls"):
        assert sum(f"| task {name}: loss " in line for line in log.splitlines()) == 20
    four = ranks[0]["losses"]
    for step, line in one.items():
        for name in ("loss/detA", "loss/detB", "loss/cls", "top1/cls"):
            assert four[step][name] == pytest.approx(line[name], rel=1e-4, abs=1e-4)
    assert one[1]["loss/detB"] == pytest.approx(four[1]["loss/detB"], abs=1e-6 * four[1]["loss/detB"])
    assert set(one[1]["grad_norm"]) == {"backbone", "neck", "head/detA", "head/detB", "head/cls"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(trainer.run_dir / "tensorboard")).Reload()
    tags = board.Tags()["scalars"]
    assert {"train/loss/detA", "train/top1/cls", "grad_norm/backbone", "grad_norm/head/detA", "lr/backbone"} <= set(tags)
    assert len(board.Scalars("train/loss/detB")) == 20


KILLED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from mt_runs import train
train(Path({data!r}), Path({out!r}), save_interval=1, max_iter=60, eval_interval=60)
"""


def test_a_killed_run_leaves_a_good_file_and_goes_on(data, tmp_path):
    """MT-18: kill -9 while files are being written, then resume: the same numbers as without."""
    script = tmp_path / "killed.py"
    script.write_text(
        KILLED.format(path=[str(HERE), str(HERE.parents[1]), str(HERE.parents[2])], data=str(data), out=str(tmp_path / "k"))
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "k").glob("toy/*/iter_000004.pth")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = (tmp_path / "k" / "toy").iterdir()
    saved = read_checkpoint(folder / "last.pth")
    assert 4 <= saved["step"] < 60 and all(read_checkpoint(p)["step"] for p in folder.glob("iter_*.pth"))
    fields = {"save_interval": 1, "max_iter": 60, "eval_interval": 60}
    resumed, _, _ = train(data, tmp_path / "k", resume=str(folder), **fields)
    whole, _, _ = train(data, tmp_path / "w", Unjudged, **fields)
    assert largest_difference(state_of(whole), state_of(resumed)) == 0
    first, second = losses_of(whole), losses_of(resumed)
    assert all(json.dumps(first[k]) == json.dumps(second[k]) for k in range(saved["step"] + 1, 61))
    assert torch.equal(
        read_checkpoint(folder / "final.pth")["model"]["heads.cls.linear.bias"], whole.model.heads["cls"].linear.bias
    )
