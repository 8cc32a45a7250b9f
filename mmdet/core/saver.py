"""The files of a run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from mmdet.core.files import link_atomic, numbered_epochs, save_atomic, serialized, write_atomic
from mmdet.core.guard import require_finite
from mmdet.errors import UserError


class SaveError(UserError, OSError):
    """Nothing can be saved any more."""

    exit_code = 1


class Saver:
    """Writes ``last.pth``, ``best.pth``, ``epoch_NNN.pth`` (N epochs done) and ``weights.pth`` of one run folder, on rank 0.

    A file is replaced only by a whole new one. A disk that is full, or gone, costs a warning; after ``max_failed`` saves in a row
    the error is raised.
    """

    def __init__(self, run_dir: Path, keep: int, last_is_epoch: int | None = None, max_failed: int = 3) -> None:
        self.run_dir, self.keep, self.max_failed = run_dir, keep, max_failed
        self.failed = 0  # saves in a row
        self.saved_step: int | None = None  # the step that this Saver saved last
        self._last_is_epoch = last_is_epoch  # epochs done in the present last.pth, where it stands at an epoch's end
        self._unsaved_best: tuple[bytes, bytes | None] | None = None  # best.pth and weights.pth that found no room

    def save(
        self,
        state: Mapping[str, Any],
        epochs_done: int | None,
        weights: Mapping[str, Any] | None = None,
        best: bool = False,
        must: bool = False,
    ) -> bool:
        """Saves ``state``, and ``weights`` if given. Returns whether all is on the disk; where not, the old files still are.

        ``epochs_done`` is None inside an epoch. The last.pth of the epoch before is kept as ``epoch_NNN.pth``. ``best``: this is
        the best state so far. ``must``: there will be no later save, so a failure is raised at once.

        Raises:
            SaveError: it failed, and it must not, or it did so ``max_failed`` times in a row.
            NonFiniteError: something in it is not finite; nothing was written.
        """
        require_finite(state, "the checkpoint")
        if weights is not None:
            require_finite(weights, "the weights")
        try:
            self._write(state, epochs_done, weights, best)
        except OSError as error:
            self.failed += 1
            if must or self.failed >= self.max_failed:
                times = "" if self.failed == 1 else f" (the save failed {self.failed} times in a row)"
                raise SaveError(error.errno, f"{error.strerror or error}{times}. {self._on_disk()}") from error
            if best:
                self._unsaved_best = (serialized(state), None if weights is None else serialized(weights))
            left = self.max_failed - self.failed
            logger.warning(
                f"{error.strerror or error}. Training goes on; {left} more such save{'s' if left > 1 else ''} in a row "
                f"end{'' if left > 1 else 's'} it (max_failed_saves={self.max_failed}). {self._on_disk()}"
            )
            return False
        if self.failed:
            logger.info(f"saving works again: step {state['step']} is on the disk")
        self.failed, self.saved_step = 0, state["step"]
        return True

    def _write(self, state: Mapping[str, Any], epochs_done: int | None, weights: Mapping[str, Any] | None, best: bool) -> None:
        """last.pth comes last: a run killed in between does some steps again, while a last.pth that knows of a better best.pth
        than there is could not be mended."""
        last = self.run_dir / "last.pth"
        if self._last_is_epoch is not None and last.is_file() and self.keep:
            link_atomic(last, self.run_dir / f"epoch_{self._last_is_epoch:03d}.pth")
        if not best:
            self._write_unsaved_best()
        if weights is not None:
            save_atomic(weights, self.run_dir / "weights.pth")
        if best:
            save_atomic(state, self.run_dir / "best.pth")
            link_atomic(self.run_dir / "best.pth", last)
        else:
            save_atomic(state, last)
        self._last_is_epoch, self._unsaved_best = epochs_done, None
        for path in numbered_epochs(self.run_dir)[self.keep :]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _write_unsaved_best(self) -> None:
        """The state that became the best when it could not be saved: every later state counts on it."""
        if self._unsaved_best is not None:
            state, weights = self._unsaved_best
            if weights is not None:
                write_atomic(weights, self.run_dir / "weights.pth")
            write_atomic(state, self.run_dir / "best.pth")

    def _on_disk(self) -> str:
        if self.saved_step is not None:
            return f"The last good save is that of step {self.saved_step}"
        before = (self.run_dir / "last.pth").is_file()
        return "The last good save is that of before this start" if before else "Nothing is saved yet"
