"""Files are written whole or not at all, and every tensor's fate is reported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mmdet.core.checkpoint import LoadOptions, load_backbone, load_pretrained, open_weights, read_checkpoint, save_atomic
from mmdet.core.load_rules import ClassRows, Layout, LoadRules
from mmdet.errors import CheckpointError, UsageError


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
    load_pretrained(target, source, options=LoadOptions(raw=True))
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


# -- what the user says --------------------------------------------------------------------------------------------------


def test_load_map_and_ignore_say_what_is_wanted():
    a, b = small(), small()
    source = {k.replace("body.", "net."): v for k, v in a.state_dict().items() if "body.2" not in k} | {"x": torch.zeros(1)}
    options = LoadOptions(load_map=("^net=body",), ignore=("^cls", "^x$"))
    report = load_pretrained(b, source, options=options)
    assert torch.equal(b["body"][0].weight, a["body"][0].weight) and not torch.equal(b["cls"].weight, a["cls"].weight)
    assert sorted(report.ignored) == ["cls.bias", "cls.weight", "x"] and report.missing == ["body.2.weight", "body.2.bias"]
    assert not report.unexpected and "3 ignored as asked" in report.summary()


def test_patterns_lift_the_half_rule_to_one():
    model = small()
    source = {"body.0.weight": torch.ones(4, 4)} | {f"other.{i}": torch.zeros(1) for i in range(9)}
    with pytest.raises(CheckpointError, match="matched 1 of 10"):
        load_pretrained(model, source)
    with pytest.raises(CheckpointError, match="matched 0 of"):
        load_pretrained(model, source, options=LoadOptions(ignore=("body",)))
    report = load_pretrained(model, source, options=LoadOptions(load_map=("^other.0$=y",)))
    assert report.loaded == ["body.0.weight"] and len(report.unexpected) == 9


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"load_map": ("body",)}, UsageError, "expected PATTERN=REPLACEMENT"),
        ({"load_map": ("(=x",)}, UsageError, "no regular expression"),
        ({"ignore": ("[",)}, UsageError, "no regular expression"),
        ({"load_map": ("body=\\9",)}, UsageError, "does not fit its pattern"),
        ({"load_map": ("trunc=x",)}, CheckpointError, "matches none of the names .*body.0.weight"),
        ({"ignore": ("haed",)}, CheckpointError, "matches no tensor"),
        ({"load_map": ("body.*=x",)}, CheckpointError, "gives two tensors"),
    ],
)
def test_wrong_patterns_are_named(options, error, words):
    with pytest.raises(error, match=words):
        load_pretrained(small(), small().state_dict(), options=LoadOptions(**options))


# -- backbone ------------------------------------------------------------------------------------------------------------


def detector():
    model = nn.ModuleDict({"backbone": small()["body"], "head": nn.Linear(4, 2)})
    model.load_rules = small().load_rules
    return model


@pytest.mark.parametrize("spelling", ["", "backbone.", "trunk."])
def test_backbone_files_with_or_without_the_prefix(spelling):
    source, model = small()["body"], detector()
    head = model["head"].weight.clone()
    model.load_rules = LoadRules(
        layouts=(Layout("foreign", lambda keys: False, lambda s: {k.replace("trunk.", ""): v for k, v in s.items()}),)
    )
    report = load_backbone(model, {f"{spelling}{k}": v for k, v in source.state_dict().items()} | {"fc.weight": torch.ones(2)})
    assert all(torch.equal(v, model["backbone"].state_dict()[k]) for k, v in source.state_dict().items())
    assert torch.equal(model["head"].weight, head) and len(report.loaded) == 6 and "backbone only" in str(report)
    assert ("layout: foreign" in str(report)) == (spelling == "trunk.")


def test_a_whole_detector_gives_its_backbone():
    a, b = detector(), detector()
    report = load_backbone(b, {"model": a.state_dict(), "ema": None})
    assert torch.equal(a["backbone"][1].bias, b["backbone"][1].bias) and not torch.equal(a["head"].weight, b["head"].weight)
    assert not report.unexpected + report.missing


def test_foreign_backbones_are_refused():
    with pytest.raises(CheckpointError, match="matched 1 of 1.*which has 6 tensors"):
        load_backbone(detector(), {"0.weight": torch.zeros(4, 4)})
    with pytest.raises(CheckpointError, match="matched 0 of"):
        load_backbone(detector(), {"a": torch.zeros(4, 4)})
    with pytest.raises(CheckpointError, match="no part called 'backbone'"):
        load_backbone(small(), small().state_dict())


# -- files ---------------------------------------------------------------------------------------------------------------


def test_the_checksum_finds_every_changed_byte_and_value(tmp_path):
    path = tmp_path / "x.pth"
    payload = {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": [1, 2.5, None, "x", (True,)]}, "e": torch.zeros(0), 3: b"\0"}
    save_atomic(payload, path)
    content = read_checkpoint(path)
    assert list(content) == list(payload) and torch.equal(content["a"], payload["a"]) and content["b"] == payload["b"]
    raw = torch.load(path, weights_only=True)
    assert raw["checksum"].startswith("crc32:")
    changes = ({"a": raw["a"] + 0.5}, {"a": raw["a"].double()}, {"a": raw["a"].reshape(3, 2)}, {"b": {"c": [1]}}, {"new": 1})
    for change in changes:
        torch.save({**raw, **change}, path)
        with pytest.raises(CheckpointError, match="damaged: its content does not agree with its checksum"):
            read_checkpoint(path)


def test_damage_in_other_programs_files_is_found_too(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"model": {"a": torch.full((64,), 1.0)}}, path)
    data = bytearray(path.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f" * 8) + 40] ^= 1  # a bit of a weight: torch.load alone would not notice
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["a"], torch.full((64,), 1.0))
    with pytest.raises(CheckpointError, match="does not agree with its sum"):
        read_checkpoint(path)


def test_only_plain_values_are_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"entry exp.values\[1\] is a PosixPath|entry exp.values\[1\] is a"):
        save_atomic({"exp": {"values": [1, tmp_path]}}, tmp_path / "x.pth")
    assert not list(tmp_path.iterdir())


def test_trust_is_explicit(tmp_path):
    model = small()
    del model.load_rules  # functions inside a function cannot be pickled
    torch.save({"model": model}, tmp_path / "module.pth")
    with pytest.raises(CheckpointError, match="'torch.nn.modules.container.ModuleDict'.*--trust-checkpoint"):
        read_checkpoint(tmp_path / "module.pth")
    report = load_pretrained(small(), tmp_path / "module.pth", options=LoadOptions(trust=True), strict=True)
    assert len(report.loaded) == 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": [1]}, "entry 'model' is a list"),
        ({"model": small().state_dict(), "ema": 3}, "entry 'ema' is a int.*--raw"),
        ({"model": 3, "class_names": [], "exp": {}, "versions": {}}, "entry 'exp'"),
        ({"model": {"a": 1}, "class_names": [], "exp": {"name": "", "file": "", "values": {}}, "versions": {}}, "'model'"),
    ],
)
def test_wrong_types_are_named(content, words, tmp_path):
    save_atomic(content, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=words):
        load_pretrained(small(), tmp_path / "x.pth")


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A process that may not write files of more than 20 kB, which is how a full disk looks from inside."""
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; from mmdet.core.files import save_atomic\n"
        "save_atomic({'a': torch.ones(3)}, Path('last.pth'))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: save_atomic({'a': torch.zeros(100_000)}, Path('last.pth'))\n"
        "except OSError as error: sys.exit(f'NAMED {error}')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "NAMED" in done.stderr and "could not save last.pth; files saved earlier are untouched" in done.stderr, done.stderr
    assert torch.equal(read_checkpoint(tmp_path / "last.pth")["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["last.pth"]


def test_ctrl_c_while_a_file_is_written_is_an_interrupt(tmp_path, monkeypatch):
    """torch's writer fails on its way out and hides the interrupt."""

    def interrupted(content, file):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos")

    save_atomic({"model": {"a": torch.ones(3)}}, tmp_path / "last.pth")
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_atomic({"model": {"a": torch.zeros(3)}}, tmp_path / "last.pth")
    monkeypatch.undo()
    assert torch.equal(read_checkpoint(tmp_path / "last.pth")["model"]["a"], torch.ones(3))
