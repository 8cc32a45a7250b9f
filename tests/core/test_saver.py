"""Saves that fail: old files stay, no leftovers, training goes on for a while, and the best is not forgotten."""

import errno
import os
import subprocess

import pytest
import torch
from loguru import logger
from toy_task import line_exp

from mmdet.core import RunOptions, Trainer, read_checkpoint
from mmdet.core.files import link_atomic
from mmdet.core.hooks import Hook
from mmdet.core.saver import SaveError, Saver
from mmdet.errors import NonFiniteError


def trainer_of(exp, **options):
    return Trainer(exp, RunOptions(device="cpu", workers=0, progress=False, **options))


def state(step, size=4):
    return {"model": {"w": torch.full((size,), float(step))}, "step": step}


def steps(folder):
    """What is on the disk: file -> step."""
    return {p.name: read_checkpoint(p)["step"] for p in folder.iterdir()}


class Disk:
    """A disk that is full when it is told so."""

    def __init__(self, monkeypatch):
        self.full, self.let_through = False, 0
        fsync = os.fsync

        def checked(handle):
            if self.full and self.let_through <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.let_through -= 1
            return fsync(handle)

        monkeypatch.setattr("os.fsync", checked)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def messages():
    lines = []
    sink = logger.add(lambda m: lines.append(str(m)), format="{level} {message}")
    yield lines
    logger.remove(sink)


def test_failed_saves_are_counted_and_the_old_files_stay(tmp_path, disk, messages):
    saver = Saver(tmp_path, keep=1, max_failed=3)
    assert saver.save(state(1), 1)
    disk.full = True
    assert not saver.save(state(2), 2) and not saver.save(state(3), 3)
    assert steps(tmp_path)["last.pth"] == 1 and not list(tmp_path.glob(".*"))
    text = "".join(messages)
    assert "WARNING No space left on device: could not save" in text and "2 more such saves in a row end it" in text
    assert "The last good save is that of step 1" in text
    disk.full = False
    assert saver.save(state(4), 4) and saver.failed == 0  # and the count starts anew
    assert steps(tmp_path) == {"last.pth": 4, "epoch_001.pth": 1}
    disk.full = True
    assert not saver.save(state(5), 5) and not saver.save(state(6), 6)
    with pytest.raises(SaveError, match="could not save .*failed 3 times in a row.*last good save is that of step 4") as caught:
        saver.save(state(7), 7)
    assert caught.value.errno == errno.ENOSPC and steps(tmp_path)["last.pth"] == 4


def test_a_save_that_must_succeed_is_not_forgiven(tmp_path, disk):
    disk.full = True
    with pytest.raises(SaveError, match="No space left.*Nothing is saved yet"):
        Saver(tmp_path, keep=1).save(state(1), 1, must=True)


def test_a_best_that_found_no_room_is_written_later(tmp_path, disk):
    """A later last.pth knows of that best, so best.pth and weights.pth must be its."""
    saver = Saver(tmp_path, keep=0)
    saver.save(state(1), 1, weights=state(1), best=True)
    disk.full = True
    kept = state(2)
    assert not saver.save(kept, 2, weights=kept, best=True)
    kept["model"]["w"].fill_(99)  # training goes on in place
    disk.full = False
    assert saver.save(state(3), 3)
    assert steps(tmp_path) == {"last.pth": 3, "best.pth": 2, "weights.pth": 2}
    assert read_checkpoint(tmp_path / "best.pth")["model"]["w"].tolist() == [2.0] * 4


def test_a_newer_best_replaces_the_unsaved_one(tmp_path, disk):
    saver = Saver(tmp_path, keep=0)
    disk.full = True
    saver.save(state(1), 1, weights=state(1), best=True)
    disk.full = False
    saver.save(state(2), 2, weights=state(2), best=True)
    saver.save(state(3), 3)
    assert steps(tmp_path) == {"last.pth": 3, "best.pth": 2, "weights.pth": 2}


