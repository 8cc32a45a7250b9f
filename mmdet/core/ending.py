"""What is told when a run ends before its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loguru import logger

from mmdet.core import failure
from mmdet.core.logger import report_failure
from mmdet.core.preempt import Stopped, signal_name

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


def report_end(trainer: Trainer, error: BaseException) -> None:
    """Tells of a stop signal, of this rank's failure (and the other ranks of it), or that another rank is gone; once per job, as
    far as the ranks can know."""
    trainer.recorder.stop_bar()
    folder = trainer.run_dir if trainer.saver is not None else None
    if isinstance(error, Stopped):
        saved = "all is saved" if trainer.is_saved else "the last save had failed, so later steps are lost"
        logger.warning(f"stopped by {signal_name(error.number)} at {trainer.stage}: {saved}; --resume {folder} goes on")
        error.reported = True
        return
    is_first = failure.announce(error)
    if is_first and failure.is_lost_connection(error, told_to_end=trainer.signals.number != 0):
        saved = f"; --resume {folder} goes on from the last save" if folder and (folder / "last.pth").is_file() else ""
        logger.error(f"stopped at {trainer.stage}: another process of this job ended without a word (out of memory?){saved}")
        error.reported = True
        return
    report_failure(error, trainer.stage, folder, secondary=not is_first)
