"""What belongs to one run and not to the experiment: device, workers, folder, where to start from."""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision

from mmdet.core.failure import compute_on_main
from mmdet.core.files import numbered_epochs
from mmdet.core.lock import RunLock
from mmdet.core.weights import LoadOptions
from mmdet.errors import CheckpointError, UsageError

RECORD, EXP_COPY = "run.json", "exp.py"
AUTO = "auto"  # the resume that starts a new run where there is none to go on with


@dataclass(frozen=True)
class RunOptions:
    devices: int = 1  # processes that -d starts
    device: str = "auto"
    workers: int = 2
    eval_batch_size: int = 8
    experiment_name: str = ""  # folder of the run; empty: a time stamp
    ckpt: str = ""  # fine-tune from this file
    resume: str | None = None  # continue: a file or run folder, "" for the newest run of this exp, or AUTO
    raw: bool = False  # take a file's raw weights, not its EMA's
    trust_checkpoint: bool = False  # unpickle anything in a file
    load_map: Sequence[str] = ()  # PATTERN=REPLACEMENT for names of the file to fine-tune from
    ignore: Sequence[str] = ()  # patterns of tensors to leave out when fine-tuning
    command: str = ""  # as the user typed it
    occupy: bool = False  # keep the memory that the warm-up pass took
    progress: bool = True  # a progress bar where there is a terminal

    def load_options(self) -> LoadOptions:
        return LoadOptions(self.raw, self.trust_checkpoint, tuple(self.load_map), tuple(self.ignore))


def new_run_dir(exp_dir: Path, name: str) -> Path:
    """``<exp_dir>/<name or time stamp>``, decided on rank 0 and the same on every rank; nothing is made on the disk.

    Raises:
        UsageError: a run of that name is there already.
    """
    return Path(compute_on_main(lambda: str(_free_dir(exp_dir, name))))


def _free_dir(exp_dir: Path, name: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    path = named_dir(exp_dir, name) if name else exp_dir / stamp
    if name and checkpoint_candidates(path):
        raise UsageError(
            f"-expn {name}: {str(path)!r} holds the checkpoints of an earlier run: choose another name, go on with that run "
            "(--resume), or remove the folder"
        )
    if name:
        RunLock(path).require_free()
        return path
    return next(p for p in _numbered(path) if not p.exists())


def named_dir(exp_dir: Path, name: str) -> Path:
    if Path(name).name != name:
        raise UsageError(f"-expn {name}: expected a plain folder name; --output says where run folders are made")
    return exp_dir / name


def _numbered(path: Path) -> Iterator[Path]:
    """``path``, ``path_2``, ``path_3``, …"""
    yield path
    for i in itertools.count(2):
        yield path.with_name(f"{path.name}_{i}")


def claim_run_dir(run_dir: Path, options: RunOptions, resumed: bool) -> RunLock:
    """On rank 0: makes the folder and takes its lock, which the caller releases; ``lock.run_dir`` is the folder.

    A time-stamped folder that another run has made meanwhile gives way to the next name.

    Raises:
        UsageError: the folder cannot be made or written to, or a run that is alive has it.
    """
    shared_name = resumed or bool(options.experiment_name)
    path = run_dir
    try:
        for path in [run_dir] if shared_name else _numbered(run_dir):
            if _make_folder(path, exist_ok=shared_name):
                break
        lock = RunLock(path)
        lock.acquire(wait=options.resume == AUTO)
    except OSError as error:
        reason = f"cannot be made or written to ({error.strerror or error}): name another with --output"
        raise UsageError(f"run folder {path} {reason}") from error
    return lock


def require_new(run_dir: Path) -> None:
    """With the folder's lock held: a run that was alive when this one looked for a free folder may have saved since, and ended.

    Raises:
        UsageError: it did; nothing of it is touched.
    """
    if checkpoint_candidates(run_dir):
        raise UsageError(
            f"run folder {run_dir}: another run has saved checkpoints there while this one was being built. Go on with that run "
            "(--resume), or take another folder with -expn NAME"
        )


def _make_folder(path: Path, exist_ok: bool) -> bool:
    """False: another run has it."""
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok or not path.is_dir():
            raise
        return False
    return True


def newest_run(exp_dir: Path, name: str = "") -> Path:
    """The run of this exp that was written last.

    Raises:
        CheckpointError: there is none with a checkpoint.
    """
    found = find_run(exp_dir, name)
    if found is None:
        raise CheckpointError(f"--resume: no run with a checkpoint in {str(exp_dir / name)!r}")
    return found


def find_run(exp_dir: Path, name: str = "") -> Path | None:
    """As :func:`newest_run`; None where there is none."""
    runs = [d for d in ([named_dir(exp_dir, name)] if name else exp_dir.glob("*")) if checkpoint_candidates(d)]
    return max(runs, key=lambda d: max(p.stat().st_mtime for p in checkpoint_candidates(d)), default=None)


def checkpoint_candidates(run_dir: Path) -> list[Path]:
    """The run's full checkpoints that could be resumed: last.pth first, then by time, newest first."""
    files = [p for p in (run_dir / "last.pth", run_dir / "best.pth", *numbered_epochs(run_dir)) if p.is_file()]
    return sorted(files, key=lambda p: (p.name == "last.pth", p.stat().st_mtime), reverse=True)


def write_record(run_dir: Path, exp_state: Mapping[str, Any], options: RunOptions) -> None:
    """``run.json`` and a copy of the exp file: what ``--rerun`` needs to start the same run again.

    Raises:
        UsageError: they cannot be written.
    """
    kept = {k: v for k, v in asdict(options).items() if k not in ("resume", "experiment_name")}
    record = {"exp": exp_state, "options": kept, "versions": versions(), "commit": git_commit()}
    source = Path(exp_state["file"])
    try:
        (run_dir / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if source.is_file() and source.resolve() != (run_dir / EXP_COPY).resolve():
            (run_dir / EXP_COPY).write_bytes(source.read_bytes())
    except OSError as error:
        reason = f"cannot be written to ({error.strerror or error}): name another with --output"
        raise UsageError(f"run folder {run_dir} {reason}") from error


def read_record(run_dir: str | Path) -> dict[str, Any]:
    """The record of a run; its exp file is the original, or the run's copy where that was moved or changed since."""
    path = Path(run_dir) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        source, copy = Path(record["exp"]["file"]), path.parent / EXP_COPY
        record["exp"]["values"], record["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{str(run_dir)!r}: expected a run folder with a readable {RECORD} ({error})") from error
    if copy.is_file() and not (source.is_file() and source.read_bytes() == copy.read_bytes()):
        record["exp"]["file"] = str(copy)
    return record


def versions() -> dict[str, str]:
    from mmdet import __version__

    return {
        "mmdet": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "numpy": str(np.__version__),
    }


def git_commit() -> str:
    """Commit of the checkout that this package lies in, with ``+changes`` where it differs; empty outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        ask = {"cwd": root, "capture_output": True, "text": True, "timeout": 10, "check": True}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **ask).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **ask).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + ("+changes" if dirty else "")
