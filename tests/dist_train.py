"""Training runs over several processes on toy images, with everything written down by which they can be compared."""

import contextlib
import hashlib
import itertools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from frozen import freeze_norms, settle_norms
from toy import make_toy

from mmdet.core import Trainer
from mmdet.core.hooks import Hook
from mmdet.core.run import RunOptions
from mmdet.exp import get_exp

IMAGES, BATCH, EPOCHS = 10, 4, 7  # 3 steps an epoch, the last batch completed from the next permutation: 21 steps
EMPTY = (2, 3, 5, 8)  # images without boxes, so that some ranks see none in a step
COMMON = (
    f"batch_size={BATCH}",
    f"recipe_batch_size={BATCH}",
    f"max_epoch={EPOCHS}",
    f"eval_interval={EPOCHS}",
    "warmup_epochs=1",
    f"basic_lr_per_img={0.01 / 64}",
    "clip_norm=5",
    "ema=True",
    "ema_decay=0.9",
    "print_interval=1",
    "input_size=96",
    "test_size=96",
    "warmup_pass=off",
)
WORDS = {
    "ppyoloe_s": ("static_assigner_epoch=3", "multiscale=(1.0,1.34)"),
    "yolox_nano": ("no_aug_epochs=2", "multiscale=(1.0,1.34)", "multiscale_interval=1"),
    "ppyolo_r18vd": ("keep_prob=1", "multiscale=(1.0,1.34)", "milestones=(3,)"),
    "fcos_r50": ("channels=64", "norm=batch", "freeze_at=0", "input_size=96"),
}


def make_data(path) -> Path:
    """Ten toy images of three classes, four of them without boxes."""

    def edit(coco, split):
        coco["annotations"] = [a for a in coco["annotations"] if a["image_id"] not in EMPTY]

    return make_toy(path, IMAGES, 3, edit=edit)


class StopAt(Hook):
    """Ends the run at the end of a step, before anything is saved of it."""

    class Reached(Exception):  # noqa: N818
        pass

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.step:
            raise self.Reached


class Witness:
    """What a rank saw and decided: of each image of each step its id, its pixels, and which point learns which box."""

    def __init__(self, trainer) -> None:
        self.rows: dict[tuple[int, int], tuple] = {}
        self.positives: list[int] = []  # of this rank, step by step
        criterion, self.trainer = trainer.model.criterion, trainer
        if hasattr(criterion, "assign"):
            self._assign, criterion.assign = criterion.assign, self.assign
        else:  # assignments depend on the boxes alone
            criterion.register_forward_pre_hook(lambda _, given: self.note(given[1], [b""] * len(given[1])))

    def __deepcopy__(self, memo):
        return self  # copies of the model must not copy the Trainer

    def assign(self, predictions, batch, *args):
        assigned = self._assign(predictions, batch, *args)
        self.positives.append(int(assigned.positive.sum()))
        index = torch.where(assigned.positive, assigned.box_index, -1)
        self.note(batch, [row.numpy().tobytes() for row in index])
        return assigned

    def note(self, batch, assignments) -> None:
        first = self.trainer.rank * len(batch)
        for row, (image_id, index) in enumerate(zip(batch.image_ids, assignments)):
            digests = (hashlib.sha1(data).hexdigest()[:12] for data in (batch.images[row].numpy().tobytes(), index))
            self.rows[batch.step, first + row] = (image_id, *digests)


def build(name, folder, words=(), double=False, resume=None, settled=True) -> Trainer:
    """A Trainer of a shipped exp with frozen batch norms on this process's rank, without an evaluator.

    ``settled`` norms have the statistics of the first six total batches; else those that they are made with.
    """
    exp = get_exp(name, [*COMMON, *WORDS[name], *words])
    for field, value in {"data_dir": str(Path(folder) / "data"), "output_dir": str(Path(folder) / "out")}.items():
        exp.set(field, value, "command line")
    fresh = exp.get_model
    changed = {"get_model": lambda: _prepared(exp, fresh(), double, settled), "get_evaluator": lambda *_, **__: None}
    exp.__dict__.update(changed)
    return Trainer(exp, RunOptions(device="cpu", workers=0, experiment_name="run", progress=False, resume=resume))


def _prepared(exp, model, double, settled):
    if settled:
        settle_norms(model, itertools.islice(exp.get_train_loader(workers=0).batches(), 6))
    freeze_norms(model)
    return model.double() if double else model


def run(name, folder, words=(), double=False, resume=None, settled=True, stop_at=0) -> dict:
    """Trains to the end, or until ``stop_at`` steps are done, and returns weights, average and what the witness wrote."""
    trainer = build(name, folder, words, double, resume, settled)
    first = trainer.step
    witness = Witness(trainer)
    if stop_at:
        trainer.hooks.append(StopAt(stop_at))
    start = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    with contextlib.suppress(StopAt.Reached):
        trainer.train()
    state = trainer.model.state_dict()
    return {
        "first": first,
        "steps": trainer.step,
        "start": start,
        "model": dict(state),
        "ema": dict(trainer.ema.running_state()["average"]),
        "updates": trainer.ema.updates,
        "rows": witness.rows,
        "positives": witness.positives,
    }


def run_many(jobs) -> list[dict]:
    """The runs ``jobs`` (keyword arguments each), one after another in one process group."""
    results = []
    for job in jobs:
        torch.manual_seed(1000 + dist.get_rank())  # nothing may depend on where the generators stood
        results.append(run(**job))
        dist.barrier()
    return results


def distance(a: dict, b: dict) -> float:
    """Greatest difference of any two values of the same name."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k].astype(np.float64) - b[k].astype(np.float64)).max(initial=0)) for k in a)
