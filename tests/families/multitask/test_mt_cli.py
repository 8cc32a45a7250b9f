"""MT-26, alerts, and the command lines: train, resume and judge several tasks."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mt_runs import Unjudged, losses_of, state_of, train
from mt_toy import largest_difference, make_data, toy_exp
from shared import SHARED, needs_shared

from mmdet.families.multitask.demo import COLOURS, make_task_demo
from mmdet.families.multitask.hooks import Alert

ROOT = Path(__file__).resolve().parents[3]
EXP = """
import sys
sys.path[:0] = {path!r}
from mt_toy import ToyExp


class Exp(ToyExp):
    max_iter = 30
    eval_interval = 30
    basic_lr_per_img = 1e-4 / 8
    score_threshold = 0.0
    ema = False
    data_dir = {data!r}
"""


def tool(name, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{name}.py"), "--device", "cpu", "--workers", "0", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same 30 iterations by one process and by two, from the command line, on weights that know something already."""
    root = tmp_path_factory.mktemp("cli")
    data = make_data(root / "data")
    file = root / "three.py"
    file.write_text(EXP.format(path=[str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)], data=str(data)))
    quick = {"max_iter": 40, "eval_interval": 40, "optimizer": "adamw", "basic_lr_per_img": 2e-2 / 8, "ema_decay": 0.5}
    known = train(data, root / "known", **quick)[0].run_dir / "last.pth"
    logs = {}
    for devices in (1, 2):
        words = "-d", devices, "-c", known, "-expn", f"on{devices}", "--output", root / "out"
        logs[devices] = tool("train", "-f", file, *words)
    return SimpleNamespace(root=root, out=root / "out" / "three", logs=logs)


def test_two_processes_end_to_end(runs):
    found = {}
    for devices in (1, 2):
        file = runs.root / f"{devices}.json"
        text = tool("eval", "-c", runs.out / f"on{devices}" / "best.pth", "--json", file)
        found[devices] = json.loads(file.read_text())["metrics"]
        assert "detA/AP" in text and "AP_mean" in text and "training done" in runs.logs[devices]
    assert found[1].keys() == found[2].keys()
    for name, value in found[1].items():
        limit = 1e-9 + (0.5 if "top1" in name else 0.005)
        assert (value is None and found[2][name] is None) or abs(value - found[2][name]) <= limit, (name, value, found[2][name])
    assert found[1]["AP_mean"] > 0.05 and found[1]["cls/top1"] > 0
    assert "2 process(es)" in runs.logs[2] and re.search(r"detB +2 +4 +0 1 +0", runs.logs[2])


def test_one_task_can_be_judged_alone(runs):
    file, all_tasks = runs.root / "a.json", runs.root / "1.json"
    tool("eval", "-c", runs.out / "on1" / "last.pth", "--task", "detA", "--json", file, "--save-detections", runs.root / "d.json")
    alone, together = (json.loads(f.read_text())["metrics"] for f in (file, all_tasks))
    assert alone["AP"] == together["detA/AP"] and "AP_mean" not in alone and json.loads((runs.root / "d.json").read_text())
    tool("eval", "-c", runs.out / "on1" / "last.pth", "--task", "cls", "--json", file)
    assert json.loads(file.read_text())["metrics"] == {"top1": together["cls/top1"]}


def test_warm_up_leaves_no_trace(tmp_path):
    """MT-21."""
    data = make_data(tmp_path / "data")
    fields = {"max_iter": 5, "eval_interval": 5}
    with_it, _, _ = train(data, tmp_path / "on", Unjudged, warmup_pass="on", **fields)
    without, _, _ = train(data, tmp_path / "off", Unjudged, warmup_pass="off", **fields)
    assert "warm-up pass: " in (with_it.run_dir / "train_log.txt").read_text()
    assert largest_difference(state_of(with_it), state_of(without)) == 0 and losses_of(with_it) == losses_of(without)
    for a, b in zip(
        with_it.optimizer.state_dict()["state"].values(), without.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])


# -- alerts ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    """A web server that keeps what it is sent, and answers with a command that nobody must run."""
    news = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            news.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"exec: touch alerted")

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", news
    server.shutdown()