@pytest.mark.parametrize("done", range(7))
def test_wherever_the_disk_gets_full_last_never_knows_more_than_best(tmp_path, disk, done):
    saver = Saver(tmp_path, keep=1)
    saver.save(state(1), 1, weights=state(1), best=True)
    disk.full, disk.let_through = True, done
    saved = saver.save(state(2), 2, weights=state(2), best=True)
    found = steps(tmp_path)
    assert found["last.pth"] == (2 if saved else 1) and found["best.pth"] >= found["last.pth"]
    assert not list(tmp_path.glob(".*"))


def test_what_is_not_finite_is_no_failed_save(tmp_path):
    saver = Saver(tmp_path, keep=0)
    with pytest.raises(NonFiniteError):
        saver.save(state(float("nan")), 1)
    assert saver.failed == 0 and not list(tmp_path.iterdir())


def test_epochs_are_counted_not_timed(tmp_path):
    """With a clock that runs backwards."""
    saver = Saver(tmp_path, keep=2)
    for n in range(1, 6):
        saver.save(state(n), n)
        os.utime(tmp_path / "last.pth", (10_000 - n, 10_000 - n))
    assert steps(tmp_path) == {"last.pth": 5, "epoch_004.pth": 4, "epoch_003.pth": 3}


def test_a_copy_reaches_the_disk_where_there_are_no_links(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    link_atomic(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes() and len(list(tmp_path.iterdir())) == 2


# -- a whole run ----------------------------------------------------------------------------------------------------------------


class FullBetween(Hook):
    """The disk is full from the end of step ``first`` to that of step ``last``."""

    def __init__(self, first, last, set_full):
        self.first, self.last, self.set_full = first, last, set_full

    def on_step_end(self, trainer):
        if trainer.step in (self.first, self.last):
            self.set_full(trainer.step == self.first)


def run_with(tmp_path, set_full, first, last, **values):
    trainer = trainer_of(line_exp(tmp_path, save_interval_steps=1, keep_checkpoints=0, **values), experiment_name="a")
    trainer.hooks.append(FullBetween(first, last, set_full))
    return trainer


def test_a_run_goes_on_over_a_disk_that_is_full_for_a_while(tmp_path, disk):
    whole = trainer_of(line_exp(tmp_path, "whole"), experiment_name="a")
    whole.train()
    trainer = run_with(tmp_path, lambda full: setattr(disk, "full", full), 5, 7)
    trainer.train()
    log = (trainer.run_dir / "train_log.txt").read_text()
    assert log.count("No space left") == 2 and "saving works again: step 7" in log and "training done" in log
    assert all(torch.equal(v, whole.model.state_dict()[k]) for k, v in trainer.model.state_dict().items())


def test_a_run_ends_when_its_saves_keep_failing(tmp_path, disk):
    trainer = run_with(tmp_path, lambda full: setattr(disk, "full", full), 5, 99, max_failed_saves=2)
    with pytest.raises(SaveError, match="failed 2 times in a row.*step 4"):
        trainer.train()
    assert trainer.step == 6 and read_checkpoint(trainer.run_dir / "last.pth")["step"] == 4
    assert not list(trainer.run_dir.glob(".*")) and not (trainer.run_dir / "run.lock").exists()


def test_a_run_does_not_end_well_without_its_last_save(tmp_path, disk):
    trainer = run_with(tmp_path, lambda full: setattr(disk, "full", full), 16, 99, max_failed_saves=9)
    with pytest.raises(SaveError, match="No space left"):
        trainer.train()
    assert "training done" not in (trainer.run_dir / "train_log.txt").read_text()


def test_a_really_full_disk(tmp_path):
    """256 KiB, of which a file takes the rest: log, metrics, TensorBoard, pictures and checkpoints all find no room."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mount.stderr.strip()}")
    try:
        trainer = run_with(folder, lambda full: fill(folder) if full else (folder / "rest").unlink(), 5, 7)
        trainer.train()
        found = read_checkpoint(trainer.run_dir / "last.pth")
        assert found["step"] == 16 and not list(trainer.run_dir.glob(".*"))
        assert trainer.saver.failed == 0 and "saving works again" in (trainer.run_dir / "train_log.txt").read_text()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    with (folder / "rest").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC
