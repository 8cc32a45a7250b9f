"""Steps that are not finite: left out, then the last good state, then the end; and nothing but finite states on the disk."""

import math

import pytest
import torch
from toy_task import LineExp, line_exp

from mmdet.core import read_checkpoint
from mmdet.core.guard import IN_WINDOW, NonFiniteGuard, ZeroWatch, first_non_finite
from mmdet.core.hooks import Hook
from mmdet.core.run import RunOptions
from mmdet.core.trainer import Trainer
from mmdet.errors import NonFiniteError


def clones(state):
    return {k: v.clone() for k, v in state.items()}


class Record(Hook):
    """The state after every step."""

    def __init__(self):
        self.states = {}

    def on_train_start(self, trainer):
        self.on_step_end(trainer)

    def on_step_end(self, trainer):
        ema = trainer.ema
        buffers = {
            i: {k: v.clone() for k, v in s.items() if v is not None} for i, s in trainer.optimizer.state_dict()["state"].items()
        }
        self.states[trainer.step] = (
            clones(trainer.model.state_dict()),
            buffers,
            None if ema is None else clones(ema.running_state()["average"]),
            None if ema is None else ema.updates,
        )


class BadSteps(LineExp):
    """Inputs are NaN (or huge) in some steps, named by their number counted from 1."""

    max_epoch = 6
    bad_steps: tuple[int, ...] = ()
    adamw: bool = False
    bad_value: str = "nan"  # fields are finite numbers

    def get_prefetcher(self, batches, device):
        for batch in batches:
            if batch.step + 1 in self.bad_steps:
                batch.x[0] = float(self.bad_value)
            yield batch

    def get_optimizer(self, model):
        if not self.adamw:
            return super().get_optimizer(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        for group in optimizer.param_groups:
            group.update(base_lr=self.learning_rate, name="all")
        return optimizer


def run(tmp_path, name, bad, **values):
    exp = line_exp(tmp_path, name, BadSteps, bad_steps=bad, print_interval=1, **values)
    trainer = Trainer(exp, RunOptions(workers=0, device="cpu", experiment_name="a", progress=False))
    record = Record()
    trainer.hooks.append(record)
    return trainer, record


def assert_same(one, other):
    for left, right in zip(one[:1] + one[2:3], other[:1] + other[2:3], strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    assert one[1].keys() == other[1].keys()
    for i, buffers in one[1].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(other[1][i][k])) for k, v in buffers.items())
    assert one[3] == other[3]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_bad_step_changes_nothing_and_says_everything(tmp_path, value, caplog):
    trainer, record = run(tmp_path, "one", (7,), bad_value=value)
    trainer.train()
    assert_same(record.states[6], record.states[7])  # weights, batch-norm statistics, momentum, EMA and its count
    assert not torch.equal(record.states[7][0]["last.weight"], record.states[8][0]["last.weight"])
    assert record.states[24][3] == 23
    log = (tmp_path / "one" / "a" / "train_log.txt").read_text()
    line = next(x for x in log.splitlines() if "left out, not finite" in x)
    wanted = ("epoch 2/6 step 3/4 (iteration 7)", "loss_square nan", "images ", "first bad gradient: first.weight", "lr ")
    assert all(w in line for w in wanted), line
    assert "not finite: 1; earlier" in log
    saved = read_checkpoint(tmp_path / "one" / "a" / "last.pth")
    assert saved["guard"]["skipped"] == 1 and saved["data_seed"] == 0
    assert first_non_finite(saved["model"]) == "" == first_non_finite(saved["ema"]["model"])


@pytest.mark.parametrize("adamw", [False, True])
def test_three_in_a_row_bring_back_the_snapshot(tmp_path, adamw):
    trainer, record = run(tmp_path, "three", (6, 7, 8), adamw=adamw, snapshot_interval=3, save_interval_steps=5)
    trainer.train()
    # Snapshots: every third step, and with every save (steps 4 and 5): the last before step 6 is that of step 5.
    assert_same(record.states[5], record.states[8])
    saved = read_checkpoint(tmp_path / "three" / "a" / "last.pth")
    assert saved["data_seed"] == 1 and saved["guard"]["restores"] == 1 and saved["guard"]["skipped"] == 3
    log = (tmp_path / "three" / "a" / "train_log.txt").read_text()
    assert "The state of iteration 5 is back" in log and "data_seed=1" in log


def test_it_ends_after_three_restores_with_exit_code_3_and_good_files(tmp_path):
    trainer, _ = run(tmp_path, "end", tuple(range(5, 25)))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    message = str(caught.value)
    wanted = ("epoch 4/6 step 4/4 (iteration 16)", "loss_square nan", "lr ", "brought back 3 times", "12 steps", "images ")
    assert all(w in message for w in wanted), message
    assert caught.value.exit_code == 3
    files = sorted((tmp_path / "end" / "a").glob("*.pth"))
    assert files
    for path in files:
        saved = read_checkpoint(path)
        assert first_non_finite(saved["model"]) == ""


