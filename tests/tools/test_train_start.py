"""Fine-tuning and resuming as a user meets them, on TOY data with the smallest model (cases C01, C02, C06, U02)."""

import pickle
from pathlib import Path

import pytest
import torch
from loguru import logger
from toy import make_toy

from mmdet.core.cli import run_command
from mmdet.core.files import read_checkpoint
from mmdet.exp import get_exp
from tools import eval as eval_tool
from tools import train as train_tool

EXP_FILE = """
from mmdet.families.ppyoloe.exp import PPYOLOEExp


class Exp(PPYOLOEExp):
    depth = 0.33
    width = 0.25
    input_size = (160, 160)
    test_size = (160, 160)
    multiscale = (1.0, 1.0)
    max_epoch = 1
    warmup_epochs = 0.0
    batch_size = 2
    recipe_batch_size = 2
    basic_lr_per_img = 1e-4
    ema = False
"""
PRIOR_BIAS = -4.59512  # -log(99): every class starts at a score of 0.01


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with an exp file, TOY(6, 3) and an 80-class checkpoint ``old.pth``."""
    monkeypatch.chdir(tmp_path)
    Path("toy_exp.py").write_text(EXP_FILE)
    make_toy("data", 6, 3)
    torch.manual_seed(1)
    model = get_exp("toy_exp.py", ["num_classes=80"]).get_model()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 1.0)
    torch.save({"model": model.state_dict()}, "old.pth")
    return tmp_path


@pytest.fixture
def train(capfd):
    """``train("-c", "old.pth") -> (exit code, everything that was printed)``"""

    def call(*words, tool=train_tool):
        common = ["--data", "data", "--device", "cpu", "--workers", "0"]
        command = [*words, *common] if tool is eval_tool else ["-f", "toy_exp.py", *words, *common, "--output", "out"]
        code = run_command(tool.run, command)
        logger.complete()
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return call


def test_80_classes_to_3(work, train):
    """C01."""
    code, text = train("-c", "old.pth", "-expn", "a")
    assert code == 0, text
    assert "6 re-initialised" in text and "0 missing" in text and "0 of the file unused" in text
    assert "file (80,), model (3,)" in text and "taken for those of the published files" in text
    saved = read_checkpoint("out/toy_exp/a/last.pth")
    assert saved["class_names"] == ["c1", "c2", "c3"]
    code, text = train("-c", "out/toy_exp/a/best.pth", tool=eval_tool)
    assert code == 0 and "judging the raw weights of step 3" in text, text


def test_all_other_tensors_are_the_files(work):
    exp = get_exp("toy_exp.py", ["num_classes=3", "class_names=('c1','c2','c3')"])
    model = exp.get_model()
    report = exp.load_pretrained(model, "old.pth")
    own, file = model.state_dict(), torch.load("old.pth")["model"]
    fresh = {n for n in own if n.startswith("head.pred_cls.")}
    assert set(report.reinitialized) == fresh and len(fresh) == 6
    assert all(torch.equal(own[n], file[n]) for n in set(own) - fresh)
    for name in fresh:
        torch.testing.assert_close(own[name], torch.full_like(own[name], PRIOR_BIAS if name.endswith("bias") else 0.0))


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ({}, [], "matched 0 of 0"),
        ({"layer.weight": torch.zeros(3)}, [], "matched 0 of 1"),
        ({"model": [1]}, [], "entry 'model' is a list"),
        (None, ["--load-map", "x"], "expected PATTERN=REPLACEMENT"),
        (None, ["--ignore", "hxad"], "matches no tensor"),
        (None, ["--resume", "old.pth"], "give one of them"),
    ],
)
def test_files_and_words_that_make_no_sense_write_nothing(work, train, content, words, message):
    """C02 and U02: one line, exit code 2, nothing in the output folder."""
    if content is not None:
        torch.save(content, "odd.pth")
    code, text = train("-c", "old.pth" if content is None else "odd.pth", *words)
    assert code == 2 and message in text and "Traceback" not in text
    assert not Path("out").exists()


def test_weights_only_files_are_not_resumed(work, train):
    code, text = train("--resume", "-c", "old.pth")
    assert code == 2 and "it holds weights only. Fine-tune from it with -c old.pth" in text and not Path("out").exists()


def test_trust_is_asked_for(work, train):
    Path("odd.pdparams").write_bytes(pickle.dumps({"a": Path("x")}))
    code, text = train("-c", "odd.pdparams")
    assert code == 2 and "--trust-checkpoint" in text and "Traceback" not in text


def test_map_and_ignore(work, train):
    state = torch.load("old.pth")["model"]
    torch.save({"state_dict": {n.replace("backbone.", "trunk."): v for n, v in state.items()}}, "odd.pth")
    code, text = train("-c", "odd.pth", "--load-map", "^trunk=backbone", "--ignore", "pred_", "--dry-run")
    assert code == 0 and "12 ignored as asked" in text and "0 re-initialised, 0 missing in the file, 0 of the file unused" in text


def test_a_pretrained_backbone(work, train):
    state = torch.load("old.pth")["model"]
    torch.save({n.removeprefix("backbone."): v for n, v in state.items() if n.startswith("backbone.")}, "backbone.pth")
    code, text = train("pretrained_backbone=backbone.pth", "--dry-run")
    assert code == 0 and "pretrained backbone from backbone.pth" in text and "0 re-initialised, 0 missing" in text
    code, text = train("pretrained_backbone=backbone.pth", "-c", "old.pth", "--dry-run")
    assert code == 0 and "pretrained_backbone=backbone.pth is not read: -c old.pth replaces it" in text
    code, text = train("pretrained_backbone=old.png", "--dry-run")
    assert code == 2 and "old.png" in text


def test_a_cut_checkpoint(work, train):
    """C06: the one before it, or none; what the run was started with need not be said again."""
    code, text = train("-expn", "a", "max_epoch=3", "eval_interval=3", "seed=4")
    assert code == 0, text
    run_dir = Path("out/toy_exp/a")
    data = (run_dir / "last.pth").read_bytes()
    for name in ("last.pth", "best.pth"):  # the same file here, by two names
        (run_dir / name).unlink()
        (run_dir / name).write_bytes(data[: len(data) // 2])
    code, text = train("--resume")
    assert code == 2 and "last.pth' (" in text and "go on from it with --resume auto" in text, text
    code, text = train("--resume", "auto")
    assert code == 0 and "last.pth' (" in text and "going on from out/toy_exp/a/epoch_002.pth, 6 steps done" in text, text
    assert "max_epoch=3" in text and read_checkpoint(run_dir / "last.pth")["step"] == 9
    for path in run_dir.glob("*.pth"):
        path.unlink()
    (run_dir / "last.pth").write_bytes(data[: len(data) // 2])
    code, text = train("--resume")
    assert code == 2 and "no checkpoint in" in text and "Traceback" not in text
    assert [p.name for p in run_dir.glob("*.pth")] == ["last.pth"]


def test_a_resume_needs_no_word_of_the_first_command(work, train):
    assert train("-expn", "a", "max_epoch=2", "-b", "3", "--seed", "4")[0] == 0
    assert run_command(train_tool.run, ["-f", "toy_exp.py", "--resume", "--output", "out", "--workers", "0", "max_epoch=3"]) == 0
    values = read_checkpoint("out/toy_exp/a/last.pth")["exp"]["values"]
    assert {k: values[k] for k in ("data_dir", "batch_size", "seed", "max_epoch")} == {
        "data_dir": str(Path("data").resolve()),
        "batch_size": 3,
        "seed": 4,
        "max_epoch": 3,
    }


def test_other_annotations_are_another_run(work, train):
    assert train("-expn", "a")[0] == 0
    make_toy("data", 6, 3, edit=lambda coco, split: coco["annotations"].pop() if split == "train" else None)
    code, text = train("--resume", "max_epoch=2")
    assert code == 2 and "train data: the checkpoint has '6 images, 6 annotations" in text, text
    make_toy("data", 7, 3)
    code, text = train("--resume", "max_epoch=2")
    assert code == 2 and "steps per epoch: the checkpoint has 3, this run has 4" in text and "val data" in text


def test_a_run_folder_is_enough_to_go_on(work, train):
    """``--resume RUN`` without an exp, also from the run's own copy when the exp file was renamed."""
    assert train("-expn", "a", "max_epoch=1")[0] == 0
    words = ["--workers", "0", "--device", "cpu"]
    assert run_command(train_tool.run, ["--resume", "out/toy_exp/a", *words, "max_epoch=2"]) == 0
    Path("toy_exp.py").rename("renamed.py")
    assert run_command(train_tool.run, ["--resume", "out/toy_exp/a", *words, "max_epoch=3"]) == 0
    assert run_command(train_tool.run, ["-f", "out/toy_exp/a/exp.py", "--resume", "out/toy_exp/a", *words, "max_epoch=4"]) == 0
    state = read_checkpoint("out/toy_exp/a/last.pth")
    assert state["epoch"] == 4 and state["exp"]["name"] == "toy_exp"


def test_a_rerun_finds_its_data_from_anywhere(work, train, monkeypatch, tmp_path_factory):
    assert train("-expn", "a", "max_epoch=1")[0] == 0
    run_dir = Path("out/toy_exp/a").resolve()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert run_command(train_tool.run, ["--rerun", str(run_dir), "--output", "again", "-expn", "b"]) == 0
    assert Path("again/toy_exp/b/last.pth").is_file()


def test_contradictions_of_flags_and_fields(work, train):
    for words, message in (
        (("-b", "4", "batch_size=2"), "batch_size is given twice, by a flag (4) and by batch_size=2"),
        (("--seed", "1", "seed=2"), "seed is given twice"),
        (("-expn", "a/../b"), "-expn a/../b: expected a plain folder name"),
    ):
        code, text = train(*words)
        assert code == 2 and message in text, text
    assert run_command(train_tool.run, ["--rerun", "out", "max_epoch=3"]) == 2
    assert run_command(train_tool.run, ["-f", "toy_exp.py", "--data", ""]) == 2
