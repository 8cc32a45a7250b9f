"""Faults of processes: two ranks, one of which something happens to. How the job ends, how soon, and what is lost."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from table import Row, record
from toy import make_toy

from mmdet.core import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6  # 8 images in batches of 4, 3 epochs; saved after every step
# The environment says what happens on rank 1 (RANK is the launcher's) in iteration 3, the first of the second epoch.
EXP_FILE = """
import multiprocessing, os, signal, time
from dataclasses import replace
from pathlib import Path
from mmdet.core.hooks import Hook
from mmdet.families.ppyoloe.exp import PPYOLOEExp

FAULT, ON_ONE = os.environ.get("FAULT", ""), os.environ.get("RANK") == "1"


def mark(step):
    Path(os.environ["MARKS"], f"{os.getpid()}").write_text(f"{time.time()} {step}")


class Fault(Hook):
    def on_step_end(self, trainer):
        if trainer.step != 3 or not ON_ONE:
            return
        here = {
            "kill one": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "kill all": lambda: time.sleep(60),  # whoever started this kills meanwhile
            "term one": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "usr1 one": lambda: os.kill(os.getpid(), signal.SIGUSR1),
            "hook": self.fail,
            "worker": lambda: [os.kill(p.pid, signal.SIGKILL) for p in multiprocessing.active_children()],
            "deleted": lambda: [p.unlink() for p in Path(trainer.exp.data_dir, "images").iterdir()],
            "gradient": lambda: self.poison(trainer),
        }
        if FAULT in here:
            mark(trainer.step)
            here[FAULT]()

    def fail(self):
        raise ValueError("boom in a hook")

    def poison(self, trainer):
        once = []
        weight = trainer.model.head.pred_cls[0].weight
        weight.register_hook(lambda g: g if once else (once.append(1), g * float("inf"))[1])


class Broken:
    def __init__(self, pipeline):
        self.pipeline = pipeline

    def __call__(self, source, key, rng):
        if key.epoch == 1 and ON_ONE:
            mark(2)
            raise ValueError("boom in the data set")
        return self.pipeline(source, key, rng)


class Judge:
    def __init__(self, evaluator):
        self.evaluator = evaluator

    def evaluate(self, model):
        if ON_ONE:
            mark(2)
            raise ValueError("boom in the evaluator")
        return self.evaluator.evaluate(model)


class Mine(PPYOLOEExp):
    depth, width = 0.33, 0.25
    input_size = test_size = 64
    multiscale = (1.0, 1.0)
    batch_size = recipe_batch_size = 4
    max_epoch = eval_interval = 3
    warmup_epochs = 0
    static_assigner_epoch = 1
    print_interval = save_interval_steps = 1
    warmup_pass = "off"

    def get_hooks(self):
        return [Fault()]

    def train_pipeline(self):
        made = super().train_pipeline()
        return Broken(made) if FAULT == "data set" else made

    def get_evaluator(self, split="val", **options):
        made = super().get_evaluator(split, **options)
        return Judge(made) if FAULT == "evaluator" else made

    def get_prefetcher(self, batches, device):
        for batch in super().get_prefetcher(batches, device):
            if FAULT == "nan image":
                images = batch.images.float() / 255
                images[[i == 5 for i in batch.image_ids]] = float("nan")
                batch = replace(batch, images=images)
                if batch.step == 0:
                    mark(0)
            yield batch
"""


@dataclass
class Job:
    """How a command ended."""

    code: int
    output: str
    seconds: float  # since the fault
    step: int  # in which it happened
    folder: Path

    def saved(self) -> dict:
        return read_checkpoint(self.folder / "out" / "mine" / "a" / "last.pth")

    def record(self, fault: str, happens: str, lost: str = "") -> None:
        lost = lost or f"{max(self.step - self.saved()['step'], 0)} steps"
        record(Row(fault, happens, self.code, self.seconds, lost))


@pytest.fixture
def run(tmp_path):
    """``run("kill one", *words) -> Job``: two ranks, one loading process each. Whatever is left of a job is killed in the end."""
    make_toy(tmp_path / "data", 8, 1)
    (tmp_path / "mine.py").write_text(EXP_FILE)
    groups = []

    def start(fault, *words, prefix=(), limit=240.0):
        marks = tmp_path / f"marks{len(groups)}"
        marks.mkdir()
        command = [*prefix, sys.executable, str(ROOT / "tools/train.py"), "-f", "mine.py", "--data", "data", "--output", "out"]
        command += ["-expn", "a", "-d", "2", "--device", "cpu", "--workers", "1", *words]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
        env |= {"OMP_NUM_THREADS": "1", "FAULT": fault, "MARKS": str(marks)}
        with (tmp_path / f"output{len(groups)}.txt").open("w+") as file:
            options = {"cwd": tmp_path, "stdout": file, "stderr": file, "start_new_session": True}
            job = subprocess.Popen(command, env=env, **options)
            groups.append(job.pid)
            begun = time.time()
            if fault == "kill all":
                kill_all_when_marked(job, marks, limit)
            code = job.wait(limit)
            ended = time.time()
            file.seek(0)
            output = file.read()
        happened = sorted(p.read_text().split() for p in marks.iterdir())
        moment, step = (float(happened[0][0]), int(happened[0][1])) if happened else (begun, 0)
        return Job(code, output, ended - moment, step, tmp_path)

    yield start
    for group in groups:
        for pid in tree(group):
            end(pid)


def tree(pid: int) -> list[int]:
    """A process and all that it started, as far as they are there."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(deeper for child in children for deeper in tree(int(child)))]


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all_when_marked(job, marks: Path, limit: float) -> None:
    deadline = time.time() + limit
    while time.time() < deadline and job.poll() is None and not any(marks.iterdir()):
        time.sleep(0.05)
    for pid in tree(job.pid):
        end(pid)


