"""One rank's failure ends the whole job, soon, and is told once.

Work that can fail on one rank alone goes through :func:`gather_from_ranks` or :func:`compute_on_main`, which raise on every
rank. Everything else is announced in the job's key-value store, which every rank watches from a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from mmdet.core.distributed import all_gather_objects, broadcast_object, get_world_size, is_main
from mmdet.core.preempt import Stopped, interruptible
from mmdet.errors import UserError

T = TypeVar("T")
GRACE = 12.0  # s that a rank has to end by itself once another one, or it itself, has failed
_PERIOD = 0.5  # s between two looks
_KEY = "failure"
_watch: _Watch | None = None


class RankError(RuntimeError):
    """Another rank failed. ``rank`` says which, ``remote_traceback`` holds its traceback as text, ``signal`` the number of the
    signal that stopped it (0: it was an error), ``exit_code`` what its process ends with."""

    def __init__(self, rank: int, message: str, remote_traceback: str, signal: int = 0, exit_code: int = 1) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.signal, self.exit_code = signal, exit_code


def gather_from_ranks(work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every rank and returns all results, by rank, on every rank.

    An exception in any rank's work is raised on every rank: the rank's own where it happened, a ``RankError`` that names
    it elsewhere. So nobody waits for a rank that is gone. Results are pickled: plain data and arrays.
    """
    value, error = _attempt(work)
    outcomes = all_gather_objects((value, _describe(error)))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise RankError(rank, *failure)
    return [value for value, _ in outcomes]


def compute_on_main(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 alone and returns its result on every rank; an exception is raised on every rank."""
    value, error = _attempt(work) if is_main() else (None, None)
    if get_world_size() > 1:
        value, failure = broadcast_object((value, _describe(error)))
        if error is None and failure is not None:
            raise RankError(0, *failure)
    if error is not None:
        raise error
    return value


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        with interruptible():
            return work(), None
    except Exception as error:  # not swallowed: both callers raise it once the other ranks know
        return None, error


def _describe(error: Exception | None) -> tuple[str, str, int, int] | None:
    if error is None:
        return None
    number = error.number if isinstance(error, Stopped) else 0
    code = error.exit_code if isinstance(error, UserError) else 1
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), number, code


# -- the job's store --------------------------------------------------------------------------------------------------------


class _Watch:
    """Looks into the store for a failure of another rank; a process that does not end by itself then is ended."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.deadline, self.exit_code = float("inf"), 1
        self._at_rest = threading.Event()
        self._looking = store.clone() if hasattr(store, "clone") else store  # its own connection, where torch has that
        self._thread = threading.Thread(target=self._run, name="failures of other ranks", daemon=True)
        self._thread.start()

    def announce(self, message: str, exit_code: int) -> bool:
        """Whether this rank is the first; either way it must end within ``GRACE``."""
        self.deadline, self.exit_code = time.monotonic() + GRACE, exit_code
        mine = json.dumps({"rank": self.rank, "message": message})
        try:
            return self.store.compare_set(_KEY, "", mine) == mine.encode()
        except RuntimeError:  # the launcher, and the store with it, is gone
            return True

    def other(self) -> int | None:
        """The rank that failed, if it is another one."""
        if not self._looking.check([_KEY]):
            return None
        rank = json.loads(self._looking.get(_KEY))["rank"]
        return None if rank == self.rank else rank

    def rest(self) -> None:
        """Nothing more is asked of the store; a deadline that is set stays. Python must not end while a thread is in native code,
        since that aborts the process, with an exit code of its own."""
        self._at_rest.set()
        if self.deadline == float("inf"):
            self._thread.join(GRACE)

    def _run(self) -> None:
        while self.deadline == float("inf") and not self._at_rest.wait(_PERIOD):
            try:
                if self.other() is None:
                    continue
            except (RuntimeError, ValueError):  # the store is gone, and whoever kept it with it
                pass
            self.deadline = min(self.deadline, time.monotonic() + GRACE)
        while self.deadline < float("inf"):
            if time.monotonic() > self.deadline:
                sys.stderr.write(f"[rank {self.rank}] ended: it was still waiting {GRACE:.0f} s after the job had failed\n")
                sys.stderr.flush()
                os._exit(self.exit_code)
            time.sleep(0.1)


def start_watch(store: Any, rank: int) -> None:
    """``store``: one that all ranks of the job share."""
    global _watch
    _watch = _Watch(store, rank)


def stop_watch() -> None:
    """The work of this rank is done, or its process is about to end: that others end before it means nothing any more."""
    if _watch is not None:
        _watch.rest()


def announce(error: BaseException, patience: float = 2.0) -> bool:
    """Tells the other ranks of an error that ends this one, and returns whether it is the first of the job: one that follows
    from another rank's end (a broken connection, say) is not worth a second traceback.

    ``patience``: seconds to wait for a word of the rank that failed first. A ``RankError`` waits longer than the rank that it
    names: the launcher stops every process once one has ended, and would stop that rank before it has told anything.
    """
    if _watch is None:
        return not isinstance(error, RankError)
    if isinstance(error, RankError):
        if not error.signal:  # a rank that was told to stop announces nothing
            _await_word(2 * patience)
        return False  # that rank tells it
    if not isinstance(error, KeyboardInterrupt | Stopped):
        _await_word(patience)
    code = error.exit_code if isinstance(getattr(error, "exit_code", None), int) else 1
    return _watch.announce(f"{type(error).__name__}: {error}", code)


def _await_word(seconds: float) -> None:
    """Until another rank has announced a failure, at most ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError, ValueError):
            if _watch.other() is not None:
                return
        time.sleep(0.1)


def is_lost_connection(error: BaseException, told_to_end: bool) -> bool:
    """Whether an error of a job with several processes only says that another one is gone: it comes out of a collective, or the
    launcher had told this process to end when it came."""
    if get_world_size() == 1 or not isinstance(error, RuntimeError) or isinstance(error, RankError):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return told_to_end or any(f.f_globals.get("__name__", "").startswith("torch.distributed.") for f, _ in frames)
