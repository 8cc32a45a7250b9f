"""Where a run's words and numbers go: console, ``train_log.txt``, ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

from loguru import logger
from rich.console import Console

from mmdet.errors import UserError

FORMAT = "{time:HH:mm:ss} | {level: <7} | {message}"
_LONGEST_ERROR = 1000  # characters; some errors list every tensor of a model


class _Buffer:
    """Keeps messages until there is a run folder to write them to: a run that fails to start leaves no folder behind."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.file: Any = None
        self.sink: int | None = None

    def __call__(self, message: str) -> None:
        if self.file is None:
            self.lines.append(str(message))
        else:
            self.file.write(str(message))
            self.file.flush()

    def open(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.file.writelines(self.lines)
        self.file.flush()
        self.lines = []

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        self.lines = []


_buffer = _Buffer()
console = Console(stderr=True, highlight=False, soft_wrap=True)


def setup_logging(rank: int = 0) -> None:
    """Console on rank 0 and a log that :func:`open_log_file` later writes to disk."""
    logger.remove()
    if rank == 0:
        logger.add(_print_line, format=FORMAT, level="INFO", colorize=False)
    keep_for_log_file(rank)


def keep_for_log_file(rank: int = 0) -> None:
    """From now on messages are kept for the log file of the run that is being built."""
    if _buffer.sink is not None:
        with contextlib.suppress(ValueError):  # somebody else removed all sinks
            logger.remove(_buffer.sink)
    _buffer.close()
    if rank == 0:
        _buffer.sink = logger.add(_buffer, format=FORMAT, level="DEBUG", colorize=False, backtrace=False, diagnose=False)


def _print_line(message: str) -> None:
    if console.is_terminal:
        console.print(str(message).rstrip("\n"), markup=False)  # goes above a progress bar
    else:
        sys.stderr.write(str(message))
        sys.stderr.flush()


def open_log_file(path: Path) -> None:
    _buffer.open(path)


def close_log_file() -> None:
    _buffer.close()


def log_file_only(text: str) -> None:
    """Text for the log file alone, such as a traceback whose last line the console shows."""
    _buffer(text.rstrip("\n") + "\n")


def report_failure(error: BaseException, where: str, run_dir: Path | None) -> None:
    """The traceback to the log file (and, unless the message says all, to the console), the error as the last line.

    Marks the error as reported, so that the command line does not say it again.
    """
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, UserError | KeyboardInterrupt):
        log_file_only(trace)
    else:
        logger.error(f"\n{trace}")
    what = "interrupted" if isinstance(error, KeyboardInterrupt) else describe_error(error)
    folder = f"; log: {run_dir / 'train_log.txt'}" if run_dir else ""
    again = f"; go on from the last save with --resume {run_dir}" if run_dir and (run_dir / "last.pth").is_file() else ""
    logger.error(f"stopped at {where}: {what}{folder}{again if isinstance(error, KeyboardInterrupt) else ''}")
    error.reported = True


def describe_error(error: BaseException) -> str:
    """Type and message; on one line where a traceback is shown as well (UserErrors may list things line by line)."""
    text = str(error)
    if not isinstance(error, UserError):
        text = " ".join(text.split())
        text = text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class MetricsWriter:
    """One JSON object per line in ``metrics.jsonl`` and the same numbers in TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """``values``: plain data; numbers that are no numbers become null."""
        self._file.write(json.dumps({"kind": kind, "step": step, **_plain(values)}, ensure_ascii=False) + "\n")
        self._file.flush()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            if math.isfinite(value):
                self.board.add_scalar(tag, value, step)

    def close(self) -> None:
        self._file.close()
        self.board.close()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
