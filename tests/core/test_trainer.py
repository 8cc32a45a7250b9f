"""The training loop on a task that is no detector: what it must do in which order, and what it leaves on the disk."""

import json
import math

import pytest
import torch
from torch import nn
from toy_task import LineExp, line_exp

from mmdet.core import RunOptions, Trainer, read_checkpoint
from mmdet.core.hooks import Hook
from mmdet.core.parallel import Parallel
from mmdet.errors import CheckpointError, UsageError


def trainer_of(exp, **options):
    return Trainer(exp, RunOptions(device="cpu", workers=0, progress=False, **options))


def same(a, b):
    """Whether two states agree bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_run_learns_and_leaves_its_files(tmp_path):
    trainer = trainer_of(line_exp(tmp_path, max_epoch=20), experiment_name="a")
    best = trainer.train()
    run_dir = tmp_path / "line" / "a"
    assert best["value"] > -0.5 and best["metric"] == "score"
    files = {p.name for p in run_dir.iterdir()} - {"run.json"}
    assert {"last.pth", "best.pth", "weights.pth", "epoch_019.pth", "train_log.txt", "metrics.jsonl", "tensorboard"} == files
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train, evals = ([x for x in lines if x["kind"] == k] for k in ("train", "eval"))
    assert [x["epoch"] for x in evals] == list(range(2, 21, 2))
    assert train[-1]["loss"] < 0.3 * train[0]["loss"]
    assert train[0]["loss"] == pytest.approx(train[0]["loss_square"] + train[0]["loss_size"], rel=1e-5)
    assert {"max_error", "lr", "grad_norm", "time"} <= train[0].keys()
    log = (run_dir / "train_log.txt").read_text()
    assert "training done, best score" in log and "command line" in log and "parameters" in log and "Traceback" not in log


def test_checkpoint_keys_and_plain_content(tmp_path):
    trainer_of(line_exp(tmp_path), experiment_name="a").train()
    state = read_checkpoint(tmp_path / "line" / "a" / "last.pth")
    wanted = {"model", "ema", "optimizer", "scaler", "epoch", "step", "position", "best", "exp", "overrides"}
    wanted |= {"class_names", "data_seed", "versions", "conditions", "evaluation_due", "guard"}
    assert wanted == set(state)
    assert (state["epoch"], state["step"], state["position"]) == (4, 16, 0)
    assert state["ema"]["updates"] == 16
    assert not same(state["model"], state["ema"]["model"])
    weights = read_checkpoint(tmp_path / "line" / "a" / "weights.pth")
    assert weights["weights"] == "ema" and weights["exp"]["values"]["max_epoch"] == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_equals_uninterrupted(tmp_path, accumulate):
    """At an epoch's end and inside an epoch, with dropout, batch norm, momentum and EMA."""
    values = {"grad_accum": accumulate, "save_interval_steps": 1}
    whole = trainer_of(line_exp(tmp_path, "whole", **values), experiment_name="a")
    whole.train()

    class Stop(Hook):
        def __init__(self, at):
            self.at = at

        def on_step_end(self, trainer):
            if trainer.step == self.at:
                raise KeyboardInterrupt

    for stop in (5, 8, 10):
        exp = line_exp(tmp_path, f"cut{stop}", **values)
        first = trainer_of(exp, experiment_name="a")
        first.hooks.append(Stop(stop))
        with pytest.raises(KeyboardInterrupt):
            first.train()
        second = trainer_of(line_exp(tmp_path, f"cut{stop}", **values), resume="")
        assert second.step in (stop - 1, stop)
        second.train()
        assert same(second.model.state_dict(), whole.model.state_dict())
        assert same(second.ema.state_dict(second.model), whole.ema.state_dict(whole.model))
        assert same(second.optimizer.state_dict(), whole.optimizer.state_dict())
        assert second.best == whole.best
        assert second.loader.seen[-4:] == whole.loader.seen[-4:]


def test_accumulation_equals_one_batch_where_nothing_couples_the_images(tmp_path):
    class NoNorm(LineExp):
        def get_model(self):
            model = super().get_model()
            model.norm = nn.Identity()
            return model

    results = []
    for parts in (1, 3):
        exp = NoNorm()
        for name, value in {"output_dir": str(tmp_path), "exp_name": "x", "grad_accum": parts, "dropout": 0.0}.items():
            exp.set(name, value, "command line")
        trainer = trainer_of(exp, experiment_name=str(parts))
        trainer.train()
        results.append(trainer.model.state_dict())
    assert all(torch.allclose(results[0][k], results[1][k], atol=1e-6) for k in results[0])


