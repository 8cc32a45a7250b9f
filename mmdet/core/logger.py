"""Where a run's words and numbers go: console, ``train_log.txt``, ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from rich.console import Console

from mmdet.errors import UserError

LOG_FILE = "train_log.txt"  # of a run folder
FORMAT = "{time:HH:mm:ss} | {level: <7} | {message}"
_LONGEST_ERROR = 1000  # characters; some errors list every tensor of a model
_SHORT = 150  # characters of an error that follows from another one
_PATIENCE = 1.0  # s in which rank 0 gives a warning that all ranks give
_LOOK_BACK = 1 << 16  # bytes of the log in which it is looked for


class LineFile:
    """Appends texts that end with a newline, each by one write at the file's end: several processes can share a file, and a
    process that is killed leaves whole lines."""

    def __init__(self, path: Path, create: bool = True) -> None:
        """Raises:
        OSError: the file cannot be opened; without ``create`` also when there is none."""
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0), 0o644)

    def write(self, text: str) -> None:
        """Raises:
        OSError: not all of it could be written (a full disk)."""
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._handle, data) :]

    def write_or_nothing(self, text: str) -> None:
        """As ``write``, but a part of a line does not stay. For a file that no other process writes to."""
        size = os.fstat(self._handle).st_size
        try:
            self.write(text)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, size)
            raise

    def cut_broken_line(self) -> None:
        """Removes a last line without an end, which a machine that lost its power may have left."""
        size = os.fstat(self._handle).st_size
        tail = self.tail(1 << 20)
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._handle, size - len(tail) + tail.rfind(b"\n") + 1)

    def tail(self, size: int) -> bytes:
        """The last ``size`` bytes, or fewer."""
        whole = os.fstat(self._handle).st_size
        os.lseek(self._handle, max(whole - size, 0), os.SEEK_SET)
        return os.read(self._handle, size)

    def close(self) -> None:
        os.close(self._handle)


class _Buffer:
    """Keeps messages until there is a run folder to write them to: a run that fails to start leaves no folder behind.

    Rank 0 writes all of them. Of the other ranks, warnings and errors go to the same file; warnings with a little delay, since
    those that rank 0 gives in the same words are left out.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.sink: int | None = None
        self._file: LineFile | None = None
        self._kept: list[tuple[str, str]] = []  # (message, line) that wait for the file, or for rank 0
        self._timer: threading.Timer | None = None
        self._lost = False

    def __call__(self, message: Any) -> None:
        self._kept.append((message.record["message"], str(message)))
        if self._file is None:
            return
        if self.rank == 0 or message.record["level"].no >= logger.level("ERROR").no:
            self._flush()
        elif self._timer is None:
            self._timer = threading.Timer(_PATIENCE, self._flush)
            self._timer.daemon = True
            self._timer.start()

    def add(self, text: str) -> None:
        """A text that is no message."""
        self._kept.append(("", text if self.rank == 0 else f"[rank {self.rank}] {text}"))
        if self._file is not None:
            self._flush()

    def open(self, path: Path) -> None:
        """Raises:
        OSError: it cannot be written; on other ranks, rank 0 has made none that is seen here."""
        self._file = LineFile(path, create=self.rank == 0)
        self._flush()

    def _flush(self) -> None:
        self._timer, file = None, self._file
        if file is None:
            return
        kept, self._kept = self._kept, []
        told = file.tail(_LOOK_BACK).decode("utf-8", "replace") if self.rank else ""
        for message, line in kept:
            if message and message in told:
                continue
            try:
                file.write(line)
                self._lost = False
            except OSError as error:
                if not self._lost:
                    sys.stderr.write(f"{file.path}: {error.strerror}; lines of the log are lost\n")
                self._lost = True

    def close(self) -> None:
        timer = self._timer
        if timer is not None:
            timer.cancel()
            timer.join()  # it may be writing
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._kept, self._lost = [], False


_buffer = _Buffer()
console = Console(stderr=True, highlight=False, soft_wrap=True)


def setup_logging(rank: int = 0) -> None:
    """Console, and a log that :func:`open_log_file` later writes to disk. Of other ranks than 0 the console shows errors only."""
    logger.remove()
    logger.add(_print_line, format=_format(rank), level="ERROR" if rank else "INFO", colorize=False)
    keep_for_log_file(rank)


def _format(rank: int) -> str:
    return FORMAT if rank == 0 else FORMAT.replace("{message}", f"[rank {rank}] {{message}}")


