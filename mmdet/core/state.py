"""What a checkpoint holds of a Trainer, and how a Trainer goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from mmdet.core import checkpoint, run
from mmdet.errors import CheckpointError
from mmdet.exp.load import exp_state

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


def training_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that the next step depends on: plain values and tensors. Sample order, augmentation, sizes and schedule
    follow from the step; no generator's state is needed."""
    return {
        "model": trainer.model.state_dict(),
        "ema": None if trainer.ema is None else trainer.ema.state_dict(trainer.model),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "epoch": trainer.epoch,
        "step": trainer.step,
        "position": trainer.step % trainer.loader.steps_per_epoch,
        "best": dict(trainer.best),
        **identity(trainer),
    }


def judged_weights(trainer: Trainer) -> dict[str, Any]:
    """The weights that evaluation sees, with what a user of them must know."""
    model = trainer.model if trainer.ema is None else trainer.ema.module(trainer.model)
    kind = "raw" if trainer.ema is None else "ema"
    return {"model": model.state_dict(), "weights": kind, "step": trainer.step, **identity(trainer)}


def identity(trainer: Trainer) -> dict[str, Any]:
    """What every file says about itself."""
    exp = trainer.exp
    return {
        "exp": exp_state(exp),
        "overrides": exp.override_words,
        "class_names": list(exp.label_names()),
        "data_seed": 0,
        "versions": run.versions(),
    }


def resume(trainer: Trainer) -> Path:
    """Restores everything from the file that the options name, strictly; returns the folder in which the run goes on."""
    path = _resume_file(trainer)
    saved = checkpoint.read_checkpoint(path)
    lacking = [key for key in checkpoint.FULL_STATE if key not in saved]
    if lacking:
        raise CheckpointError(
            f"--resume {path}: the file has no {', '.join(lacking)}, it holds weights only. Fine-tune from it with -c {path}"
        )
    if (saved["ema"] is None) != (trainer.ema is None):
        raise CheckpointError(
            f"--resume {path}: the file was trained with ema={saved['ema'] is not None}, this run has ema={trainer.exp.ema}"
        )
    try:
        trainer.model.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"--resume {path}: the file belongs to another model: {error}") from error
    fresh = {g["name"]: g for g in trainer.exp.get_optimizer(trainer.model).param_groups}
    for group in trainer.optimizer.param_groups:  # the exp decides the rates, the file holds the buffers
        group.update({k: fresh[group["name"]][k] for k in ("base_lr", "weight_decay")})
    trainer.scaler.load_state_dict(saved["scaler"])
    if trainer.ema is not None:
        trainer.ema.load_state_dict(saved["ema"])
    trainer.step, trainer.best = int(saved["step"]), dict(saved["best"])
    logger.info(f"resumed from {path}: {trainer.step} steps done, best {trainer.best}")
    return path.parent


def _resume_file(trainer: Trainer) -> Path:
    if trainer.options.resume:
        return Path(trainer.options.resume)
    exp_dir = Path(trainer.exp.output_dir) / trainer.exp.exp_name
    return run.checkpoint_candidates(run.newest_run(exp_dir, trainer.options.experiment_name))[0]
