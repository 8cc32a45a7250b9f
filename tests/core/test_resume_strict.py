"""A resume is the same run or it is refused by name; damaged checkpoints are named and never mean epoch 0."""

import copy
import json
import os
import shutil

import pytest
import torch
from loguru import logger
from toy_task import LineExp, PointLoader, line_exp

from mmdet.core import RunOptions, Trainer
from mmdet.core.entries import OPTIONAL
from mmdet.core.files import checksum, numbered_epochs, read_checkpoint, save_atomic
from mmdet.core.optim import ParamRule
from mmdet.core.state import training_state
from mmdet.errors import CheckpointError, UsageError


def trainer_of(exp, **options):
    return Trainer(exp, RunOptions(device="cpu", workers=0, progress=False, **options))


def exp_of(cls, folder, **values):
    exp = cls()
    for name, value in {"output_dir": str(folder), "exp_name": "line", **values}.items():
        exp.set(name, value, "command line")
    return exp


def same(a, b):
    """Bit for bit."""
    return checksum({"it": a}) == checksum({"it": b})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    trainer_of(line_exp(folder, seed=3), experiment_name="a").train()
    return folder / "line" / "a"


@pytest.fixture
def run_dir(tmp_path, finished):
    """A finished run of 4 epochs of 4 steps, with last.pth and epoch_003.pth."""
    return shutil.copytree(finished, tmp_path / "line" / "a")


@pytest.fixture
def messages():
    lines = []
    sink = logger.add(lambda m: lines.append(str(m)), format="{message}")
    yield lines
    logger.remove(sink)


def replace(path, data):
    """Other bytes, in a file of their own (the original may have other names)."""
    path.unlink()
    path.write_bytes(data)