def test_order_of_the_step(tmp_path, monkeypatch):
    calls = []
    trainer = trainer_of(line_exp(tmp_path, clip_norm=1.0, max_epoch=1), experiment_name="a")

    def spy(owner, name, label=None):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(label or name), original(*a, **k))[1])

    spy(trainer, "lr_factor", "lr")
    spy(trainer, "network", "forward")
    spy(trainer.parallel, "reduce_gradients")
    spy(trainer.scaler, "unscale_")
    spy(trainer.parallel, "clip")
    spy(trainer.parallel, "all_max")
    spy(trainer.scaler, "step", "optimizer")
    spy(trainer.optimizer, "zero_grad")
    spy(trainer.ema, "update", "ema")
    trainer.train()
    wanted = ["lr", "forward", "reduce_gradients", "unscale_", "clip", "all_max", "optimizer", "ema", "zero_grad"]
    assert calls[calls.index("lr") :][: len(wanted)] == wanted


def test_hooks_in_order_and_a_failing_hook_closes_the_run(tmp_path):
    events = []

    class Spy(Hook):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda trainer: events.append((name, trainer.step))
            return super().__getattribute__(name)

    trainer = trainer_of(line_exp(tmp_path, max_epoch=1), experiment_name="a")
    trainer.hooks = [Spy()]
    trainer.train()
    steps = [("on_step_end", i) for i in range(1, 5)]
    assert events == [("on_train_start", 0), ("on_epoch_start", 0), *steps, ("on_epoch_end", 4), ("on_train_end", 4)]

    class Broken(Hook):
        def on_step_end(self, trainer):
            if trainer.step == 2:
                raise ValueError("boom")

    trainer = trainer_of(line_exp(tmp_path, max_epoch=1), experiment_name="b")
    trainer.hooks = [Broken()]
    with pytest.raises(ValueError, match="boom"):
        trainer.train()
    log = (tmp_path / "line" / "b" / "train_log.txt").read_text()
    assert "Traceback" in log and "training done" not in log
    assert "ValueError: boom" in log.strip().splitlines()[-1] and "step 2/4" in log.strip().splitlines()[-1]


def test_a_strategy_of_another_kind_needs_no_change_in_the_trainer(tmp_path):
    """Two groups, each with its own micro-batch, weight and clipping; gradients reduced by the strategy."""

    class TwoGroups(Parallel):
        def __init__(self):
            super().__init__()
            self.reduced = 0

        def wrap(self, model):
            self.model = model
            return lambda batch: model(batch)

        def micro_batches(self, batch):
            first, second = batch.split(2)
            return [(first, 0.25), (second, 0.75)]

        def reduce_gradients(self, model):
            self.reduced += 1

        def clip(self, model):
            return {"first": model.first.weight.grad.norm(), "last": model.last.weight.grad.norm()}

    class Grouped(LineExp):
        def get_parallel(self):
            return TwoGroups()

    exp = Grouped()
    for name, value in {"output_dir": str(tmp_path), "exp_name": "two", "max_epoch": 2, "dropout": 0.0}.items():
        exp.set(name, value, "command line")
    trainer = trainer_of(exp, experiment_name="a")
    batch = next(trainer.loader.batches(0))
    expected = sum(w * trainer.model(part).total.item() for part, w in zip(batch.split(2), (0.25, 0.75), strict=True))
    trainer.train()
    lines = [json.loads(x) for x in (tmp_path / "two" / "a" / "metrics.jsonl").read_text().splitlines()]
    assert trainer.parallel.reduced == 8 and set(lines[0]["grad_norm"]) == {"first", "last"}
    fresh = trainer_of(exp)
    assert fresh.dry_run()["loss"] == pytest.approx(expected, rel=1e-5)


