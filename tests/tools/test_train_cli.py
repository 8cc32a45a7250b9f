"""``tools/train.py`` as a user meets it: what it refuses and how it says so, what a failure leaves, what the flags mean."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import BY_HEART, DEVICE, NAME, SIZES, RunFolder, evaluate, train
from toy import make_toy, write_coco, write_image

from mmdet.core.cli import run_command
from tools import train as train_tool

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "train.py"

# Raises in the sample at position 3 of an epoch, or in the evaluator.
BOOM = """
from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Fails:
    def __init__(self, pipeline):
        self.pipeline = pipeline

    def __call__(self, source, key, rng):
        if key.position == 3:
            raise ValueError("boom")
        return self.pipeline(source, key, rng)


class Exp(PPYOLOEExp):
    fails: str = "sample"

    def train_pipeline(self):
        pipeline = super().train_pipeline()
        return Fails(pipeline) if self.fails == "sample" else pipeline

    def get_evaluator(self, **options):
        def evaluate(model):
            raise ValueError("boom")

        evaluator = super().get_evaluator(**options)
        if self.fails == "evaluator":
            evaluator.evaluate = evaluate
        return evaluator
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder):
    return [p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts]


# -- U02: usage errors ----------------------------------------------------------------------------------------------------------

NAMED = ["-n", NAME]
ON_TOY = [*NAMED, "--data", "toy"]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "no exp given: use -f exps/NAME.py (a file) or -n NAME"),
        (["-f", "nowhere.py"], "exp file 'nowhere.py' does not exist"),
        (["-f", "exps/ppyoloe_t.py"], "exp file 'exps/ppyoloe_t.py' does not exist"),
        (["-f", "weights.pth"], "exp file 'weights.pth': expected a Python file"),
        (["-f", "typo.py"], "typo.py, class Mine: 'max_epochs' is no known field. Did you mean 'max_epoch'?"),
        (["-f", "none.py"], "none.py: expected one class derived from mmdet.exp.Exp"),
        (["-n", "ppyoloe_t"], "no shipped exp is called 'ppyoloe_t'. Did you mean 'ppyoloe_"),
        ([*NAMED, "-f", "typo.py"], "-f and -n both name an exp"),
        ([*ON_TOY, "--epochs", "3"], "unrecognized arguments: --epochs"),
        ([*ON_TOY, "max_epochs", "10"], "unknown field 'max_epochs' of Exp. Did you mean 'max_epoch'?"),
        ([*ON_TOY, "num_classes", "abc"], "num_classes=abc: expected int"),
        ([*ON_TOY, "max_epoch"], "'max_epoch': expected key=value"),
        ([*ON_TOY, "max_epoch=0"], "max_epoch=0 (set by command line): expected at least 1"),
        ([*ON_TOY, "momentum=1"], "momentum=1.0 (set by command line): expected 0 <= momentum < 1"),
        ([*ON_TOY, "best_metric=mAP"], "best_metric='mAP' (set by command line): expected one of AP, AP50"),
        ([*ON_TOY, "input_size=100"], "input_size=(100, 100) (set by command line): expected multiples of 32"),
        ([*ON_TOY, "pretrained_backbone=absent.pth"], "pretrained_backbone='absent.pth' (set by command line): no such file"),
        ([*ON_TOY, "-b", "0"], "batch_size=0 (set by command line): expected at least 1"),
        ([*ON_TOY, "-b", "many"], "argument -b/--batch-size: invalid int value: 'many'"),
        ([*ON_TOY, "-b", "4", "grad_accum=3"], "batch_size=4 (set by command line): expected a multiple of grad_accum=3"),
        ([*ON_TOY, "--workers", "-1"], "--workers -1: expected at least 0"),
        ([*ON_TOY, "--eval-batch-size", "0"], "--eval-batch-size 0: expected at least 1"),
        ([*ON_TOY, "-d", "0"], "-d 0: expected at least 1"),
        ([*ON_TOY, "--seed", "-1"], "seed=-1 (set by command line): expected 0 or more"),
        ([*ON_TOY, "--fp16", "--amp", "off"], "--fp16 and --amp off contradict each other"),
        ([*ON_TOY, "--device", "tpu"], "invalid choice: 'tpu'"),
        ([*ON_TOY, "--local_rank=first"], "--local_rank=first: expected the number of a process"),
        (NAMED, "data directory 'data/coco' (set by default) does not exist: give the folder"),
        ([*NAMED, "--data", "nowhere"], "data directory 'nowhere' (set by command line) does not exist: give the folder"),
        ([*NAMED, "--data", "typo.py"], "data directory 'typo.py' (set by command line) is a file: give the folder"),
        ([*NAMED, "--data", "empty"], "no annotations of split 'train': looked for empty/annotations/instances_train*.json"),
        ([*ON_TOY, "-c", "absent.pth"], "-c 'absent.pth' does not exist"),
        ([*ON_TOY, "--resume"], "--resume: no run with a checkpoint in 'outputs/ppyoloe_s'"),
        ([*ON_TOY, "--resume", "max_epoch=3"], "--resume: no run with a checkpoint in 'outputs/ppyoloe_s'"),
        ([*ON_TOY, "--resume", "absent.pth"], "checkpoint 'absent.pth' does not exist"),
        ([*ON_TOY, "--resume", "typo.py"], "checkpoint 'typo.py'"),
        ([*ON_TOY, "--resume", "-c", "weights.pth"], "it holds weights only. Fine-tune from it with -c weights.pth"),
        ([*ON_TOY, "--resume", "weights.pth"], "it holds weights only. Fine-tune from it with -c weights.pth"),
        ([*ON_TOY, "--resume", "weights.pth", "-c", "weights.pth"], "give one of them"),
    ],
)
def test_usage_errors_are_one_line_and_write_nothing(work, capsys, words, message):
    make_toy("toy", 2, 1)
    Path("empty").mkdir()
    torch.save({"model": {"a": torch.zeros(2)}}, "weights.pth")
    Path("none.py").write_text("side = 3\n")
    Path("typo.py").write_text(
        "from mmdet.families.ppyoloe.exp import PPYOLOEExp\n\n\nclass Mine(PPYOLOEExp):\n    max_epochs = 3\n"
    )
    before = written(work)
    code = run_command(train_tool.run, [*words, "--device", "cpu"] if "--device" not in words else words)
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1 and message in err
    assert written(work) == before


