"""Faults of files: what train.py does when it meets them, with which exit code, how soon, and what is lost."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_run
import torch
from table import Row, record
from toy import make_toy

from mmdet.core import read_checkpoint
from mmdet.core.cli import run_command
from mmdet.core.files import checksum
from tools import train as train_tool

ROOT = Path(__file__).resolve().parents[2]
# 4 epochs of 4 steps, saved after each; what the environment asks for happens at the end of a step.
EXP_FILE = """
import os, signal
from toy_task import LineExp
from mmdet.core.hooks import Hook


def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


class Fault(Hook):
    def on_step_end(self, trainer):
        def at(name):
            return trainer.step == int(os.environ.get(name, 0))

        if at("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if at("FILL_AT"):
            fill("out/rest")
        if at("FREE_AT"):
            os.unlink("out/rest")
        if at("LOCK_AT"):
            os.system(f"chattr +i {trainer.run_dir}")
        if at("BACK_AT"):
            import time
            now = time.time
            time.time = lambda: now() - 86400


class Mine(LineExp):
    output_dir = "out"
    eval_interval = 1
    save_interval_steps = 1
    keep_checkpoints = 1

    def get_hooks(self):
        return [Fault()]
"""
RUN = Path("out/mine/a")


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(EXP_FILE)
    return tmp_path


@pytest.fixture
def train(capfd, monkeypatch):
    """``train(words, KILL_AT=3) -> (exit code, seconds, what was printed)``"""

    def call(*words, **environment):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, str(value))
            start = time.monotonic()
            code = run_command(train_tool.run, ["-f", "mine.py", "--device", "cpu", "--workers", "0", *map(str, words)])
            seconds = time.monotonic() - start
        captured = capfd.readouterr()
        return code, seconds, captured.out + captured.err

    return call


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run's folder."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "mine.py").write_text(EXP_FILE)
    words = ["--device", "cpu", "--workers", "0", "--output", str(folder / "out"), "-expn", "a"]
    assert run_command(train_tool.run, ["-f", str(folder / "mine.py"), *words]) == 0
    return folder / RUN


def final(folder):
    state = read_checkpoint(folder / "last.pth")
    return checksum({key: state[key] for key in ("model", "ema", "optimizer", "step", "best", "guard")})


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def start(*words, **environment):
    """The same in a process of its own, which may start others."""
    env = {**os.environ, **{k: str(v) for k, v in environment.items()}, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, str(ROOT / "tools/train.py"), "-f", "mine.py", "--device", "cpu", "--workers", "0", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


# -- checkpoints that are none --------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def truncated(path, data):
    path.write_bytes(data[: len(data) // 2])


def zero_bytes(path, data):
    path.write_bytes(b"")


def empty(path, data):
    torch.save({}, path)


def foreign(path, data):
    torch.save({"state_dict": {"encoder.weight": torch.ones(3, 3)}}, path)


def not_a_checkpoint(path, data):
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500))


def malicious(path, data):
    path.write_bytes(pickle.dumps({"model": Evil()}))


def malicious_zip(path, data):
    torch.save({"model": Evil(), "optimizer": {}, "epoch": 0, "step": 99}, path)


KINDS = [truncated, zero_bytes, empty, foreign, not_a_checkpoint, malicious, malicious_zip]


@pytest.mark.parametrize("damage", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["--resume", "--resume FILE", "--resume auto", "-c"])
def test_checkpoints_that_are_none(work, train, whole, damage, way):
    shutil.copytree(whole, RUN)
    last = RUN / "last.pth"
    data = last.read_bytes()
    for path in (last, RUN / "best.pth"):  # the good one that is left is epoch_003.pth
        path.unlink()
        damage(path, data)
    before = contents(RUN)
    words = {"--resume": ["--resume"], "--resume FILE": ["--resume", last], "--resume auto": ["--resume", "auto"]}
    code, seconds, text = train(*words.get(way, ["-c", last]), *(["-expn", "a"] if way == "--resume auto" else []))
    assert not Path("ran").exists() and "Traceback" not in text and str(last) in text and "Re-running" not in text, text
    if way == "--resume auto":
        assert code == 0 and "going on from out/mine/a/epoch_003.pth, 12 steps done" in text, text
        assert final(RUN) == final(whole)
        happens, lost = "named; goes on from the good one before", "nothing saved; 4 steps are done again"
    else:
        assert code == 2 and contents(RUN) == before and [p.name for p in RUN.parent.iterdir()] == ["a"], text
        if way != "-c":
            assert "epoch_003.pth" in text
        happens, lost = "named, refused" + ("" if way == "-c" else "; the good one is named"), "nothing"
    record(Row(f"{damage.__name__.replace('_', ' ')}, {way}", happens, code, seconds, lost))


def test_a_folder_in_a_checkpoints_place(work, train, whole):
    code, seconds, text = train("-c", whole)
    assert code == 2 and "is a folder: give a file in it: " in text and f"{whole}/best.pth, {whole}/weights.pth" in text, text
    record(Row("a folder, -c", "named, with the files in it", code, seconds, "nothing"))


# -- disks ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(work):
    """``disk("size=1m") -> the folder "out" on a file system of its own``"""
    mounted = []

    def mount(options):
        Path("out").mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "out"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
        mounted.append(work / "out")

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_disk_full_for_a_while(work, disk, train, whole):
    disk("size=1m")
    code, seconds, text = train("-expn", "a", "max_failed_saves=5", FILL_AT=5, FREE_AT=8)
    assert code == 0 and text.count("Training goes on") == 3 and "saving works again: step 8" in text, text
    assert final(RUN) == final(whole) and not list(RUN.glob(".*"))
    record(Row("disk full during 3 saves, then not", "warnings; training goes on", code, seconds, "nothing"))


def test_disk_full_for_good(work, disk, train, whole):
    disk("size=1m")
    code, seconds, text = train("-expn", "a", FILL_AT=6)
    last = text.strip().splitlines()[-1]
    assert code == 1 and "No space left on device: could not save" in last and "last good save is that of step 5" in last, text
    assert read_checkpoint(RUN / "last.pth")["step"] == 5 and not list(RUN.glob(".*"))
    Path("out/rest").unlink()
    assert train("--resume", "auto", "-expn", "a")[0] == 0 and final(RUN) == final(whole)
    record(Row("disk full for good", "ends at the third failed save", code, seconds, "nothing saved; 3 steps are done again"))


def test_disk_full_before_the_start(work, disk, train):
    disk("size=16k")
    (work / "out" / "rest").write_bytes(bytes(16384 - 4096))
    code, seconds, text = train("-expn", "a")
    assert code in (1, 2) and "No space left on device" in text.strip().splitlines()[-1], text
    record(Row("disk full at the start", "refused or ended by name", code, seconds, "nothing"))


@pytest.mark.parametrize("kind", ["read-only file system", "file in the folder's place"])
def test_an_output_folder_that_cannot_be_written_to(work, disk, train, kind):
    if kind == "read-only file system":
        disk("size=1m,ro")
    else:
        Path("out").write_text("a file")
    code, seconds, text = train("-expn", "a")
    last = text.strip().splitlines()[-1]
    assert code == 2 and "run folder out/mine/a" in last and "name another with --output" in last, text
    record(Row(f"output folder: {kind}", "refused by name", code, seconds, "nothing"))


def test_a_run_folder_that_becomes_read_only(work, train, whole):
    """No process, not even root's, changes a folder with this mark."""
    probe = work / "probe"
    probe.mkdir()
    if subprocess.run(["chattr", "+i", str(probe)], capture_output=True).returncode:
        pytest.skip("this file system knows no immutable folders")
    subprocess.run(["chattr", "-i", str(probe)], check=True)
    try:
        code, seconds, text = train("-expn", "a", LOCK_AT=6)
    finally:
        subprocess.run(["chattr", "-i", str(RUN)], check=True)
    last = text.strip().splitlines()[-1]
    assert code == 1 and "Operation not permitted: could not save" in last and "failed 3 times in a row" in last, text
    assert read_checkpoint(RUN / "last.pth")["step"] == 5 and not list(RUN.glob(".*"))
    record(Row("run folder made read-only in a run", "ends at the third failed save", code, seconds, "nothing saved; 3 steps"))


# -- two runs, and time ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_leaves_its_lock(work, train, whole):
    assert start("-expn", "a", KILL_AT=7).returncode == -signal.SIGKILL
    owner = json.loads((RUN / "run.lock").read_text())
    code, seconds, text = train("--resume", "auto", "-expn", "a")
    assert code == 0 and f"left over by process {owner['pid']}" in text and final(RUN) == final(whole), text
    assert not (RUN / "run.lock").exists()
    record(
        Row(
            "SIGKILL, then --resume auto", "the lock is taken over; goes on", code, seconds, "nothing saved; 1 step is done again"
        )
    )


def test_a_run_folder_of_a_living_run(work, train, whole):
    shutil.copytree(whole, RUN)
    with subprocess.Popen([sys.executable, "-c", TAKE, str(RUN)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        before = contents(RUN)
        for words in (["--resume"], ["--resume", "auto", "-expn", "a"], ["--resume", RUN / "best.pth"]):
            code, seconds, text = train(*words, "max_epoch=5")
            assert code == 2 and f"is in use: process {other.pid} on host" in text and contents(RUN) == before, text
        other.communicate(b"\n")
    assert train("--resume", "max_epoch=5")[0] == 0
    record(Row("another run is alive in the folder", "refused, names host and process", code, seconds, "nothing"))


TAKE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from mmdet.core.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("taken", flush=True)
input()
lock.release()
"""


def test_the_clock_is_set_back(work, train, whole, monkeypatch):
    """By a day within the run; the files that were saved before are of tomorrow."""
    monkeypatch.setattr("time.time", time.time)  # put back at the end
    code, seconds, text = train("-expn", "a", "max_epoch=4", BACK_AT=6)
    assert code == 0 and final(RUN) == final(whole), text
    for path in RUN.glob("*.pth"):
        if path.name != "last.pth":
            tomorrow = time.time() + 2 * 86400
            os.utime(path, (tomorrow, tomorrow))
    code, seconds, text = train("--resume", "auto", "-expn", "a", "max_epoch=5")
    assert code == 0 and "resumed from out/mine/a/last.pth: 4 epochs" in text, text
    assert read_checkpoint(RUN / "last.pth")["step"] == 20 and read_checkpoint(RUN / "epoch_004.pth")["step"] == 16
    record(Row("clock set back by a day", "the step in the file counts, not its time", code, seconds, "nothing"))


# -- two ranks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_refuse_a_damaged_file_together(work, whole):
    shutil.copytree(whole, RUN)
    data = (RUN / "last.pth").read_bytes()
    (RUN / "last.pth").unlink()
    truncated(RUN / "last.pth", data)
    begin = time.monotonic()
    done = start("-d", "2", "--resume")
    assert done.returncode == 2 and done.stderr.count("last.pth' (") == 1 and "Traceback" not in done.stderr, done.stderr
    record(Row("truncated, --resume, 2 ranks", "refused, told once", 2, time.monotonic() - begin, "nothing"))


@pytest.mark.slow
def test_two_ranks_and_a_full_disk(work, disk, train):
    assert start("-d", "2", "--resume", "auto", "-expn", "whole").returncode == 0
    shutil.move("out/mine/whole", "whole")
    shutil.rmtree("out")
    disk("size=1m")
    begin = time.monotonic()
    done = start("-d", "2", "--resume", "auto", "-expn", "a", FILL_AT=6)
    seconds = time.monotonic() - begin
    assert done.returncode == 1 and done.stderr.count("SaveError: ") == 1 and "Traceback" not in done.stderr, done.stderr
    assert read_checkpoint(RUN / "last.pth")["step"] == 5 and not (RUN / "run.lock").exists()
    Path("out/rest").unlink()
    done = start("-d", "2", "--resume", "auto", "-expn", "a")
    assert done.returncode == 0 and final(RUN) == final(Path("whole")), done.stderr
    record(Row("disk full for good, 2 ranks", "both end at the third failed save", 1, seconds, "nothing saved; 3 steps"))


# -- data -----------------------------------------------------------------------------------------------------------------------


def test_the_annotations_change_between_save_and_resume(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ("--data", "toy", "-b", "2", "eval_interval=9", "warmup_epochs=0")
    make_toy("toy", 2, 1)
    assert small_run.train(*words, "-expn", "a", "max_epoch=1") == 0
    run = Path("outputs", small_run.NAME, "a")
    before = contents(run)

    def move(coco, split):
        if split == "train":
            coco["annotations"][0]["bbox"][0] += 1

    make_toy("toy", 2, 1, edit=move)
    capfd.readouterr()
    for how in (["--resume"], ["--resume", "auto", "-expn", "a"]):
        start = time.monotonic()
        code = small_run.train(*words, *how, "max_epoch=2")
        seconds = time.monotonic() - start
        text = capfd.readouterr().err
        assert code == 2 and "would not be the same run. train data: the checkpoint has" in text and contents(run) == before, text
    make_toy("toy", 2, 1)
    assert small_run.train(*words, "--resume", "max_epoch=2") == 0
    record(Row("annotation file changed before a resume", "refused by name", code, seconds, "nothing"))