def keep_for_log_file(rank: int = 0) -> None:
    """From now on messages are kept for the log file of the run that is being built; of ranks above 0, warnings and errors."""
    if _buffer.sink is not None:
        with contextlib.suppress(ValueError):  # somebody else removed all sinks
            logger.remove(_buffer.sink)
    _buffer.close()
    _buffer.rank = rank
    level = "WARNING" if rank else "DEBUG"
    _buffer.sink = logger.add(_buffer, format=_format(rank), level=level, colorize=False, backtrace=False, diagnose=False)


def _print_line(message: str) -> None:
    if console.is_terminal:
        console.print(str(message).rstrip("\n"), markup=False)  # goes above a progress bar
    else:
        sys.stderr.write(str(message))
        sys.stderr.flush()


def open_log_file(path: Path) -> None:
    """Rank 0 makes the file and calls this first. On a machine that does not see rank 0's file, warnings go to the console.

    Raises:
        OSError: rank 0 cannot write there.
    """
    try:
        _buffer.open(path)
    except OSError:
        rank = _buffer.rank
        if rank == 0:
            raise
        warnings = {"level": "WARNING", "filter": lambda record: record["level"].no < logger.level("ERROR").no}
        logger.add(_print_line, format=_format(rank), colorize=False, **warnings)
        logger.warning(f"rank 0's log {path} is not to be seen from this machine: warnings of this rank are shown here only")


def close_log_file() -> None:
    _buffer.close()


def log_file_only(text: str) -> None:
    """Text for the log file alone, such as a traceback whose last line the console shows."""
    _buffer.add(text.rstrip("\n") + "\n")


def report_failure(error: BaseException, where: str, run_dir: Path | None, secondary: bool = False) -> None:
    """The traceback to the log file (and, unless the message says all, to the console), the error as the last line.

    Marks the error as reported, so that the command line does not say it again. A ``secondary`` one follows from the failure of
    another rank, which has told its own: one short line.
    """
    error.reported = True
    if secondary:
        what = " ".join(str(error).split())
        logger.warning(f"stopped at {where}, since another rank failed ({type(error).__name__}: {what[:_SHORT]})")
        return
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, UserError | KeyboardInterrupt):
        log_file_only(trace)
    else:
        logger.error(f"\n{trace}")
    what = "interrupted" if isinstance(error, KeyboardInterrupt) else describe_error(error)
    folder = f"; log: {run_dir / LOG_FILE}" if run_dir else ""
    again = f"; go on from the last save with --resume {run_dir}" if run_dir and (run_dir / "last.pth").is_file() else ""
    logger.error(f"stopped at {where}: {what}{folder}{again if isinstance(error, KeyboardInterrupt) else ''}")


def describe_error(error: BaseException) -> str:
    """Type and message; on one line where a traceback is shown as well (UserErrors may list things line by line)."""
    text = str(error)
    if not isinstance(error, UserError):
        text = " ".join(text.split())
        text = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class MetricsWriter:
    """One JSON object per line in ``metrics.jsonl`` and the same numbers in TensorBoard.

    Nothing here ends a run: what cannot be written (a full disk) is lost, with one warning.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        """``resumed_step``: the run goes on from there; TensorBoard drops what an earlier start wrote beyond it."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._warned: set[str] = set()
        self._file = self._board = None
        with self._forgiving("metrics.jsonl"):
            self._file = LineFile(folder / "metrics.jsonl")
            self._file.cut_broken_line()
        with self._forgiving("TensorBoard's file"):
            purge = None if resumed_step is None else resumed_step + 1
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """``values``: plain data; numbers that are no numbers become null."""
        line = json.dumps({"kind": kind, "step": step, **_plain(values)}, ensure_ascii=False) + "\n"
        if self._file is not None:
            with self._forgiving("metrics.jsonl"):
                self._file.write_or_nothing(line)
                self._warned.discard("metrics.jsonl")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self._board is not None:
            with self._giving_up_board():
                for tag, value in values.items():
                    if math.isfinite(value):
                        self._board.add_scalar(tag, value, step)

    def image(self, tag: str, picture: np.ndarray, step: int) -> None:
        """``picture``: (H, W, 3) uint8 RGB."""
        if self._board is not None:
            with self._giving_up_board():
                self._board.add_image(tag, picture, step, dataformats="HWC")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        self._file = self._board = None

    @contextlib.contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if what not in self._warned:
                logger.warning(f"{what} cannot be written ({error.strerror or error}): some of its numbers are lost")
            self._warned.add(what)

    @contextlib.contextmanager
    def _giving_up_board(self) -> Iterator[None]:
        """TensorBoard's writer works in a thread of its own, which does not come back after an error."""
        try:
            yield
        except OSError as error:
            logger.warning(f"TensorBoard's file cannot be written ({error.strerror or error}): it ends here for this start")
            self._board = None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
