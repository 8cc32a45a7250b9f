"""Two runs never share a folder by accident, and a run that is gone does not keep its folder."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from loguru import logger
from toy_task import line_exp

from mmdet.core import RunOptions, Trainer, read_checkpoint
from mmdet.core.hooks import Hook
from mmdet.core.lock import NAME, Owner, RunLock, process_start
from mmdet.errors import UsageError


def trainer_of(exp, **options):
    return Trainer(exp, RunOptions(device="cpu", workers=0, progress=False, **options))


@pytest.fixture
def messages():
    lines = []
    sink = logger.add(lambda m: lines.append(str(m)), format="{level} {message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
def other_process():
    """A process that is alive."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def write_lock(folder, age=0.0, **changes):
    """A lock as another process would leave it, last touched ``age`` seconds ago."""
    content = {**vars(Owner.this_process()), **changes}
    (folder / NAME).write_text(json.dumps(content))
    moment = time.time() - age
    os.utime(folder / NAME, (moment, moment))
    return content


def test_a_folder_has_one_owner_until_it_is_released(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    for call in (second.acquire, second.require_free):
        with pytest.raises(
            UsageError, match=f"in use: process {os.getpid()} on host '.*' has had it since 20.*-expn NAME.*{NAME}"
        ):
            call()
    second.release()  # not its own
    assert (tmp_path / NAME).exists()
    first.release()
    first.release()
    assert not list(tmp_path.iterdir())
    second.acquire()
    second.release()


def test_process_start_tells_processes_apart(other_process):
    assert process_start(os.getpid()) and process_start(other_process.pid)
    other_process.kill()
    time.sleep(0.2)
    assert process_start(other_process.pid) == ""  # a zombie, since nobody waited for it
    other_process.wait()
    assert process_start(other_process.pid) == ""


def test_a_lock_of_a_living_process_holds_however_old(tmp_path, other_process):
    write_lock(tmp_path, age=1e6, pid=other_process.pid, started=process_start(other_process.pid))
    with pytest.raises(UsageError, match=f"process {other_process.pid} on host"):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("case", ["dead", "re-used"])
def test_a_lock_of_a_dead_process_is_taken_over(tmp_path, other_process, case, messages):
    started = process_start(other_process.pid)
    if case == "dead":
        other_process.kill()
        other_process.wait()
    write_lock(tmp_path, pid=other_process.pid, started=started if case == "dead" else "1")
    lock = RunLock(tmp_path)
    lock.require_free()
    lock.acquire()
    assert Owner.of_file(tmp_path / NAME) == lock.me and "was left over by process" in "".join(messages)
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("age", "is_free"), [(0, False), (170, False), (190, True), (-500, False)])
def test_another_machines_lock_holds_while_it_is_touched(tmp_path, age, is_free):
    """-500: its clock is ahead, or was set back here."""
    write_lock(tmp_path, age=age, host="elsewhere", boot="other")
    lock = RunLock(tmp_path)
    if is_free:
        lock.acquire()
        lock.release()
    else:
        with pytest.raises(UsageError, match=r"on host 'elsewhere'.*last sign of life \d+ s ago; after 180 s it counts as gone"):
            lock.acquire()


def test_a_machine_that_was_started_anew_need_not_wait_long(tmp_path):
    write_lock(tmp_path, age=70, boot="before")
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_waiting_for_a_machine_that_is_gone_and_for_one_that_is_not(tmp_path, messages):
    write_lock(tmp_path, host="elsewhere")
    lock = RunLock(tmp_path, beat=0.1, stale=0.8)
    lock.acquire(wait=True)
    assert "waiting for up to 1 s for a sign of life" in "".join(messages)
    lock.release()
    write_lock(tmp_path, host="elsewhere")
    beat = threading.Timer(0.3, os.utime, (tmp_path / NAME,))
    beat.start()
    with pytest.raises(UsageError, match="in use"):
        RunLock(tmp_path, beat=0.1, stale=5).acquire(wait=True)
    beat.join()


