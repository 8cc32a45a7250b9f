"""A checkpoint of one epoch that stays, also when the run dies between saving and keeping."""

import pytest
import torch
from toy_task import LineExp

from mmdet.core import RunOptions, Trainer
from mmdet.core.files import read_checkpoint
from mmdet.core.hooks import Hook, KeepCheckpoint


class DieBefore(Hook):
    def on_epoch_end(self, trainer):
        if trainer.epoch == 2:
            raise RuntimeError("killed")


class KeptExp(LineExp):
    dies: bool = False

    def get_hooks(self):
        return [*([DieBefore()] if self.dies else []), KeepCheckpoint(2, "kept.pth")]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``run(resume=None, **values) -> run folder``."""

    def run(resume=None, **values):
        exp = KeptExp()
        for key, value in {"output_dir": str(tmp_path), "exp_name": "kept", "keep_checkpoints": 0, **values}.items():
            exp.set(key, value, "default")
        trainer = Trainer(exp, RunOptions(device="cpu", workers=0, experiment_name="run", resume=resume))
        trainer.train()
        return trainer.run_dir

    return run


def epochs_of(folder):
    return {p.name: read_checkpoint(p)["epoch"] for p in folder.glob("*.pth") if p.name != "weights.pth"}


def test_it_is_the_state_of_its_epoch(train):
    folder = train()
    found = epochs_of(folder)
    assert found["kept.pth"] == 2 and found["last.pth"] == 4 and set(found) <= {"kept.pth", "last.pth", "best.pth"}
    assert read_checkpoint(folder / "kept.pth")["step"] == 8


def test_a_run_killed_at_that_moment_keeps_it_when_it_is_resumed(train, tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        train(dies=True)
    folder = tmp_path / "kept" / "run"
    assert epochs_of(folder)["last.pth"] == 2 and not (folder / "kept.pth").exists()
    train(resume=str(folder / "last.pth"))
    assert epochs_of(folder)["kept.pth"] == 2 and epochs_of(folder)["last.pth"] == 4


def test_going_back_to_it_continues_the_same_run(train):
    folder = train()
    last = read_checkpoint(folder / "last.pth")["model"]
    train(resume=str(folder / "kept.pth"))
    again = read_checkpoint(folder / "last.pth")["model"]
    assert all(torch.equal(again[name], value) for name, value in last.items())