def cut(path):
    data = path.read_bytes()
    replace(path, data[: len(data) // 2])


def spoil(path):
    """A NaN in a file that is whole and has a right checksum."""
    saved = read_checkpoint(path)
    saved["model"]["first.bias"][2] = float("nan")
    path.unlink()
    save_atomic(saved, path)


# -- damaged files (case C06) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [cut, spoil, lambda path: replace(path, b"")], ids=["cut", "non-finite", "empty"])
def test_a_damaged_newest_file_is_named_and_auto_takes_the_one_before(tmp_path, run_dir, messages, damage):
    whole = {p.name: read_checkpoint(p) for p in run_dir.glob("*.pth")}
    damage(run_dir / "last.pth")
    for words in ("", str(run_dir)):
        with pytest.raises(CheckpointError, match="last.pth.*newest good checkpoint is .*epoch_003.pth, 12 steps.*--resume auto"):
            trainer_of(line_exp(tmp_path, seed=3), resume=words)
    trainer = trainer_of(line_exp(tmp_path, seed=3), resume="auto")
    assert trainer.step == 12 and trainer.run_dir == run_dir
    text = "".join(messages)
    assert "last.pth' " in text and "going on from" in text and "epoch_003.pth" in text
    assert any(word in text for word in ("truncated", "holds NaN or infinity in model.first.bias"))
    trainer.train()
    for name, content in whole.items():  # the good file was not replaced by the damaged one
        assert same(read_checkpoint(run_dir / name)["model"], content["model"]), name
    assert same(training_state(trainer)["optimizer"], whole["last.pth"]["optimizer"])


def test_a_damaged_file_that_is_not_the_newest_is_only_mentioned(tmp_path, run_dir, messages):
    cut(run_dir / "epoch_003.pth")
    assert trainer_of(line_exp(tmp_path, seed=3), resume="").step == 16
    text = "".join(messages)
    assert "epoch_003.pth" in text and "going on from" not in text


def test_the_step_in_the_file_counts_not_the_clock(tmp_path, run_dir):
    """The clock was set back by a day before the last save, and last.pth was lost."""
    (run_dir / "last.pth").rename(run_dir / "epoch_004.pth")
    (run_dir / "best.pth").unlink()
    day = 24 * 3600
    os.utime(run_dir / "epoch_004.pth", (os.stat(run_dir / "epoch_003.pth").st_mtime - day,) * 2)
    for words in ("", "auto"):
        trainer = trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume=words)
        assert trainer.step == 16 and trainer.resumption.path.name == "epoch_004.pth"
    trainer.train()
    assert [p.name for p in numbered_epochs(run_dir)] == ["epoch_004.pth"] and read_checkpoint(run_dir / "last.pth")["step"] == 20


def test_when_no_file_is_good_nothing_starts(tmp_path, run_dir):
    for path in run_dir.glob("*.pth"):
        cut(path)
    before = {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be resumed.*last.pth.*epoch_003.pth.*without --resume"):
        trainer_of(line_exp(tmp_path, seed=3), resume="")
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be resumed"):  # never epoch 0 in a folder that had more
        trainer_of(line_exp(tmp_path, seed=3), resume="auto", experiment_name="a")
    assert before == {p.name: p.read_bytes() for p in run_dir.iterdir() if p.is_file()}


def test_a_named_file_must_be_good(tmp_path, run_dir):
    cut(run_dir / "last.pth")
    with pytest.raises(
        CheckpointError, match="last.pth.*cannot be read: it is truncated.*beside it is .*epoch_003.pth: --resume"
    ):
        trainer_of(line_exp(tmp_path, seed=3), resume=str(run_dir / "last.pth"))


def test_a_run_folder_can_be_named(tmp_path, run_dir):
    assert trainer_of(line_exp(tmp_path / "elsewhere", seed=3), resume=str(run_dir)).step == 16


def test_going_back_to_an_older_file_keeps_it(tmp_path, run_dir):
    third = read_checkpoint(run_dir / "epoch_003.pth")
    trainer = trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume=str(run_dir / "epoch_003.pth"))
    assert trainer.step == 12
    trainer.train()
    assert read_checkpoint(run_dir / "epoch_004.pth")["step"] == 16 and read_checkpoint(run_dir / "last.pth")["step"] == 20
    assert third["step"] == 12


def test_going_back_keeps_what_came_later_out_of_the_way(tmp_path, run_dir, messages):
    last, best = read_checkpoint(run_dir / "last.pth"), read_checkpoint(run_dir / "best.pth")
    assert best["step"] == 8
    trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume=str(run_dir / "best.pth")).train()
    assert same(read_checkpoint(run_dir / "last.before_resume.pth"), last)
    assert read_checkpoint(run_dir / "epoch_003.before_resume.pth")["step"] == 12
    assert "kept as last.before_resume.pth, epoch_003.before_resume.pth" in "".join(messages)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    mark = next(line for line in lines if line["kind"] == "resume")
    assert mark["event"] == "resume" and mark["step"] == 8 and mark["from"].endswith("best.pth")
    trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume=str(run_dir / "epoch_004.pth")).train()
    assert read_checkpoint(run_dir / "last.before_resume.2.pth")["step"] == 20
    assert same(read_checkpoint(run_dir / "last.before_resume.pth"), last)
    trainer = trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume="auto")  # what was left aside is not taken up again
    assert trainer.resumption.path == run_dir / "last.pth"


def test_the_best_is_looked_for_anew_before_it_came(tmp_path, messages):
    scores = {"eval_interval": 1, "scores": (0.1, 0.2, 0.9, 0.3), "keep_checkpoints": 4}
    trainer_of(line_exp(tmp_path, **scores), experiment_name="a").train()
    folder = tmp_path / "line" / "a"
    trainer = trainer_of(line_exp(tmp_path, eval_interval=1), resume=str(folder / "epoch_001.pth"))
    trainer.evaluator.scores = (0.15, 0.12, 0.5)
    assert trainer.best["value"] is None and "looked for anew" in "".join(messages)
    assert trainer.train() == {"metric": "score", "value": 0.5, "epoch": 4}
    assert read_checkpoint(folder / "best.pth")["step"] == 16 == read_checkpoint(folder / "weights.pth")["step"]
    assert read_checkpoint(folder / "best.before_resume.pth")["best"]["value"] == pytest.approx(0.9)


def test_a_folder_that_changed_meanwhile_is_not_written_to(tmp_path, run_dir):
    trainer = trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume="")
    other = trainer_of(line_exp(tmp_path, seed=3, max_epoch=6), resume="")
    other.train()
    before = read_checkpoint(run_dir / "last.pth")
    with pytest.raises(UsageError, match="checkpoints changed while this run was being built.*Start again"):
        trainer.train()
    assert same(read_checkpoint(run_dir / "last.pth"), before) and not (run_dir / "run.lock").exists()


# -- auto --------------------------------------------------------------------------------------------------------------------


