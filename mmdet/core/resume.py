"""Going on with a run: the file is found and read before anything is built, and its state restored at the end.

Between the two stands :mod:`mmdet.core.continuation`, which refuses whatever would not be the same run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from mmdet.core import run
from mmdet.core.continuation import LOCAL, check_continuation
from mmdet.core.entries import TRAINING, check_entries
from mmdet.core.files import read_checkpoint
from mmdet.errors import CheckpointError
from mmdet.exp.base import Exp

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

_FULL_STATE = ("model", "optimizer", "epoch", "step")


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to go on from; its entries have been checked."""

    path: Path
    saved: dict[str, Any]

    @property
    def is_last(self) -> bool:
        """Whether this is what the run saved last, so that the next save keeps it as the epoch before."""
        return self.path.name == "last.pth"


def open_resume(exp: Exp, options: run.RunOptions) -> Resumption | None:
    """The checkpoint that ``options`` name; None when no resume is asked for. Gives the exp the values of its command line.

    Without a file it is the newest checkpoint of the newest run that can be read; damaged ones are named in the log. A file
    that was named must be good.
    """
    if options.resume is None:
        return None
    given = Path(options.resume) if options.resume else None
    if given is not None and not given.is_dir():
        found = Resumption(given, read_full_state(given, options.trust_checkpoint))
    else:
        folder = given or run.newest_run(Path(exp.output_dir) / exp.exp_name, options.experiment_name)
        found = _newest_good(folder, options.trust_checkpoint)
    name = found.saved["exp"]["name"]
    if name != exp.exp_name:
        raise CheckpointError(
            f"--resume {found.path}: the file was made by exp {name!r}, this is {exp.exp_name!r}. Give that run's exp with -f, "
            f"or fine-tune from its weights with -c {found.path}"
        )
    _adopt_values(exp, found)
    return found


def read_full_state(path: Path, trust: bool = False) -> dict[str, Any]:
    """The content of a file that can be resumed, every entry of the right type.

    Raises:
        CheckpointError: the file cannot be read, holds weights only, or an entry is not what it must be.
    """
    saved = read_checkpoint(path, trust)
    lacking = [key for key in _FULL_STATE if key not in saved]
    if lacking:
        raise CheckpointError(
            f"--resume {path}: the file has no {', '.join(lacking)}, it holds weights only. Fine-tune from it with -c {path}"
        )
    check_entries(saved, TRAINING, f"checkpoint {str(path)!r}", complete=True)
    return saved


def _newest_good(folder: Path, trust: bool) -> Resumption:
    faults = []
    for path in run.checkpoint_candidates(folder):
        try:
            saved = read_full_state(path, trust)
        except CheckpointError as error:
            faults.append(str(error))
            logger.warning(f"{error}. Trying the checkpoint before it")
            continue
        if faults:
            logger.warning(f"going on from {path}, {saved['step']} steps done; later steps are done again")
        return Resumption(path, saved)
    raise CheckpointError(
        f"--resume: no checkpoint in {str(folder)!r} can be resumed: " + ("; ".join(faults) or "there is none") + ". Nothing was "
        "started; a new run needs the same command without --resume"
    )


def _adopt_values(exp: Exp, found: Resumption) -> None:
    """The run's own command line counts where this one says nothing, so that it need not be typed again."""
    state, taken = found.saved["exp"], []
    now = exp.given()
    for name in state.get("given", {}):
        if name in LOCAL or name in now or name not in exp.field_names():
            continue
        before = getattr(exp, name)
        exp.set(name, state["values"][name], f"command line of {found.path.parent.name}")
        if getattr(exp, name) != before:
            taken.append(f"{name}={getattr(exp, name)}")
    if taken:
        logger.info(f"as on the command line that started {found.path.parent}: {', '.join(taken)}")
    exp.validate()


def restore(trainer: Trainer, found: Resumption) -> None:
    """Puts a built Trainer where the checkpoint was, once all that it says has been found to continue the same run."""
    saved, where = found.saved, f"--resume {found.path}"
    check_continuation(trainer, saved, where)
    rates = [{k: group[k] for k in ("lr", "base_lr")} for group in trainer.optimizer.param_groups]
    try:
        trainer.model.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        trainer.scaler.load_state_dict(saved["scaler"])
        if trainer.ema is not None:
            trainer.ema.load_state_dict(saved["ema"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: the state does not fit this run: {str(error).splitlines()[0]}") from error
    for group, own in zip(trainer.optimizer.param_groups, rates):  # the exp decides the rates, the file holds the buffers
        group.update(own)
    trainer.step, trainer.best = saved["step"], dict(saved["best"])
    trainer.evaluation_due = saved["evaluation_due"]
    done, steps = divmod(trainer.step, trainer.loader.steps_per_epoch)
    logger.info(f"resumed from {found.path}: {done} epochs and {steps} steps done, best {trainer.best}")
    if trainer.evaluation_due:
        logger.info(f"the evaluation after epoch {done} had not ended: it comes first")
    elif trainer.step == trainer.total_steps:
        logger.info(f"nothing is left to do: all {done} epochs are done (max_epoch={done + 1} would add one)")