@pytest.mark.parametrize(
    "words, messages",
    [
        (["num_classes=2"], ["num_classes=2 (set by command line)", "3 categories (7: c1, 13: c2, 42: c3)"]),
        (["num_classes=80"], ["num_classes=80 (set by command line)", "3 categories (7: c1, 13: c2, 42: c3)"]),
        (["class_names=('a','b','c')"], ["class_names=('a', 'b', 'c')", "(7: c1, 13: c2, 42: c3)"]),
        (["-c", "weights.pth"], ["weights.pth: matched 0 of 1 tensors"]),
    ],
)
def test_d02_what_disagrees_with_the_data_stops_before_the_first_step(work, capsys, words, messages):
    make_toy("toy", 6, 3, category_ids=(7, 13, 42))
    torch.save({"model": {"a": torch.zeros(2)}}, "weights.pth")
    before = written(work)
    assert train("--data", "toy", *words) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(message in last for message in messages), last
    assert written(work) == before


def test_d02_the_same_from_the_users_own_exp_file(work, capsys):
    make_toy("toy", 6, 3)
    Path("mine.py").write_text(
        "from mmdet.families.ppyoloe.exp import PPYOLOEExp\n\n\nclass Mine(PPYOLOEExp):\n    num_classes = 80\n"
    )
    assert train("--data", "toy", exp=("-f", "mine.py")) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "num_classes=80 (set by mine.py)" in last and "3 categories (1: c1, 2: c2, 3: c3)" in last


def test_d01_swapped_category_names_stop_before_the_first_step(work, capsys):
    def swap(coco, split):
        if split == "val":
            coco["categories"][0]["name"], coco["categories"][1]["name"] = "c2", "c1"

    make_toy("toy", 6, 3, category_ids=(7, 13, 42), edit=swap)
    before = written(work)
    assert train("--data", "toy") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "id 7 is 'c1'" in last and "id 13 is 'c2'" in last and "instances_val.json" in last and "42" not in last
    assert written(work) == before