def test_auto_starts_afresh_and_then_goes_on(tmp_path, messages):
    words = {"resume": "auto", "experiment_name": "a"}
    (tmp_path / "line" / "a").mkdir(parents=True)
    (tmp_path / "line" / "a" / "notes.txt").write_text("a folder without checkpoints is no run")
    first = trainer_of(line_exp(tmp_path, seed=3, max_epoch=2), **words)
    assert first.step == 0 and first.resumption is None
    assert "--resume auto: no checkpoint in" in "".join(messages) and "a fresh start" in "".join(messages)
    first.train()
    assert (tmp_path / "line" / "a" / "run.json").is_file()
    second = trainer_of(line_exp(tmp_path, seed=3, max_epoch=4), **words)
    assert second.step == 8
    second.train()
    messages.clear()
    finished = trainer_of(line_exp(tmp_path, seed=3), **words)
    assert finished.train() == second.best and "nothing is left to do: all 4 epochs are done" in "".join(messages)
    assert [p.name for p in (tmp_path / "line").iterdir()] == ["a"]


def test_auto_without_a_name_takes_the_newest_run(tmp_path, run_dir):
    (tmp_path / "line" / "b").mkdir()
    assert trainer_of(line_exp(tmp_path, seed=3), resume="auto").run_dir == run_dir
    fresh = trainer_of(line_exp(tmp_path, "other", seed=3), resume="auto")
    assert fresh.step == 0 and fresh.run_dir.parent == tmp_path / "other"


def test_auto_fine_tunes_at_its_fresh_start_only(tmp_path, run_dir):
    words = {"resume": "auto", "experiment_name": "tuned", "ckpt": str(run_dir / "weights.pth")}
    trainer = trainer_of(line_exp(tmp_path), **words)
    weights = read_checkpoint(run_dir / "weights.pth")["model"]
    assert same(trainer.model.state_dict()["last.weight"], weights["last.weight"])
    trainer.train()
    state = read_checkpoint(tmp_path / "line" / "tuned" / "last.pth")
    assert same(trainer_of(line_exp(tmp_path), **words).model.state_dict(), state["model"])


# -- guard and data seed ------------------------------------------------------------------------------------------------------


def test_the_guards_counts_and_the_data_seed_go_on(tmp_path, run_dir):
    counts = {"in_a_row": 1, "recent": [14, 16], "skipped": 7, "restores": 2}
    saved = read_checkpoint(run_dir / "last.pth")
    assert saved["data_seed"] == 0 and saved["guard"]["skipped"] == 0
    save_atomic({**saved, "guard": counts, "data_seed": 5}, run_dir / "last.pth")
    trainer = trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume="")
    assert trainer.guard.state_dict() == counts and trainer.data_seed == 5
    trainer.train()
    assert trainer.loader.seen[0] == next(PointLoader(6, 3, data_seed=5).batches(16)).index
    again = read_checkpoint(run_dir / "last.pth")
    assert again["data_seed"] == 5 and again["guard"]["skipped"] == 7


def test_a_file_without_a_guard_still_resumes(tmp_path, run_dir):
    saved = read_checkpoint(run_dir / "last.pth")
    del saved["guard"]
    save_atomic(saved, run_dir / "last.pth")
    assert trainer_of(line_exp(tmp_path, seed=3), resume="").guard.restores == 0


# -- what may change ---------------------------------------------------------------------------------------------------------


def test_the_command_line_of_the_run_counts_where_this_one_says_nothing(tmp_path, messages):
    values = {"seed": 5, "batch_size": 12, "grad_accum": 2, "dropout": 0.0}
    trainer_of(line_exp(tmp_path, **values), experiment_name="a").train()
    trainer = trainer_of(line_exp(tmp_path), resume="")
    assert {name: getattr(trainer.exp, name) for name in values} == values
    assert "as on the command line that started" in "".join(messages) and "batch_size=12" in "".join(messages)


def test_changes_on_purpose_are_printed(tmp_path, run_dir, messages):
    changes = {"max_epoch": 6, "basic_lr_per_img": 0.01, "eval_interval": 1, "print_interval": 7, "keep_checkpoints": 3}
    trainer = trainer_of(line_exp(tmp_path, seed=3, **changes), resume="")
    text = "".join(messages)
    assert "changed on purpose: max_epoch 4 -> 6 (set by command line)" in text and "basic_lr_per_img" in text
    assert all(f"{name} " in text for name in changes)
    assert [g["base_lr"] for g in trainer.optimizer.param_groups] == pytest.approx([0.06, 0.06])
    assert trainer.train()["value"] is not None and trainer.step == 24


