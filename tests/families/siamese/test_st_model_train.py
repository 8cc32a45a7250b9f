"""ST-09, ST-11, ST-13 to ST-15 and ST-19 on one process: the Trainer on the smallest tracker."""

import json
import time

import pytest
import torch
from track_run import STEPS, BadExp, States, StopAt, clips, exp_of, same, trainer_of

from mmdet.core.cli import run_command
from mmdet.core.norm_log import norms_by_level
from mmdet.core.optim import is_norm
from mmdet.errors import NonFiniteError
from mmdet.families.siamese.validation import history_table, pooled, read_history


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return clips(tmp_path_factory.mktemp("clips"))


def states_of(trainer):
    states = States()
    trainer.hooks.append(states)
    trainer.train()
    return states.after


def stop(exp, step):
    trainer = trainer_of(exp)
    trainer.hooks.append(StopAt(step))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def lines_of(run_dir, kind):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


# Frozen for two epochs of two steps, then two stages are trained; negatives are mined from the third epoch on.
STAGED = {"freeze_epochs": 2, "train_stages": ("stage2", "stage3"), "save_interval_steps": 1}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The states of an uninterrupted run."""
    return states_of(trainer_of(exp_of(data, tmp_path_factory.mktemp("whole"), **STAGED)))


def test_the_backbone_is_frozen_then_trained(whole):
    """ST-09: parameters and statistics."""
    frozen, end = 2 * STEPS, 4 * STEPS
    assert same(whole[0], whole[frozen], "backbone.") and not same(whole[0], whole[frozen], "head.")
    for stage in ("stage0", "stage1"):
        assert same(whole[0], whole[end], f"backbone.{stage}.")
    for stage in ("stage2", "stage3"):
        names = [n for n in whole[0] if n.startswith(f"backbone.{stage}.")]
        assert all(not torch.equal(whole[frozen][n], whole[end][n]) for n in names)


@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_resume_before_at_and_after_the_boundary_goes_on_exactly(data, whole, tmp_path, step):
    """ST-09, ST-11, ST-19: unfreezing and mining begin at step 4. Saved is the step before the one that was cut short."""
    exp = exp_of(data, tmp_path, **STAGED)
    stop(exp, step)
    after = states_of(trainer_of(exp_of(data, tmp_path, **STAGED), resume=""))
    assert min(after) <= step and max(after) == 4 * STEPS
    assert same(after[4 * STEPS], whole[4 * STEPS])


def test_phases_follow_the_epoch_of_the_batch_also_after_a_resume_with_workers(data, tmp_path):
    """ST-11: epochs 0 to 31 label by the first rule, 32 and later by the second; with workers that live from epoch to epoch."""
    exp = exp_of(data, tmp_path, self_epoch=32, max_epoch=40)
    exp.prepare()
    model = exp.get_model()
    points = model.criterion._points([torch.zeros(1, 2, 8, 8)]).points
    loader = exp.get_train_loader(workers=1)
    for start in (31, 33):
        batches = loader.batches(start * STEPS)
        for offset in range(2 * STEPS):
            batch = next(batches)
            assert batch.epoch == start + offset // STEPS
            count = len(batch)
            low, high = torch.zeros(count, 64), torch.zeros(count, 64)
            labels = model.criterion.make_labels(points, batch, low, high)
            some = (labels == 0).sum(1)
            # Without a point of high score mining takes 14 to 18; the first rule takes more, but for distractors.
            assert ((some >= 14) & (some <= 18)).all() == (batch.epoch >= 32)
    loader.close()


# -- steps that are not finite ------------------------------------------------------------------------------------------------


def test_a_bad_step_is_left_out(data, tmp_path):
    """ST-13, one process."""
    trainer = trainer_of(exp_of(data, tmp_path, bad_steps=(3,)))
    after = states_of(trainer)
    assert same(after[2], after[3]) and not same(after[3], after[4]) and trainer.guard.state_dict()["skipped"] == 1
    assert all(v.isfinite().all() for v in after[max(after)].values())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_gradient_is_left_out(data, tmp_path, value):
    """ST-13: a gradient that is not finite although every loss is."""
    trainer = trainer_of(exp_of(data, tmp_path, max_epoch=2))
    calls = []

    def spoil(gradient):
        calls.append(1)
        return gradient * value if len(calls) == 2 else gradient

    trainer.model.head.cls_pred.weight.register_hook(spoil)
    after = states_of(trainer)
    assert same(after[1], after[2]) and not same(after[2], after[3])


def test_a_scaler_backs_off_when_a_step_is_left_out(data, tmp_path):
    """ST-13: with scaled gradients; on the CPU such a scaler is put in by hand."""
    trainer = trainer_of(exp_of(data, tmp_path, max_epoch=2))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    calls = []

    def spoil(gradient):
        calls.append(1)
        return gradient * torch.inf if len(calls) == 2 else gradient

    trainer.model.head.cls_pred.weight.register_hook(spoil)
    after = states_of(trainer)
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[1][n], after[2][n]) for n in parameters)
    assert not same(after[2], after[3]) and trainer.scaler.get_scale() == 512


def test_a_loss_above_the_bound_is_left_out(data, tmp_path):
    trainer = trainer_of(exp_of(data, tmp_path, max_epoch=1, max_loss=1e-6, bad_steps=()))
    states = States()
    trainer.hooks.append(states)
    with pytest.raises(NonFiniteError):  # every step was left out
        trainer.train()
    assert same(states.after[0], states.after[STEPS])
    assert BadExp.max_loss == 1e4  # the recipe's


def test_what_stays_bad_ends_the_run_in_time(data, tmp_path):
    """ST-14: three restores, then exit code 3; the last epoch's failure is no success."""
    start = time.monotonic()
    values = {"max_epoch": 8, "bad_steps": tuple(range(3, 17))}
    trainer = trainer_of(exp_of(data, tmp_path, **values))
    with pytest.raises(NonFiniteError, match="brought back 3 times") as caught:
        trainer.train()

    def fail(argv):
        raise caught.value

    assert run_command(fail, []) == 3 and time.monotonic() - start < 60
    log = (tmp_path / "track" / "a" / "train_log.txt").read_text(encoding="utf-8")
    assert "training done" not in log and "stopped at" in log
    saved = torch.load(tmp_path / "track" / "a" / "last.pth", weights_only=True)
    assert all(v.isfinite().all() for v in saved["model"].values())


