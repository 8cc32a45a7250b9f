"""What a checkpoint holds of a Trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from mmdet.core import run
from mmdet.errors import UsageError
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
        "evaluation_due": trainer.evaluation_due,
        "guard": trainer.guard.state_dict(),
        **identity(trainer),
        "conditions": trainer.conditions,
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
        "data_seed": trainer.data_seed,
        "versions": run.versions(),
    }


def conditions(trainer: Trainer) -> dict[str, Any]:
    """What a resume must find as it was, besides the fields of the exp, and some things that it only mentions."""
    exp_file = Path(trainer.exp.exp_file)
    source = exp_file.read_bytes() if exp_file.is_file() else b""
    return {
        "data": trainer.exp.data_facts(),
        "steps_per_epoch": trainer.loader.steps_per_epoch,
        "precision": trainer.amp,
        "optimizer": type(trainer.optimizer).__name__,
        "device": trainer.device.type,
        "world": trainer.world,
        "exp_file": hashlib.blake2b(source, digest_size=8).hexdigest(),
    }


def load_start(trainer: Trainer) -> None:
    """The weights that training starts from: the file of ``-c``, else that of ``pretrained_backbone``; a run that goes on needs
    neither."""
    exp, options = trainer.exp, trainer.options
    if trainer.resumption is not None:
        return
    if options.ckpt:
        logger.info(f"fine-tuning from {exp.load_pretrained(trainer.model, options.ckpt, options.load_options())}")
        if exp.pretrained_backbone:
            logger.info(f"pretrained_backbone={exp.pretrained_backbone} is not read: -c {options.ckpt} replaces it")
    elif exp.pretrained_backbone:
        report = exp.load_backbone(trainer.model, exp.pretrained_backbone, options.load_options())
        logger.info(f"pretrained backbone from {report}")
    elif options.raw or options.load_map or options.ignore:
        raise UsageError("--raw, --load-map and --ignore choose what is taken of a file: give one with -c")