def test_an_edit_of_the_exp_file_counts_as_on_purpose(tmp_path, run_dir, messages):
    class Edited(LineExp):
        eval_interval = 1

    trainer_of(exp_of(Edited, tmp_path, seed=3), resume="")
    assert "eval_interval 2 -> 1" in "".join(messages)


def test_a_finished_run_says_so(tmp_path, run_dir, messages):
    trainer = trainer_of(line_exp(tmp_path, seed=3), resume="")
    assert "nothing is left to do: all 4 epochs are done" in "".join(messages)
    before = read_checkpoint(run_dir / "last.pth")
    trainer.train()
    assert same(read_checkpoint(run_dir / "last.pth"), before)


def test_fewer_epochs_than_are_done_are_refused(tmp_path, run_dir):
    with pytest.raises(CheckpointError, match="4 epochs are done already, more than max_epoch=3"):
        trainer_of(line_exp(tmp_path, seed=3, max_epoch=3), resume="")


# -- what may not ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 4),
        ("batch_size", 12),
        ("grad_accum", 2),
        ("ema", False),
        ("ema_decay", 0.5),
        ("ema_decay_type", "normal"),
        ("amp", "bf16"),
        ("dropout", 0.1),
        ("weight_decay", 0.1),
        ("momentum", 0.5),
        ("clip_norm", 1.0),
        ("warmup_epochs", 2.0),
        ("best_metric", "other"),
        ("deterministic", True),
    ],
)
def test_other_fields_are_refused_by_name(tmp_path, run_dir, name, value):
    old = getattr(line_exp(tmp_path, seed=3), name)
    with pytest.raises(CheckpointError) as caught:
        trainer_of(line_exp(tmp_path, **{"seed": 3, name: value}), resume="")
    message = str(caught.value)
    assert "would not be the same run" in message and f"{name} (set by command line)" in message
    assert f"the checkpoint has {old!r}, this run has {value!r}" in message and "with -c" in message


def test_an_edited_exp_file_is_refused_by_name(tmp_path, run_dir):
    class Edited(LineExp):
        weight_decay = 0.3

    with pytest.raises(CheckpointError, match="weight_decay .*the checkpoint has 0.0005, this run has 0.3"):
        trainer_of(exp_of(Edited, tmp_path, seed=3), resume="")


class OtherData(LineExp):
    def data_facts(self):
        return {"train": "23 images"}


class LongerEpochs(LineExp):
    def get_train_loader(self, **options):
        loader = super().get_train_loader(**options)
        loader.steps_per_epoch = 5
        return loader


class OtherClasses(LineExp):
    def label_names(self):
        return ("cat", "dog")


class OtherModel(LineExp):
    def get_model(self):
        model = super().get_model()
        model.extra = torch.nn.Linear(2, 2)
        return model


class OtherShape(LineExp):
    def get_model(self):
        model = super().get_model()
        model.last = torch.nn.Linear(8, 1, dtype=torch.float64)
        return model


class OtherOptimizer(LineExp):
    def get_optimizer(self, model):
        groups = super().get_optimizer(model).param_groups
        return torch.optim.AdamW([{k: v for k, v in g.items() if k in ("params", "name", "base_lr", "lr")} for g in groups])


class OtherGroups(LineExp):
    def param_rules(self):
        return (ParamRule("bias", pattern="bias$", decay_factor=0.0),)


class OtherDecay(LineExp):
    def param_rules(self):
        return (ParamRule("norm", norm=True, decay_factor=0.5),)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (OtherData, "train data: the checkpoint has None, this run has '23 images'"),
        (LongerEpochs, "steps per epoch: the checkpoint has 4, this run has 5"),
        (OtherClasses, r"class names: the checkpoint has \[\], this run has \['cat', 'dog'\]"),
        (OtherModel, "model extra.bias: the checkpoint has 'no such tensor'"),
        (OtherShape, r"model last.bias: .*float32.*float64"),
        (OtherOptimizer, "optimizer: the checkpoint has 'SGD', this run has 'AdamW'"),
        (OtherGroups, r"parameter groups \(name, tensors\)"),
        (OtherDecay, "weight_decay of parameter group 'norm': the checkpoint has 0.0, this run has 0.00025"),
    ],
)
def test_other_parts_are_refused_by_name(tmp_path, run_dir, cls, words):
    with pytest.raises(CheckpointError, match=words):
        trainer_of(exp_of(cls, tmp_path, seed=3), resume="")


