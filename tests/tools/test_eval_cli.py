"""``tools/eval.py`` as a user meets it: which weights, which numbers, which files, which errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import make_toy, write_coco

from mmdet.core.cli import run_command
from mmdet.core.run import versions
from mmdet.exp import exp_state, get_exp
from tools import eval as eval_tool

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "eval.py"

# A detector that finds what is not grey; its one parameter moves the boxes, so that weights can be told apart by their AP.
EXP_FILE = """
import torch
from torch import nn
from mmdet.data.structures import Detections
from mmdet.data.transforms import ResizeTransform
from mmdet.exp.detection import DetectionExp


class ColourFinder(nn.Module):
    def __init__(self, shift, threshold):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))
        self.threshold = threshold

    def forward(self, batch):
        return [self.find(image) for image in batch.images]

    def find(self, image):
        rows, columns = torch.nonzero((image.float() - 127).abs().amax(0) > 40, as_tuple=True)
        box = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float() + self.shift
        label = image[:, rows[0], columns[0]].argmax()
        found = torch.tensor([0.9, 0.2])
        boxes = torch.stack([box, box + 60])
        keep = found >= self.threshold
        return Detections(boxes[keep], found[keep], label.repeat(2)[keep])


class Exp(DetectionExp):
    size_divisor = 8
    test_size = (120, 160)
    input_size = (120, 160)
    fresh_shift: float = 4.0  # px

    def get_model(self):
        return ColourFinder(self.fresh_shift, self.score_threshold)

    def eval_transform(self):
        return ResizeTransform(self.test_size)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with an exp file, TOY(6, 3) and two checkpoints: raw weights 10 px off, EMA weights exact."""
    monkeypatch.chdir(tmp_path)
    Path("colours.py").write_text(EXP_FILE, encoding="utf-8")
    make_toy("data", 6, 3, category_ids=[7, 13, 42], names=["red", "grün", "蓝"])
    exp = get_exp("colours.py", ["data_dir=data", "num_classes=3", "class_names=('red','grün','蓝')"])
    about = {"exp": exp_state(exp), "overrides": [], "class_names": list(exp.class_names), "versions": versions(), "step": 12}
    raw, ema = {"shift": torch.tensor(10.0)}, {"shift": torch.tensor(0.0)}
    torch.save({"model": raw, "ema": {"model": ema, "updates": 3}, **about}, "best.pth")
    torch.save({"model": ema, "weights": "ema", **about}, "weights.pth")
    torch.save({"model": ema}, "published.pth")
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs the command line in this process: exit code, standard output, last line of standard error."""

    def call(*words):
        code = run_command(eval_tool.run, [*map(str, words), "--device", "cpu", "--workers", "0"])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def ap_of(out: str) -> str:
    return next(line.split()[1] for line in out.splitlines() if line.startswith("AP "))


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_checkpoint_knows_its_exp_and_its_average_is_taken(work, run, batch_size):
    code, out, _ = run("-c", "best.pth", "-b", batch_size)
    assert code == 0
    assert "judging the EMA weights of step 12 of best.pth in float32 on cpu" in out
    assert ap_of(out) == "1.0000"
    assert all(name in out for name in ("red", "grün", "蓝"))


def test_raw_weights(work, run):
    code, out, _ = run("-c", "best.pth", "--raw")
    assert code == 0 and "judging the raw weights of step 12" in out
    assert float(ap_of(out)) < 0.2
    code, _, err = run("-c", "weights.pth", "--raw")
    assert code == 2 and "weights.pth holds EMA weights only" in err
    code, out, _ = run("-c", "weights.pth")
    assert code == 0 and "the EMA weights of step 12" in out and ap_of(out) == "1.0000"


def test_a_published_file_needs_the_exp(work, run):
    code, _, err = run("-c", "published.pth")
    assert code == 2 and "-f" in err
    names = ("num_classes=3", "class_names=('red','grün','蓝')")
    code, out, _ = run("-c", "published.pth", "-f", "colours.py", "--data", "data", *names)
    assert code == 0 and "judging the raw weights of published.pth" in out and ap_of(out) == "1.0000"


def test_without_a_checkpoint_fresh_weights_are_judged_with_a_warning(work, run):
    code, out, err = run("-f", "colours.py", "--data", "data", "fresh_shift=0")
    assert code == 0 and "WARNING" in err and "freshly initialised weights" in err
    assert "judging the freshly initialised weights in float32" in out and ap_of(out) == "1.0000"