def test_failing_in_the_last_epoch_is_told(data, tmp_path):
    trainer = trainer_of(exp_of(data, tmp_path, max_epoch=2, bad_steps=(3, 4)))
    with pytest.raises(NonFiniteError, match="training ended, but 2 of its 4 steps"):
        trainer.train()
    log = (tmp_path / "track" / "a" / "train_log.txt").read_text(encoding="utf-8")
    assert log.count("left out, not finite") == 2


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_clipped_after_they_are_unscaled(data, tmp_path, scaled):
    """ST-15: a norm of 50 becomes 10."""
    exp = exp_of(data, tmp_path)
    model = exp.get_model()
    optimizer = exp.get_optimizer(model)
    torch.manual_seed(0)
    gradients = [torch.randn_like(p) for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=scaled)
    scaler.scale(torch.ones(()))  # makes the scale
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g * 50 / norm * (65536.0 if scaled else 1.0)
    scaler.unscale_(optimizer)
    norms = exp.get_parallel().clip(model)
    assert norms["all"].item() == pytest.approx(50, rel=1e-5)
    clipped = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert clipped.item() == pytest.approx(10, abs=1e-4)


# -- what is written down ------------------------------------------------------------------------------------------------------


def test_validation_pass_and_its_history(data, tmp_path):
    """The same pairs after every epoch; a resumed run tells of the epochs before it too; the model is left as it was."""
    values = {"validation_pairs": 6, "max_epoch": 3, "save_interval_steps": 1}
    stop(exp_of(data, tmp_path / "cut", **values), 2 * STEPS + 1)
    resumed = trainer_of(exp_of(data, tmp_path / "cut", **values), resume="")
    resumed.train()
    assert resumed.model.training or all(m.training or is_norm(m) for m in resumed.model.modules())
    run_dir = tmp_path / "cut" / "track" / "a"
    found = [line["values"] for line in lines_of(run_dir, "validation")]
    assert [row["epoch"] for row in found] == [1, 2, 3]
    assert set(found[0]) == {"epoch", "loss", "loss_pos", "loss_neg", "loss_iou", "l1", "overlap", "num_pos", "num_neg"}
    assert found[0]["num_pos"] == found[2]["num_pos"] and found[0]["num_neg"] == found[2]["num_neg"]  # the same labels
    log = (run_dir / "train_log.txt").read_text(encoding="utf-8")
    last = log[log.rindex("validation on 6 fixed pairs") :].splitlines()
    assert [row.split()[0] for row in last[3:6]] == ["1", "2", "3"]
    plain = trainer_of(exp_of(data, tmp_path / "plain", **{**values, "validation_pairs": 0}))
    assert same(states_of(plain)[3 * STEPS], resumed.model.state_dict())  # looking changes nothing
    assert read_history(run_dir / "metrics.jsonl", 2 * STEPS) == found[:2]


def test_validation_means_are_over_pairs():
    shares = [({"loss": 6.0}, 3), ({"loss": 1.0}, 1), ({}, 0)]
    assert pooled(shares) == {"loss": 1.75} and pooled([({}, 0)]) == {}
    assert "0.5000" in history_table([{"epoch": 1, "loss": 0.5}], 3)


@pytest.mark.parametrize("level", ["part", "tensor"])
def test_norms_are_recorded_by_level(data, tmp_path, level):
    exp = exp_of(data, tmp_path, max_epoch=1, log_norms=level, freeze_epochs=5, print_interval=2)
    trainer = trainer_of(exp)
    trainer.train()
    (line,) = lines_of(tmp_path / "track" / "a", "norms")
    values = line["values"]
    assert line["step"] == 2 and values["grad/all"] > 0
    assert values["ratio/all"] == pytest.approx(values["grad/all"] / values["weight/all"], rel=1e-4)
    names = {n.split("/", 1)[1] for n in values} - {"all"}
    if level == "part":
        assert names == {"template_branch", "search_branch", "head"}  # the backbone is frozen
    else:
        assert names == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    squares = sum(values[f"grad/{n}"] ** 2 for n in names)
    assert values["grad/all"] ** 2 == pytest.approx(squares, rel=1e-4)


def test_norms_by_hand():
    model = torch.nn.Linear(2, 1)
    model.weight.data = torch.tensor([[3.0, 4.0]])
    model.weight.grad = torch.tensor([[0.6, 0.8]])
    norms = {k: v.item() for k, v in norms_by_level(model, "tensor").items()}
    assert norms == pytest.approx(
        {"grad/weight": 1, "weight/weight": 5, "ratio/weight": 0.2, "grad/all": 1, "weight/all": 5, "ratio/all": 0.2}
    )


def test_a_frozen_backbone_without_weights_is_doubted(data, tmp_path, caplog):
    from loguru import logger

    said = []
    sink = logger.add(lambda message: said.append(str(message)), level="WARNING")
    exp_of(data, tmp_path, freeze_epochs=3).prepare()
    exp_of(data, tmp_path, freeze_epochs=0).prepare()
    logger.remove(sink)
    assert len([line for line in said if "keeps random ones" in line]) == 1