def test_a_failure_in_the_last_step_is_not_a_success(tmp_path):
    trainer, _ = run(tmp_path, "late", tuple(range(13, 25)))
    with pytest.raises(NonFiniteError):
        trainer.train()


def test_a_run_that_ends_while_its_steps_fail_is_no_success(tmp_path):
    trainer, _ = run(tmp_path, "tail", (23, 24))
    with pytest.raises(NonFiniteError, match="2 of its 24 steps .* the last 2 in a row"):
        trainer.train()
    assert read_checkpoint(tmp_path / "tail" / "a" / "last.pth")["step"] == 24
    trainer, _ = run(tmp_path, "one", (24,))
    trainer.train()  # one image that is broken costs one step


def test_a_dry_run_tells_of_a_bad_step(tmp_path):
    trainer, _ = run(tmp_path, "dry", (1,))
    with pytest.raises(NonFiniteError, match=r"step 1/4 \(iteration 1\): losses: loss_square nan"):
        trainer.dry_run()


def test_a_loss_above_max_loss_counts(tmp_path):
    trainer, record = run(tmp_path, "high", (), max_loss=1e-9)
    with pytest.raises(NonFiniteError, match="iteration 12.*losses above max_loss=1e-09"):
        trainer.train()
    assert_same(record.states[0], record.states[11])


def test_weights_that_overflow_are_never_saved(tmp_path):
    trainer, _ = run(tmp_path, "overflow", (), max_epoch=2)

    class Damage(Hook):
        def on_step_end(self, t):
            if t.step == 3:
                t.model.last.weight.data[0, 0] = math.inf

    trainer.hooks.append(Damage())
    trainer.train()
    assert trainer.guard.restores == 1
    for path in (tmp_path / "overflow" / "a").glob("*.pth"):
        assert first_non_finite(read_checkpoint(path)["model"]) == ""


def test_an_optimizer_that_overflows_is_brought_back_as_well(tmp_path):
    trainer, _ = run(tmp_path, "momentum", (), max_epoch=2, save_interval_steps=3)

    class Damage(Hook):
        def on_step_end(self, t):
            if t.step == 3:
                t.optimizer.state[t.model.norm.bias]["momentum_buffer"][0] = math.inf

    trainer.hooks.append(Damage())
    trainer.train()
    assert trainer.guard.restores == 1
    log = (tmp_path / "momentum" / "a" / "train_log.txt").read_text()
    assert ".momentum_buffer holds NaN or infinity" in log and "The state of iteration 0 is back" in log


def test_resume_after_a_restore_is_the_same_run(tmp_path):
    whole, record = run(tmp_path, "whole", (6, 7, 8))
    whole.train()
    part, _ = run(tmp_path, "part", (6, 7, 8), save_interval_steps=10)

    class Kill(Hook):
        def on_step_end(self, t):
            if t.step == 11:
                raise OSError("killed")

    part.hooks.append(Kill())
    with pytest.raises(OSError, match="killed"):
        part.train()
    exp = part.exp
    resumed = Trainer(exp, RunOptions(workers=0, device="cpu", resume=str(tmp_path / "part" / "a" / "last.pth"), progress=False))
    assert resumed.data_seed == 1 and resumed.guard.restores == 1 and resumed.step == 10
    resumed.train()
    final = resumed.model.state_dict()
    assert all(torch.equal(final[k], v) for k, v in record.states[24][0].items())


def test_the_guard_counts(tmp_path):
    guard = NonFiniteGuard()
    verdicts = []
    for step in range(1, 2 * IN_WINDOW + 1):  # every second step
        if step % 2:
            verdicts.append(guard.left_out(step))
        else:
            guard.passed()
    assert verdicts == ["skip"] * (IN_WINDOW - 1) + ["restore"]
    far = NonFiniteGuard()
    for step in range(0, 20_000, 500):  # seldom enough: never
        assert far.left_out(step) == "skip"
        far.passed()
    copy = NonFiniteGuard()
    copy.load_state_dict(far.state_dict())
    assert copy.state_dict() == far.state_dict()


def test_long_zeros_are_warned_about_once(tmp_path):
    from loguru import logger

    heard = []
    sink = logger.add(lambda m: heard.append(str(m)), level="WARNING")
    watch = ZeroWatch()
    for step in range(0, 500, 10):
        watch.look(step, {"loss_a": 0.0, "detA/num_pos": 0.0, "loss_b": float(step == 200), "error": 0.0})
    logger.remove(sink)
    assert len([h for h in heard if "loss_a has been exactly 0" in h]) == 1
    assert len([h for h in heard if "no positives" in h]) == 1 and not any("error" in h for h in heard)