def test_files_hold_what_was_printed(work, run):
    code, out, _ = run("-c", "best.pth", "--json", "m.json", "--save-detections", "d.json")
    assert code == 0
    saved = json.loads(Path("m.json").read_text(encoding="utf-8"))
    assert saved["metrics"]["AP"] == pytest.approx(float(ap_of(out)), abs=1e-4)
    assert saved["metrics"]["APl"] is None and "APl     undefined" in out
    assert saved["per_class"]["蓝"]["AP"] == pytest.approx(1.0) and saved["per_class"]["蓝"]["objects"] == 2
    assert saved["about"]["weights"] == "EMA" and saved["about"]["images"] == 6
    detections = json.loads(Path("d.json").read_text())
    assert {d["category_id"] for d in detections} == {7, 13, 42} and len(detections) == 12
    code, out, _ = run("--detections", "d.json", "--data", "data", "--json", "again.json")
    assert code == 0 and "judging 12 detections of d.json" in out
    again = json.loads(Path("again.json").read_text(encoding="utf-8"))
    assert again["metrics"] == saved["metrics"] and again["per_class"] == saved["per_class"]


def test_other_splits_and_thresholds(work, run):
    coco = json.loads(Path("data/annotations/instances_val.json").read_text(encoding="utf-8"))
    coco["annotations"] = coco["annotations"][:2]
    coco["images"] = coco["images"][:2]
    write_coco("data", coco, "holdout")
    code, out, _ = run("-c", "best.pth", "--split", "holdout", "--conf", 0.5, "--save-detections", "d.json")
    assert code == 0 and "2 images" in out and len(json.loads(Path("d.json").read_text())) == 2
    code, out, _ = run("-c", "best.pth", "--max-dets", 300)
    assert code == 0 and "AR300" in out and ap_of(out) == "1.0000"
    code, _, err = run("-c", "best.pth", "--split", "nowhere")
    assert code == 2 and "nowhere" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--raw"], "--raw chooses between the weights of a checkpoint"),
        ([], "no exp given"),
        (["-b", "0", "-c", "best.pth"], "-b 0: expected at least 1"),
        (["-b", "x"], "invalid int value: 'x'"),
        (["-c", "best.pth", "--max-dets", "0"], "--max-dets 0: expected at least 1"),
        (["-c", "absent.pth"], "checkpoint 'absent.pth' does not exist"),
        (["-c", "best.pth", "--json", "absent/m.json"], "the folder 'absent' does not exist"),
        (["-c", "best.pth", "--json", "data"], "this is a folder"),
        (["-c", "best.pth", "--amp", "half"], "invalid choice: 'half'"),
        (["-c", "best.pth", "max_epochs=10"], "max_epoch"),
        (["-c", "best.pth", "--conf", "3"], "score_threshold=3.0"),
        (["--detections", "d.json"], "--data DIR"),
        (["--detections", "d.json", "--data", "data", "-c", "best.pth", "--nms", "0.5"], "leave out -c, --nms"),
        (["--detections", "absent.json", "--data", "data"], "absent.json: cannot be read"),
        (["--detections", "colours.py", "--data", "data"], "colours.py: not a JSON file"),
    ],
)
def test_usage_errors_are_one_line_and_write_nothing(work, run, words, message):
    before = sorted(work.rglob("*"))
    code, out, err = run(*words)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and len(err.strip().splitlines()) == 1 and message in err
    assert [p for p in sorted(work.rglob("*")) if "__pycache__" not in p.parts] == before


def test_detections_of_unknown_images_are_refused(work, run):
    entry = {"image_id": 99, "category_id": 7, "bbox": [1, 2, 3, 4], "score": 0.5}
    Path("d.json").write_text(json.dumps([entry]))
    code, _, err = run("--detections", "d.json", "--data", "data")
    assert code == 2 and "image ids 99)" in err.splitlines()[-1]
    Path("d.json").write_text("[]")
    code, out, _ = run("--detections", "d.json", "--data", "data")
    assert code == 0 and ap_of(out) == "0.0000"


def test_a_file_of_another_model_is_refused(work, run):
    torch.save({"model": {"other.weight": torch.zeros(3)}}, "other.pth")
    code, _, err = run("-c", "other.pth", "-f", "colours.py", "--data", "data")
    assert code == 2 and "matched 0 of 1" in err


def test_the_script_runs_from_any_folder(work):
    elsewhere = work / "else where"
    elsewhere.mkdir()
    command = [sys.executable, str(SCRIPT), "-c", "../best.pth", "-f", "../colours.py", "--data", "../data", "--workers", "1"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    assert ap_of(done.stdout) == "1.0000"
