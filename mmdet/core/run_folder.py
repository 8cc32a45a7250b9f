"""Which folder a run has, and what is done there before training starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmdet.core import run
from mmdet.core.files import remove_leftovers
from mmdet.core.logger import LOG_FILE, open_log_file
from mmdet.core.resume import enter_folder
from mmdet.exp.load import exp_state

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


def choose_run_dir(trainer: Trainer) -> Path:
    """That of the run that goes on, or a new one, which is not made yet; the same on every rank."""
    if trainer.resumption is not None:
        return trainer.resumption.path.parent
    return run.new_run_dir(Path(trainer.exp.output_dir) / trainer.exp.exp_name, trainer.options.experiment_name)


def enter_run_dir(trainer: Trainer) -> str:
    """On rank 0: makes or enters the folder, takes its lock (``trainer.lock``) and opens the log and the metrics. Returns the
    folder, since the name of a time-stamped one may change.

    Raises:
        UsageError: the folder cannot be written to, or another run has it or left its checkpoints there meanwhile.
    """
    resumption = trainer.resumption
    trainer.lock = run.claim_run_dir(trainer.run_dir, trainer.options, resumption is not None)
    folder = trainer.lock.run_dir
    if resumption is None:
        run.require_new(folder)
    remove_leftovers(folder)
    open_log_file(folder / LOG_FILE)
    if resumption is None:
        run.write_record(folder, exp_state(trainer.exp), trainer.options)
        trainer.recorder.open(folder)
    else:
        enter_folder(resumption)
        trainer.recorder.open(folder, (trainer.step, resumption.path))
    return str(folder)