def test_best_is_never_undefined_nor_replaced_by_worse(tmp_path):
    scores = (math.nan, 0.0, 0.5, 0.4)
    exp = line_exp(tmp_path, eval_interval=1)
    trainer = trainer_of(exp, experiment_name="a")
    trainer.evaluator.scores = scores
    trainer.train()
    assert trainer.best == {"metric": "score", "value": 0.5, "epoch": 3}
    assert read_checkpoint(tmp_path / "line" / "a" / "best.pth")["step"] == 12
    assert read_checkpoint(tmp_path / "line" / "a" / "weights.pth")["step"] == 12
    resumed = trainer_of(line_exp(tmp_path, eval_interval=1, max_epoch=5), resume="")
    resumed.evaluator.scores = (0.45,)
    assert resumed.train()["value"] == 0.5
    assert read_checkpoint(tmp_path / "line" / "a" / "best.pth")["step"] == 12


def test_freezing_by_epoch_keeps_frozen_norms_still(tmp_path):
    class Staged(LineExp):
        def frozen(self, epoch):
            return ("first", "norm") if epoch < 2 else ()

    exp = line_exp(tmp_path, "staged", Staged)
    trainer = trainer_of(exp, experiment_name="a")
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    seen = {}

    class Look(Hook):
        def on_epoch_end(self, t):
            seen[t.step] = {k: v.clone() for k, v in t.model.state_dict().items()}

    trainer.hooks.append(Look())
    trainer.train()
    frozen = [k for k in before if k.startswith(("first", "norm"))]
    assert all(torch.equal(seen[8][k], before[k]) for k in frozen)
    assert not torch.equal(seen[8]["last.weight"], before["last.weight"])
    assert not torch.equal(seen[12]["first.weight"], before["first.weight"])
    assert not torch.equal(seen[12]["norm.running_mean"], before["norm.running_mean"])
    assert len(trainer.optimizer.param_groups[0]["params"]) + len(trainer.optimizer.param_groups[1]["params"]) == 6


def test_usage_errors_write_nothing(tmp_path):
    with pytest.raises(UsageError, match="multiple of 1 processes x grad_accum=4|grad_accum"):
        trainer_of(line_exp(tmp_path, grad_accum=4))
    with pytest.raises(CheckpointError, match="no run with a checkpoint"):
        trainer_of(line_exp(tmp_path), resume="")
    torch.save({"model": {}}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="weights only.*-c"):
        trainer_of(line_exp(tmp_path), resume=str(tmp_path / "w.pth"))
    assert trainer_of(line_exp(tmp_path)).dry_run()["loss"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["w.pth"]


def test_an_epoch_without_any_loss_is_warned_about(tmp_path):
    class Idle(LineExp):
        def get_model(self):
            model = super().get_model()
            forward = model.forward

            def nothing(batch):
                out = forward(batch)
                return type(out)({k: v * 0 for k, v in out.losses.items()}) if model.training else out

            model.forward = nothing
            return model

    exp = Idle()
    for name, value in {"output_dir": str(tmp_path), "exp_name": "idle", "max_epoch": 1, "ema": False}.items():
        exp.set(name, value, "command line")
    trainer_of(exp, experiment_name="a").train()
    assert "every loss of epoch 1 was exactly 0" in (tmp_path / "idle" / "a" / "train_log.txt").read_text()


def test_a_failing_evaluation_costs_no_training(tmp_path):
    whole = trainer_of(line_exp(tmp_path, "whole"), experiment_name="a")
    whole.train()

    first = trainer_of(line_exp(tmp_path), experiment_name="a")

    def fail(model):
        raise ValueError("boom")

    first.evaluator.evaluate = fail
    with pytest.raises(ValueError, match="boom"):
        first.train()
    second = trainer_of(line_exp(tmp_path), resume="")
    assert second.step == 8 and second.evaluation_due and second.best["value"] is None
    second.train()
    assert second.best == whole.best and same(second.model.state_dict(), whole.model.state_dict())
    lines = [json.loads(x) for x in (tmp_path / "line" / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [x["epoch"] for x in lines if x["kind"] == "eval"] == [2, 4]


def test_a_name_that_is_taken_is_refused(tmp_path):
    trainer_of(line_exp(tmp_path), experiment_name="a").train()
    with pytest.raises(UsageError, match="-expn a: .*earlier run.*--resume"):
        trainer_of(line_exp(tmp_path), experiment_name="a")


def test_a_hook_method_that_would_never_be_called_is_refused():
    with pytest.raises(UsageError, match="'after_epoch' is never called.*on_epoch_end"):
        type("Mine", (Hook,), {"after_epoch": lambda self, trainer: None})
