"""Runs of the Trainer on the toy tasks, alone or on several ranks, with everything written down by which they are compared."""

import shutil
from pathlib import Path

import torch
from mt_toy import ToyExp, colours, detection, digest, toy_exp
from torch import nn

from mmdet.core import Trainer
from mmdet.core.distributed import get_rank
from mmdet.core.hooks import Hook
from mmdet.core.run import RunOptions
from mmdet.errors import NonFiniteError
from mmdet.families.yolox.loss import YOLOXCriterion


class Spoilt(nn.Module):
    """A criterion whose losses are NaN in the given iterations (counted from 0)."""

    def __init__(self, criterion, steps):
        super().__init__()
        self.criterion, self.steps = criterion, steps

    def forward(self, predictions, batch):
        out = self.criterion(predictions, batch)
        if batch.step in self.steps:
            out.losses = {name: value * torch.nan for name, value in out.losses.items()}
        return out


def spoilt_exp(steps):
    class SpoiltExp(ToyExp):
        tasks = [detection("detA", "a", 3), detection("detB", "b", 2, shards=2), colours()]

        def get_tasks(self):
            from dataclasses import replace

            a, b, c = super().get_tasks()
            return [a, replace(b, criterion=lambda: Spoilt(YOLOXCriterion(2, l1_from_epoch=0), steps)), c]

        def get_evaluator(self, split="val", **options):
            return None

    return SpoiltExp


class Unjudged(ToyExp):
    """Without evaluations, which only cost time here."""

    def get_evaluator(self, split="val", **options):
        return None


class Notes(Hook):
    """Digests after every step, and the numbers of the guard."""

    def __init__(self):
        self.states, self.skipped, self.restores = [], [], []

    def on_step_end(self, trainer):
        model = dict(trainer.model.named_parameters())
        momentum = {f"{i} {k}": v for i, s in trainer.optimizer.state_dict()["state"].items() for k, v in s.items()}
        average = trainer.ema.running_state()["average"]
        self.states.append((digest(model), digest(momentum), digest(average), trainer.ema.updates))
        self.skipped.append(trainer.guard.skipped)
        self.restores.append(trainer.guard.restores)


def train(data, out, kind=Unjudged, resume=None, workers=0, **fields):
    """(trainer, notes, error) of a run."""
    exp = toy_exp(kind, data_dir=str(data), output_dir=str(out), **fields)
    trainer = Trainer(exp, RunOptions(workers=workers, device="cpu", resume=resume, progress=False))
    notes = Notes()
    trainer.hooks.append(notes)
    try:
        trainer.train()
    except NonFiniteError as error:
        return trainer, notes, str(error)
    return trainer, notes, ""


def losses_of(trainer):
    """Every logged number of every step, bit for bit."""
    import json

    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    skip = ("time", "step", "kind", "epoch")
    return {line["step"]: {k: v for k, v in line.items() if k not in skip} for line in lines if line["kind"] == "train"}


def state_of(trainer):
    trainer.parallel.synchronize(trainer.model, trainer.optimizer, trainer.ema)
    model = {n: v.double() for n, v in trainer.model.state_dict().items()}
    average = {f"ema {n}": v.double() for n, v in trainer.ema.running_state()["average"].items()}
    return model | average


def moved(run_dir: Path, target: Path, name: str) -> str:
    """A checkpoint of a run in a folder of its own, to be resumed there."""
    if get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        for file in ("run.json", "exp.py"):
            if (run_dir / file).exists():
                shutil.copy(run_dir / file, target / file)
        shutil.copy(run_dir / name, target / name)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return str(target / name)


KEEP = {"save_interval": 10, "max_iter": 20, "eval_interval": 20}


def half_runs(data, out, checkpoint):
    """On these ranks: a whole run with a file at half time, and the second half of a run that other ranks began."""
    whole, _, _ = train(data, out / "whole", **KEEP)
    state = state_of(whole)
    resumed, _, _ = train(data, out / "resumed", resume=moved(checkpoint.parent, out / "taken", checkpoint.name), **KEEP)
    return {
        "whole": state,
        "resumed": state_of(resumed),
        "half": str(whole.run_dir / "iter_000010.pth"),
        "losses": losses_of(whole),
    }


def spoilt_runs(data, out, checkpoint):
    """MT-16, MT-17 and MT-19 on these ranks."""
    fields = {"max_iter": 12, "eval_interval": 12, "snapshot_interval": 5}
    single, notes, error = train(data, out / "single", spoilt_exp({7}), **fields)
    log = (single.run_dir / "train_log.txt").read_text() if get_rank() == 0 else ""
    result = {"single": (notes.states, notes.skipped, error, log)}
    for optimizer in ("sgd", "adamw"):
        steps = set(range(7, 40))
        fields = {"max_iter": 40, "eval_interval": 40, "snapshot_interval": 5, "optimizer": optimizer}
        _, notes, error = train(data, out / optimizer, spoilt_exp(steps), **fields)
        result[optimizer] = (notes.states, notes.skipped, notes.restores, error)
    return result | half_runs(data, out / "halves", checkpoint)


def part_run(data, out, checkpoint=""):
    """On these ranks: a run, or the rest of one, with files at 7 and 14; its final state and its folder."""
    fields = {**KEEP, "save_interval": 7}
    resume = moved(Path(checkpoint).parent, out / "taken", Path(checkpoint).name) if checkpoint else None
    trainer, _, _ = train(data, out / "run", resume=resume, **fields)
    return state_of(trainer), str(trainer.run_dir)