def test_alerts_tell_of_a_run(tmp_path, receiver):
    url, news = receiver
    data = make_data(tmp_path / "data")
    trainer, _, _ = train(data, tmp_path / "out", type(toy_exp()), alert_url=url, max_iter=4, eval_interval=2)
    deadline = time.monotonic() + 5
    while "finish" not in [n["event"] for n in news] and time.monotonic() < deadline:
        time.sleep(0.02)
    events = [n["event"] for n in news]
    assert sorted(events) == sorted(["start", "new best", "finish"]) or events.count("new best") == 2
    assert all(n["exp"] == "toy" and n["run"] == str(trainer.run_dir) for n in news) and not Path("alerted").exists()


def fake_trainer(tmp_path, rank=0):
    guard = SimpleNamespace(skipped=0, restores=0)
    exp = SimpleNamespace(exp_name="x")
    return SimpleNamespace(rank=rank, exp=exp, run_dir=tmp_path, step=3, guard=guard, best={"metric": "AP", "value": None})


def test_an_alert_never_raises_and_goes_to_a_program_without_a_shell(tmp_path, receiver):
    target = tmp_path / "news.json"
    code = f"import sys; open({str(target)!r}, 'a').write(sys.stdin.read() + chr(10))"
    hook, trainer = Alert(command=(sys.executable, "-c", code)), fake_trainer(tmp_path)
    hook.on_train_start(trainer)
    trainer.guard.skipped = 1
    hook.tell(trainer, "nan; touch alerted", skipped=1).join(10)
    end = time.monotonic() + 30  # the first one's program runs beside this one's
    while len(lines := target.read_text().splitlines()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert {json.loads(line)["event"] for line in lines} == {"start", "nan; touch alerted"} and not Path("alerted").exists()
    broken = Alert(url="http://127.0.0.1:9/", command=("/no/such/program",))
    broken.tell(trainer, "start").join(5)
    assert Alert(url="http://127.0.0.1:9/").tell(fake_trainer(tmp_path, rank=1), "start") is None
    assert Alert().tell(trainer, "start") is None
    url, news = receiver
    left = Alert(url=url)
    left.on_train_start(trainer)
    trainer.guard.restores = 1
    left.on_step_end(trainer)
    left._at_exit()
    time.sleep(0.3)
    assert {"start", "rollback", "crash"} == {n["event"] for n in news}
    hook._trainer = left._trainer = None


# -- data -----------------------------------------------------------------------------------------------------------------------


def test_demo_data_is_made_once_and_the_same(tmp_path):
    folder = make_task_demo(tmp_path / "demo", 6, 3)
    stamp = (folder / "tasks.json").stat().st_mtime_ns
    assert make_task_demo(folder, 6, 3) == folder and (folder / "tasks.json").stat().st_mtime_ns == stamp
    other = make_task_demo(tmp_path / "again", 6, 3)
    read = lambda f: {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*.json") if p.name != "demo.json"}  # noqa: E731
    assert read(folder) == read(other) and sorted(p.name for p in (folder / "colours/train").iterdir()) == list(COLOURS)
    content = json.loads((folder / "shapesA/annotations/instances_train.json").read_text())
    assert [c["name"] for c in content["categories"]] == ["red disc", "blue disc", "red square"]
    (folder / "colours/train/red").rename(folder / "gone")  # a damaged set is made anew
    assert (make_task_demo(folder, 6, 3) / "colours/train/red").is_dir()


@needs_shared
def test_real_data_loads(tmp_path):
    """exps/multitask_bccd_coco.py on photographs: two iterations, at a small size."""

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bccd").symlink_to(SHARED / "data" / "bccd")
    coco = tmp_path / "data" / "coco"
    (coco / "annotations").mkdir(parents=True)
    (source,) = (SHARED / "data" / "coco_val100" / "annotations").glob("instances_val*.json")
    for split in ("train", "val"):
        (coco / "annotations" / f"instances_{split}.json").symlink_to(source)
    (folder,) = [p for p in (SHARED / "data" / "coco_val100").iterdir() if p.is_dir() and p.name != "annotations"]
    (coco / "images").symlink_to(folder)
    words = [
        "max_iter=2",
        "eval_interval=2",
        "warmup_iters=0",
        "save_interval=0",
        "input_size=128",
        "test_size=128",
        "print_interval=1",
    ]
    log = tool(
        "train",
        "-n",
        "multitask_bccd_coco",
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "out",
        "multiscale=(1,1)",
        *words,
    )
    assert "task bccd: loss" in log and "task coco: loss" in log and "training done" in log
