"""Additions to a multi-task run: files of certain iterations, and news to somebody outside."""

from __future__ import annotations

import atexit
import json
import subprocess
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

from loguru import logger

from mmdet.core.files import link_atomic
from mmdet.core.hooks import Hook

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

FINAL = "final.pth"
_TIMEOUT = 2.0  # seconds that a receiver of news has


def iteration_file(step: int) -> str:
    return f"iter_{step:06d}.pth"


class KeepIterations(Hook):
    """Keeps the full state every ``interval`` iterations as ``iter_NNNNNN.pth``, and the last one as ``final.pth``. The newest is
    ``last.pth``, which the Trainer writes itself.

    The Trainer saves after ``on_step_end``, so the file of an iteration is there when the next hook is called.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._saved: int | None = None  # iterations done in a last.pth that is still to be kept

    def on_train_start(self, trainer: Trainer) -> None:
        if trainer.resumption is not None and self._is_due(trainer):
            self._keep(trainer, trainer.step, trainer.resumption.path.name)

    def on_step_end(self, trainer: Trainer) -> None:
        self._keep_saved(trainer)
        inside = trainer.step % trainer.loader.steps_per_epoch
        if inside and self._is_due(trainer):
            self._saved = trainer.step

    def on_epoch_end(self, trainer: Trainer) -> None:
        self._keep_saved(trainer)
        if self._is_due(trainer):
            self._keep_newest(trainer, trainer.step)

    def on_train_end(self, trainer: Trainer) -> None:
        if trainer.rank == 0:
            link_atomic(trainer.run_dir / "last.pth", trainer.run_dir / FINAL)

    def _is_due(self, trainer: Trainer) -> bool:
        return bool(self.interval) and trainer.step > 0 and trainer.step % self.interval == 0

    def _keep_saved(self, trainer: Trainer) -> None:
        if self._saved is not None:
            self._keep_newest(trainer, self._saved)
            self._saved = None

    def _keep_newest(self, trainer: Trainer, step: int) -> None:
        """Unless that save found no room on the disk, and last.pth is an older one."""
        if trainer.rank == 0 and trainer.saver.saved_step == step:
            self._keep(trainer, step, "last.pth")

    def _keep(self, trainer: Trainer, step: int, source: str) -> None:
        target = trainer.run_dir / iteration_file(step)
        if trainer.rank == 0 and not target.exists():
            link_atomic(trainer.run_dir / source, target)


class Alert(Hook):
    """Tells somebody outside about a run: its start, steps that were left out, states that were brought back, a new best, its
    end, or that it ended before its time.

    ``url`` gets an HTTP POST of a JSON object; ``command`` is started with that object on its standard input (a plain program
    and its arguments, no shell). Both have two seconds, in a thread of their own; what they answer is not read, and what goes
    wrong with them is said once in the log file and never stops a run. Rank 0 alone speaks.
    """

    def __init__(self, url: str = "", command: tuple[str, ...] = ()) -> None:
        self.url, self.command = url, tuple(command)
        self._failed = False
        self._skipped, self._restores, self._best = 0, 0, None
        self._trainer: Trainer | None = None  # of a run that has not come to its end

    def on_train_start(self, trainer: Trainer) -> None:
        self._skipped, self._restores = trainer.guard.skipped, trainer.guard.restores
        self._best = trainer.best["value"]
        self._trainer = trainer
        atexit.register(self._at_exit)
        self.tell(trainer, "start")

    def on_step_end(self, trainer: Trainer) -> None:
        guard = trainer.guard
        if guard.restores > self._restores:
            self.tell(trainer, "rollback", times=guard.restores)
        elif guard.skipped > self._skipped:
            self.tell(trainer, "nan", skipped=guard.skipped)
        self._skipped, self._restores = guard.skipped, guard.restores

    def on_epoch_end(self, trainer: Trainer) -> None:
        if trainer.best["value"] != self._best:
            self._best = trainer.best["value"]
            self.tell(trainer, "new best", metric=trainer.best["metric"], value=self._best)

    def on_train_end(self, trainer: Trainer) -> None:
        self._trainer = None
        thread = self.tell(trainer, "finish", metric=trainer.best["metric"], value=trainer.best["value"])
        if thread is not None:  # the process is about to end, and the thread with it
            thread.join(_TIMEOUT)

    def _at_exit(self) -> None:
        """The process ends and the run did not: an error, or a signal that can be caught."""
        if self._trainer is not None and self._speaks(self._trainer):
            self._send(self._news(self._trainer, "crash"))

    def _speaks(self, trainer: Trainer) -> bool:
        return trainer.rank == 0 and bool(self.url or self.command)

    def _news(self, trainer: Trainer, event: str, **facts: Any) -> bytes:
        known = {"event": event, "exp": trainer.exp.exp_name, "run": str(trainer.run_dir), "iteration": trainer.step}
        return json.dumps({**known, **facts}).encode()

    def tell(self, trainer: Trainer, event: str, **facts: Any) -> threading.Thread | None:
        """Starts the message and returns its thread; None on other ranks, and where nobody wants to know."""
        if not self._speaks(trainer):
            return None
        thread = threading.Thread(target=self._send, args=(self._news(trainer, event, **facts),), daemon=True)
        thread.start()
        return thread

    def _send(self, body: bytes) -> None:
        try:
            if self.url:
                head = {"Content-Type": "application/json"}
                request = urllib.request.Request(self.url, body, head, method="POST")
                urllib.request.urlopen(request, timeout=_TIMEOUT).close()
            if self.command:
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                subprocess.run(self.command, input=body, timeout=_TIMEOUT, check=True, **quiet)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if not self._failed:
                logger.debug(f"an alert did not arrive ({type(error).__name__}: {error}); further ones are not mentioned")
            self._failed = True