def test_another_exp_is_refused(tmp_path, run_dir):
    with pytest.raises(CheckpointError, match="made by exp 'line', this is 'other'"):
        trainer_of(line_exp(tmp_path, "other", seed=3), resume=str(run_dir / "last.pth"))


def test_weights_only_files_are_for_fine_tuning(tmp_path, run_dir):
    with pytest.raises(CheckpointError, match="weights.pth: the file has no optimizer, epoch, it holds weights only.*-c"):
        trainer_of(line_exp(tmp_path, seed=3), resume=str(run_dir / "weights.pth"))


def test_other_versions_and_processes_are_mentioned(tmp_path, run_dir, messages):
    saved = read_checkpoint(run_dir / "last.pth")
    saved["versions"]["torch"] = "1.9.0"
    saved["conditions"] |= {"world": 8, "exp_file": "edited"}
    save_atomic(saved, run_dir / "last.pth")
    trainer_of(line_exp(tmp_path, seed=3), resume="")
    text = "".join(messages)
    assert "torch 1.9.0 -> " in text and "the number of processes was 8 and is 1" in text and "was edited since" in text


# -- wrong entries -----------------------------------------------------------------------------------------------------------

WRONG = {
    "model": [[1], None, {"a": 1}, "x"],
    "ema": [3, {}, {"model": {}, "running": None, "updates": "1"}, None],
    "optimizer": [
        None,
        {},
        {"state": [], "param_groups": []},
        {"state": {}, "param_groups": [1]},
        {"state": {}, "param_groups": []},
    ],
    "scaler": [None, 3],
    "epoch": ["x", -1, 1.0, True, 99],
    "step": ["x", None, 10**9, 15],
    "position": ["x", 3],
    "best": [None, {}, {"metric": "score", "value": "high", "epoch": 1}, {"metric": "score", "value": float("nan"), "epoch": 1}],
    "exp": [3, {}, {"name": "line", "file": "", "values": {"max_epoch": "four"}}, {"name": "line", "file": "", "values": [1]}],
    "overrides": [3],
    "class_names": [3, [1], "abc"],
    "data_seed": ["x", -1, None],
    "versions": [None, "x"],
    "conditions": [None, {}, 3],
    "guard": [None, 3, {"skipped": "x"}, {"recent": [None]}, {}],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in WRONG.items() for v in values], ids=str)
def test_wrong_entries_are_named(tmp_path, run_dir, key, value):
    saved = read_checkpoint(run_dir / "last.pth")
    path = tmp_path / "wrong.pth"
    save_atomic({**saved, key: value}, path)
    with pytest.raises(CheckpointError, match="wrong.pth"):
        trainer_of(line_exp(tmp_path, seed=3), resume=str(path))
    if key not in OPTIONAL and not (key == "epoch" and value is True):
        save_atomic({k: v for k, v in saved.items() if k != key}, path)
        with pytest.raises(CheckpointError, match=f"no (entry )?'?{key}"):
            trainer_of(line_exp(tmp_path, seed=3), resume=str(path))


def test_optimizer_buffers_must_fit_their_parameters(tmp_path, run_dir):
    saved = read_checkpoint(run_dir / "last.pth")
    for change in (torch.zeros(5, 5), "text"):
        wrong = copy.deepcopy(saved)
        wrong["optimizer"]["state"][0]["momentum_buffer"] = change
        save_atomic(wrong, tmp_path / "wrong.pth")
        with pytest.raises(CheckpointError, match="optimizer buffer momentum_buffer of parameter 0"):
            trainer_of(line_exp(tmp_path, seed=3), resume=str(tmp_path / "wrong.pth"))


def test_the_loader_is_asked_for_the_step_after(tmp_path, run_dir):
    trainer = trainer_of(line_exp(tmp_path, seed=3, max_epoch=5), resume="")
    trainer.train()
    fresh = PointLoader(6, 3)
    expected = [next(b).index for b in [fresh.batches(16)]]
    assert trainer.loader.seen[0] == expected[0]