# -- U03: devices, launchers, precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, notice",
    [
        (["--local-rank=0"], "1 process(es)"),
        (["--local_rank=0"], "1 process(es)"),
        (["--fp16"], "amp=fp16 works on CUDA only: on cpu the forward pass is in float32"),
        (["--amp", "bf16"], "forward pass in bfloat16"),
        (["sync_bn=True", "max_epoch", "2", "ema", "False"], "2 epochs of 2 steps"),
    ],
)
def test_u03_a_single_process_on_a_cpu(work, capsys, monkeypatch, words, notice):
    """Launchers of the lineage append their flag; ``RANK`` is not set. A dry run makes no run folder."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "")  # so that it is restored whatever the command does
    monkeypatch.delenv("LOCAL_RANK")
    make_toy("toy", 4, 1)
    before = written(work)
    assert train("--data", "toy", "-b", "2", "--dry-run", *words) == 0
    err = capsys.readouterr().err
    assert "device: cpu" in err and notice in err
    last = err.strip().splitlines()[-1]
    assert "dry run: one step done, nothing written" in last and "loss_cls" in last and "nan" not in last
    assert written(work) == before


def test_u03_a_world_without_ranks_says_how_to_start_it(work, capsys, monkeypatch):
    make_toy("toy", 4, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert train("--data", "toy", "-b", "2") == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and "RANK, MASTER_ADDR, MASTER_PORT not" in err[0] and "torchrun --nproc-per-node=2" in err[0]


def test_demo_sets_data_and_schedule_and_other_flags_still_count():
    def built(*words):
        return train_tool.build_exp(train_tool.make_parser().parse_intermixed_args(["-n", NAME, *words]))

    plain, demo = built(), built("--demo")
    assert plain.data_dir == "data/coco" and demo.data_dir == "demo"
    assert demo.max_epoch < plain.max_epoch and demo.origin("max_epoch") == "--demo"
    changed = built("max_epoch", "3", "--demo", "-b", "4", "--seed", "7", "input_size=96")
    assert (changed.max_epoch, changed.batch_size, changed.seed, changed.input_size) == (3, 4, 7, (96, 96))
    assert built("--data", "demo").given() == {"data_dir": "command line"}


# -- U01: failures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fails, workers, where",
    [
        ("sample", 0, ["epoch 1/2 step 2/3", "t_000", "iteration 2"]),
        ("sample", 1, ["epoch 1/2 step 2/3", "t_000", "iteration 2"]),
        ("evaluator", 0, ["the evaluation after epoch 1/2"]),
    ],
)
def test_u01_a_failure_ends_with_the_error_and_never_with_success(work, capsys, fails, workers, where):
    Path("boom.py").write_text(BOOM)
    make_toy("toy", 6, 3)
    words = ("--data", "toy", "-b", "2", "-expn", "a", "max_epoch=2", "eval_interval=1", f"fails={fails}")
    assert train(*words, exp=("-f", "boom.py"), workers=workers) == 1
    err = capsys.readouterr().err
    last = err.strip().splitlines()[-1]
    assert all(word in last for word in ("stopped at", "ValueError: boom", *where, "train_log.txt")), last
    log = RunFolder("outputs/boom/a").log
    for text in (err, log):
        assert "training done" not in text and "best AP" not in text
    assert log.strip().splitlines()[-1] == last and "Traceback" in log and 'raise ValueError("boom")' in log
    assert log.count("stopped at") == 1 and log.count('raise ValueError("boom")') == 1


def test_u01_the_process_itself_from_another_folder(work):
    """The real thing: exit code, last line, and nothing on standard output."""
    Path("boom.py").write_text(BOOM)
    make_toy("toy", 6, 3)
    elsewhere = work / "else where"
    elsewhere.mkdir()
    command = [sys.executable, str(SCRIPT), "-f", "../boom.py", *DEVICE, *SIZES, "--workers", "1", "--data", "../toy", "-b", "2"]
    done = subprocess.run(
        command, cwd=elsewhere, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert "stopped at epoch 1/300 step 2/3" in last and "ValueError: boom" in last and "training done" not in done.stderr


def test_an_unusable_output_folder_is_named(work, capsys):
    make_toy("toy", 2, 1)
    Path("taken").write_text("a file")
    assert train("--data", "toy", "-b", "2", "--output", "taken") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "run folder taken" in last and "name another with --output" in last and "train_log.txt" not in last


def test_an_error_inside_an_exp_file_keeps_its_traceback(work, capsys):
    Path("broken.py").write_text("values = {}\nside = values['side']\n")
    assert train(exp=("-f", "broken.py")) == 1
    err = capsys.readouterr().err
    assert "side = values['side']" in err and err.strip().splitlines()[-1] == "error: KeyError: 'side'"


# -- odd data -------------------------------------------------------------------------------------------------------------------


def test_d04_images_without_boxes_are_trained_on_and_judged(work, capsys):
    def without(coco, split):
        coco["annotations"] = [a for a in coco["annotations"] if a["image_id"] not in (2, 4, 6)]

    make_toy("toy", 6, 1, edit=without)
    assert train("--data", "toy", "-b", "2", "-expn", "a", "max_epoch=2", "eval_interval=2") == 0
    run = RunFolder("outputs/ppyoloe_s/a")
    assert run.log.count("6 images, 3 boxes of 1 classes, 3 images without boxes") == 2
    assert len(run.steps) == 6 and all(step["loss"] > 0 for step in run.steps)  # a number that is none would be null
    assert "detections in 6 images" in run.log and run.evaluations[0]["metrics"]["AP"] is not None


def test_d05_degenerate_boxes_are_listed_and_the_rest_is_trained_on(work):
    make_toy("toy", 1, 1)
    boxes = [[10, 10, 20, 20], [50, 20, 0, 30], [60, 60, -10, 20], [190, 90, 30, 30], [300, 10, 20, 20]]
    coco = {
        "images": [{"id": 1, "file_name": "w.png", "width": 200, "height": 100}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [{"id": 11 + i, "image_id": 1, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)],
    }
    write_image("toy/images/w.png", np.full((100, 200, 3), 127, np.uint8))
    for split in ("train", "val"):
        write_coco("toy", coco, split)
    assert train("--data", "toy", "-b", "1", "-expn", "a", "max_epoch=2", "eval_interval=2", *BY_HEART) == 0
    run = RunFolder("outputs/ppyoloe_s/a")
    assert "1 images, 2 boxes" in run.log and "3 dropped, 1 clipped" in run.log
    assert "annotation ids dropped: 12, 13, 15; clipped: 14" in run.log
    assert all(step["loss"] > 0 and step["num_pos"] >= 2 for step in run.steps)


@pytest.mark.parametrize("ids", [(1, 2, 3), ("a", "b", "c")])
def test_d10_bare_annotations_and_string_ids_train_and_are_judged(work, ids, capsys):
    def reduce(coco, split):
        name = dict(zip((1, 2, 3), ids))
        coco.pop("info"), coco.pop("licenses")
        coco["images"] = [{**image, "id": name[image["id"]]} for image in coco["images"]]
        keys = ("id", "category_id", "bbox")
        coco["annotations"] = [{k: a[k] for k in keys} | {"image_id": name[a["image_id"]]} for a in coco["annotations"]]
        coco["categories"] = [{"id": c["id"], "name": c["name"]} for c in coco["categories"]]

    make_toy("toy", 3, 1, edit=reduce)
    assert train("--data", "toy", "-b", "2", "-expn", "a", "max_epoch=1") == 0
    run = RunFolder("outputs/ppyoloe_s/a")
    assert run.evaluations[0]["metrics"]["AP"] is not None
    capsys.readouterr()
    assert evaluate("-c", run / "last.pth", "--conf", "0", "--save-detections", "found.json", "--json", "metrics.json") == 0
    assert {d["image_id"] for d in json.loads(Path("found.json").read_text())} == set(ids)
    metrics = json.loads(Path("metrics.json").read_text())["metrics"]
    assert metrics["AP"] is not None and metrics["APm"] is not None and metrics["APs"] is None
    assert "judging the EMA weights of step 2" in capsys.readouterr().out
