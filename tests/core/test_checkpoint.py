"""Files are written whole or not at all, and every tensor's fate is reported."""

import re

import pytest
import torch
from torch import nn

from mmdet.core.checkpoint import load_pretrained, open_weights, read_checkpoint, save_atomic
from mmdet.core.load_rules import ClassRows, Layout, LoadRules
from mmdet.errors import CheckpointError


def small(classes=3):
    model = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), "cls": nn.Linear(4, classes)})
    model.load_rules = LoadRules(
        layouts=(
            Layout(
                "foreign",
                lambda keys: any(k.startswith("trunk.") for k in keys),
                lambda s: {k.replace("trunk.", "body."): v for k, v in s.items()},
            ),
        ),
        class_rows=(ClassRows(r"cls\..*"),),
        constants=(r"grid",),
    )
    return model


def test_everything_fits():
    a, b = small(), small()
    report = load_pretrained(b, a.state_dict(), strict=True)
    assert len(report.loaded) == 8 and not report.missing + report.unexpected + report.reinitialized
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "ema", "module."])
def test_wrappers_are_recognised_and_said(wrapper):
    a, b = small(), small()
    state = a.state_dict()
    wrapped = {
        "model": {"model": state, "epoch": 3},
        "state_dict": {"state_dict": state},
        "ema": {"model": small().state_dict(), "ema": {"model": state, "updates": 1}},
        "module.": {f"module.{k}": v for k, v in state.items()},
    }[wrapper]
    report = load_pretrained(b, wrapped, strict=True)
    assert torch.equal(a["cls"].weight, b["cls"].weight)
    assert wrapper in str(report) or wrapper.upper() in str(report)


def test_raw_takes_the_other_weights():
    raw, averaged = small(), small()
    source = {"model": raw.state_dict(), "ema": {"model": averaged.state_dict(), "updates": 1}}
    target = small()
    load_pretrained(target, source, raw=True)
    assert torch.equal(target["cls"].weight, raw["cls"].weight)


def test_foreign_layout_and_constants():
    a, b = small(), small()
    foreign = {k.replace("body.", "trunk."): v for k, v in a.state_dict().items()} | {"grid": torch.zeros(5)}
    report = load_pretrained(b, foreign, strict=True)
    assert "layout: foreign" in str(report) and torch.equal(a["body"][0].weight, b["body"][0].weight)


def test_class_rows_by_name():
    a, b = small(3), small(2)
    fresh = b["cls"].bias[1].item()
    source = {"model": a.state_dict(), "class_names": ["x", "y", "z"]}
    report = load_pretrained(b, source, class_names=("z", "new"))
    assert torch.equal(b["cls"].weight[0], a["cls"].weight[2]) and b["cls"].bias[0] == a["cls"].bias[2]
    assert b["cls"].bias[1].item() == fresh
    assert report.reinitialized == ["cls.weight", "cls.bias"] and "1 of 2 from the file" in str(report)


def test_same_names_in_another_order_are_permuted():
    a, b = small(3), small(3)
    load_pretrained(b, {"model": a.state_dict(), "class_names": ["x", "y", "z"]}, class_names=("z", "x", "y"))
    assert torch.equal(b["cls"].bias, a["cls"].bias[[2, 0, 1]])


def test_other_number_of_classes_without_names_stays_fresh():
    a, b = small(5), small(3)
    before = b["cls"].weight.clone()
    report = load_pretrained(b, a.state_dict(), class_names=("a", "b", "c"))
    assert torch.equal(b["cls"].weight, before) and len(report.loaded) == 6
    assert "file (5, 4), model (3, 4)" in str(report)


@pytest.mark.parametrize("source", [{}, {"a": torch.zeros(1)}, {"body.0.weight": torch.zeros(9, 9)}])
def test_foreign_files_are_refused_and_change_nothing(source):
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"matched 0 of \d"):
        load_pretrained(model, source)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "x.pth"
    save_atomic({"model": small().state_dict()}, path)
    data = path.read_bytes()
    for name, content in (("half", data[: len(data) // 2]), ("empty", b""), ("text", b"hello"), ("html", b"<html>" * 50)):
        broken = tmp_path / f"{name}.pth"
        broken.write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(str(broken))):
            read_checkpoint(broken)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "absent.pth")


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pth"
    save_atomic({"model": {"a": torch.ones(3)}}, path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left.*last.pth"):
        save_atomic({"model": {"a": torch.zeros(3)}}, path)
    assert torch.equal(read_checkpoint(path)["model"]["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["last.pth"]


def test_open_weights_reads_class_names():
    assert open_weights({"model": {"a": torch.ones(1)}, "class_names": ["x"]}).class_names == ("x",)