def assert_finite(state) -> None:
    assert all(t.isfinite().all() for t in state["model"].values() if isinstance(t, torch.Tensor))


def finish(run) -> None:
    """The same command again goes on and ends well."""
    job = run("", "--resume", "auto")
    assert job.code == 0 and "resumed from" in job.output, job.output[-4000:]
    assert job.saved()["step"] == STEPS


@pytest.mark.parametrize(
    ("fault", "number", "name"),
    [
        ("term one", signal.SIGTERM, "SIGTERM to one rank"),
        pytest.param("usr1 one", signal.SIGUSR1, "SIGUSR1 to one rank", marks=pytest.mark.slow),
    ],
)
def test_one_rank_is_asked_to_stop(run, fault, number, name):
    job = run(fault)
    assert job.code == 128 + number, job.output[-4000:]
    assert job.saved()["step"] in (3, 4)  # the step in which it came, or the next, whose flags the ranks compare
    job.record(name, "the step is finished, saved, all ranks end", "nothing")
    finish(run)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "name"), [("kill one", "SIGKILL of one rank"), ("kill all", "SIGKILL of all")])
def test_killed(run, fault, name):
    job = run(fault)
    assert job.code in (137, -9), job.output[-4000:]
    assert job.step - job.saved()["step"] <= 1
    job.record(name, "all processes are gone; --resume auto goes on")
    finish(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words", "message"),
    [
        ("data set", (), "boom in the data set"),
        ("worker", (), "worker"),
        ("hook", (), "boom in a hook"),
        ("evaluator", ("eval_interval=1",), "boom in the evaluator"),
    ],
)
def test_an_exception_on_one_rank_ends_all(run, fault, words, message):
    job = run(fault, *words)
    assert job.code not in (0, 137, -9) and job.seconds < 30, job.output[-4000:]
    last = job.output[-6000:]
    assert message in last and "training done" not in last
    assert job.output.count("Traceback (most recent call last)") <= 2, job.output[-6000:]  # a worker's, and where it was met
    name = "a loading process is killed" if fault == "worker" else f"{fault}: exception on one rank"
    job.record(name, "all ranks end, said once")


@pytest.mark.slow
def test_an_image_of_nan(run):
    job = run("nan image")
    assert job.code == 3, job.output[-4000:]  # half of its steps are no training
    assert "3 of its 6 steps were non-finite" in job.output
    assert "was left out" in job.output and "t_0005.png" in job.output and "predicted" in job.output
    assert job.saved()["step"] == STEPS
    assert_finite(job.saved())
    job.record("an image of NaN", "its steps are left out on all ranks, said", "3 steps' updates")


@pytest.mark.slow
def test_an_infinite_gradient_on_one_rank(run):
    job = run("gradient")
    assert job.code == 0, job.output[-4000:]
    assert job.output.count("was left out") == 1 and "head.pred_cls.0.weight" in job.output
    assert job.saved()["ema"]["updates"] == STEPS - 1
    assert_finite(job.saved())
    job.record("infinite gradient on one rank", "the step is left out on all ranks, said", "1 step's update")


@pytest.mark.slow
def test_a_learning_rate_of_a_million_times(run):
    job = run("", f"basic_lr_per_img={0.01 / 64 * 1e6}", "max_epoch=20", "eval_interval=20", "static_assigner_epoch=5")
    assert job.code == 3, job.output[-4000:]
    assert "basic_lr_per_img" in job.output[-6000:]
    for path in (job.folder / "out").rglob("*.pth"):
        assert_finite(read_checkpoint(path))
    job.record("learning rate x 1e6", "brings earlier states back, then ends with a report", "nothing that was good")


@pytest.mark.slow
def test_images_deleted_during_training(run):
    job = run("deleted")
    assert job.code == 2 and job.seconds < 30, job.output[-4000:]
    assert "t_000" in job.output[-3000:]
    job.record("images deleted during training", "the file is named, all ranks end")


def shared_memory_can_be_limited() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    return subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not shared_memory_can_be_limited(), reason="a small /dev/shm needs root and mount namespaces (unshare -m)")
def test_too_little_shared_memory(run):
    small = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$0" "$@"')
    job = run("", "input_size=320", "test_size=320", prefix=small)
    assert job.code == 2, job.output[-4000:]
    assert "no shared memory is left" in job.output and "--workers 0" in job.output, job.output[-4000:]
    record(Row("/dev/shm too small", "ends, says so", job.code, job.seconds, "nothing (first step)"))
