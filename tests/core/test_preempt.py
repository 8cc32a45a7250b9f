"""Stop signals: the step ends, everything is saved, the exit code is 128 + the signal's number, and a resume loses nothing."""

import os
import signal

import pytest
import torch
from toy_task import LineEvaluator, LineExp, PointLoader, line_exp

from mmdet.core import read_checkpoint
from mmdet.core.failure import compute_on_main
from mmdet.core.hooks import Hook
from mmdet.core.preempt import Stopped, StopSignals, interruptible
from mmdet.core.run import RunOptions
from mmdet.core.trainer import Trainer


def trainer_of(exp, **options):
    return Trainer(exp, RunOptions(workers=0, device="cpu", progress=False, **options))


class Send(Hook):
    """Signals this process in a step."""

    def __init__(self, step, *numbers):
        self.step, self.numbers = step, numbers

    def on_step_end(self, trainer):
        if trainer.step == self.step:
            for number in self.numbers:
                os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = trainer_of(line_exp(tmp_path_factory.mktemp("whole")), experiment_name="a")
    trainer.train()
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("step", [1, 3, 4, 7, 16])
def test_the_run_stops_and_goes_on(tmp_path, whole, name, step):
    number = getattr(signal, name)
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    trainer = trainer_of(line_exp(tmp_path), experiment_name="a")
    trainer.hooks.append(Send(step, number))
    if step == 16:  # too late: the run is done
        trainer.train()
        return
    with pytest.raises(Stopped) as caught:
        trainer.train()
    assert caught.value.exit_code == 128 + number
    assert {s: signal.getsignal(s) for s in before} == before
    log = (tmp_path / "line" / "a" / "train_log.txt").read_text()
    assert f"stopped by {name}" in log and "--resume" in log and "Traceback" not in log
    saved = read_checkpoint(tmp_path / "line" / "a" / "last.pth")
    assert saved["step"] == step  # the signal came after a step: the next one was not begun
    resumed = trainer_of(line_exp(tmp_path), resume="")
    resumed.train()
    assert all(torch.equal(v, whole[k]) for k, v in resumed.model.state_dict().items())


def test_a_second_interrupt_stops_at_once(tmp_path):
    trainer = trainer_of(line_exp(tmp_path), experiment_name="a")
    trainer.hooks.append(Send(5, signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert read_checkpoint(tmp_path / "line" / "a" / "last.pth")["step"] == 4


def test_nobody_waits_for_data_that_do_not_come(tmp_path, whole):
    class Stuck(LineExp):
        def get_prefetcher(self, batches, device):
            for batch in batches:
                if batch.step == 6:
                    os.kill(os.getpid(), signal.SIGTERM)
                    while True:
                        pass
                yield batch

    exp = line_exp(tmp_path, kind=Stuck)
    with pytest.raises(Stopped):
        trainer_of(exp, experiment_name="a").train()
    assert read_checkpoint(tmp_path / "line" / "a" / "last.pth")["step"] == 6
    resumed = trainer_of(line_exp(tmp_path), resume="")
    resumed.train()
    assert all(torch.equal(v, whole[k]) for k, v in resumed.model.state_dict().items())


@pytest.mark.parametrize("swallow", [False, True])
def test_data_code_that_catches_every_exception_does_not_hide_the_signal(tmp_path, whole, swallow):
    class Catching(LineExp):
        def get_prefetcher(self, batches, device):
            for batch in batches:
                try:
                    if batch.step == 6:
                        os.kill(os.getpid(), signal.SIGTERM)
                except Exception as error:  # as the loader does, to name the image
                    if not swallow:
                        raise RuntimeError(f"image 7: {error}") from error
                yield batch

    exp = line_exp(tmp_path, kind=Catching)
    with pytest.raises(Stopped):
        trainer_of(exp, experiment_name="a").train()
    assert read_checkpoint(tmp_path / "line" / "a" / "last.pth")["step"] == 6
    resumed = trainer_of(line_exp(tmp_path), resume="")
    resumed.train()
    assert all(torch.equal(v, whole[k]) for k, v in resumed.model.state_dict().items())


def test_the_lock_is_free_before_a_signal_can_kill(tmp_path):
    """The launcher sends SIGTERM to the other processes as soon as the first one has ended."""
    trainer = trainer_of(line_exp(tmp_path), experiment_name="a")
    close = trainer.recorder.close
    trainer.recorder.close = lambda: (os.kill(os.getpid(), signal.SIGTERM), close())
    trainer.train()
    assert not (tmp_path / "line" / "a" / "run.lock").exists()


class SlowJudge(LineEvaluator):
    def evaluate(self, model):
        def work():
            os.kill(os.getpid(), signal.SIGTERM)
            while True:  # for minutes, on a real data set
                pass

        return compute_on_main(work)


class Judged(LineExp):
    def get_evaluator(self, split="val", **options):
        return SlowJudge(PointLoader(self.batch_size, self.seed))


def test_an_evaluation_is_left_at_once_and_comes_first_after_the_resume(tmp_path, whole):
    exp = line_exp(tmp_path, kind=Judged)
    with pytest.raises(Stopped):
        trainer_of(exp, experiment_name="a").train()
    saved = read_checkpoint(tmp_path / "line" / "a" / "last.pth")
    assert saved["evaluation_due"] and saved["step"] == 8
    resumed = trainer_of(line_exp(tmp_path), resume="")
    resumed.train()
    assert resumed.evaluator.calls == 2
    assert all(torch.equal(v, whole[k]) for k, v in resumed.model.state_dict().items())


def test_work_is_left_only_where_the_trainer_allows_it():
    signals = StopSignals()
    signals.install()
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.number == signal.SIGTERM
        with signals.allowed(), pytest.raises(Stopped), interruptible():
            pytest.fail("a signal had come before")
    finally:
        signals.close()