def test_the_owner_gives_signs_of_life(tmp_path):
    lock = RunLock(tmp_path, beat=0.05)
    lock.acquire()
    os.utime(tmp_path / NAME, (1, 1))
    end = time.monotonic() + 5
    while (tmp_path / NAME).stat().st_mtime < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / NAME).stat().st_mtime > 2
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}'])
def test_a_lock_that_says_nothing_holds_until_it_is_old(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with pytest.raises(UsageError, match="an unknown process"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / NAME, (1, 1))
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_run_that_was_taken_over_notices(tmp_path, messages):
    lock = RunLock(tmp_path)
    lock.check()  # not held: nothing to say
    lock.acquire()
    lock.check()
    (tmp_path / NAME).unlink()
    lock.check()
    assert Owner.of_file(tmp_path / NAME) == lock.me and "it is made anew" in "".join(messages)
    write_lock(tmp_path, host="elsewhere", pid=77)
    with pytest.raises(UsageError, match="taken over by process 77 on host 'elsewhere'"):
        lock.check()
    lock.release()
    assert Owner.of_file(tmp_path / NAME).pid == 77


RACE = """
import sys, time
from pathlib import Path
from mmdet.core.lock import RunLock
from mmdet.errors import UsageError
lock = RunLock(Path(sys.argv[1]))
time.sleep(max(float(sys.argv[2]) - time.time(), 0))
try:
    lock.acquire()
    time.sleep(1.5)
    lock.release()
except UsageError:
    sys.exit(2)
"""


@pytest.mark.parametrize("left_over", [False, True])
def test_of_many_that_start_at_once_one_gets_it(tmp_path, left_over):
    if left_over:
        write_lock(tmp_path, started="1")
    command = [sys.executable, "-c", RACE, str(tmp_path), str(time.time() + 2.5)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    processes = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert sorted(p.wait(60) for p in processes) == [0, 2, 2, 2]
    assert not list(tmp_path.iterdir())


# -- runs -----------------------------------------------------------------------------------------------------------------------


class StartAnother(Hook):
    """What a second command line would do while this run is at work."""

    def __init__(self, start):
        self.start, self.error = start, None

    def on_step_end(self, trainer):
        if trainer.step == 6:
            assert json.loads((trainer.run_dir / NAME).read_text())["pid"] == os.getpid()
            with pytest.raises(UsageError) as caught:
                self.start()
            self.error = str(caught.value)


@pytest.mark.parametrize("second", [{"resume": ""}, {"resume": "auto"}, {"resume": "auto", "experiment_name": "a"}, "file"])
def test_a_resume_of_a_living_run_is_refused(tmp_path, second):
    if second == "file":
        second = {"resume": str(tmp_path / "line" / "a" / "last.pth")}
    trainer = trainer_of(line_exp(tmp_path), experiment_name="a")
    hook = StartAnother(lambda: trainer_of(line_exp(tmp_path), **second))
    trainer.hooks.append(hook)
    trainer.train()
    assert f"run folder {tmp_path / 'line' / 'a'} is in use: process {os.getpid()} on host" in hook.error
    assert not (trainer.run_dir / NAME).exists()
    assert trainer_of(line_exp(tmp_path), resume="").step == 16


def test_two_new_runs_of_one_name(tmp_path):
    """The second is built while the first has saved nothing yet."""
    second = trainer_of(line_exp(tmp_path), experiment_name="a")

    class Second(Hook):
        def on_train_start(self, trainer):
            with pytest.raises(UsageError, match="is in use"):
                second.train()

    first = trainer_of(line_exp(tmp_path), experiment_name="a")
    first.hooks.append(Second())
    first.train()
    assert first.step == 16 and step_on_disk(first.run_dir) == 16


@pytest.mark.parametrize("how", [{}, {"resume": "auto"}])
def test_a_new_run_does_not_write_over_one_that_began_and_ended_while_it_was_built(tmp_path, how):
    second = trainer_of(line_exp(tmp_path), experiment_name="a", **how)
    first = trainer_of(line_exp(tmp_path), experiment_name="a")
    first.train()
    before = {p: p.read_bytes() for p in first.run_dir.iterdir() if p.is_file()}
    with pytest.raises(UsageError, match="another run has saved checkpoints there"):
        second.train()
    assert {p: p.read_bytes() for p in first.run_dir.iterdir() if p.is_file()} == before


def test_new_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    both = [trainer_of(line_exp(tmp_path)) for _ in range(2)]
    both[1].run_dir = both[0].run_dir  # neither had made it when the other looked
    for trainer in both:
        trainer.train()
    assert both[1].run_dir.name == f"{both[0].run_dir.name}_2"
    assert all((t.run_dir / "last.pth").is_file() for t in both) and len(list((tmp_path / "line").iterdir())) == 2


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_the_lock_goes_with_the_run_however_it_ends(tmp_path, error):
    class Broken(Hook):
        def on_step_end(self, trainer):
            raise error

    trainer = trainer_of(line_exp(tmp_path), experiment_name="a")
    trainer.hooks.append(Broken())
    with pytest.raises(type(error)):
        trainer.train()
    assert not (trainer.run_dir / NAME).exists()


def test_a_run_whose_folder_was_taken_saves_nothing_more(tmp_path):
    class Taken(Hook):
        def on_step_end(self, trainer):
            if trainer.step == 6:
                write_lock(trainer.run_dir, host="elsewhere", pid=77)

    trainer = trainer_of(line_exp(tmp_path), experiment_name="a")
    trainer.hooks.append(Taken())
    with pytest.raises(UsageError, match="was taken over by process 77"):
        trainer.train()
    assert trainer.step == 8 and step_on_disk(trainer.run_dir) == 4


def step_on_disk(folder):
    return read_checkpoint(folder / "last.pth")["step"]
