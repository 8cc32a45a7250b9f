"""Checkpoint files on the disk: written whole or not at all, checked before they are believed, read without running anything."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mmdet.core.pdparams import NotPlainError, read_pickled_arrays
from mmdet.errors import CheckpointError

CHECKSUM = "checksum"
_TRUST = "If you trust where the file comes from, --trust-checkpoint reads it in full, which can run code that it contains"
_NO_WEIGHTS = {
    ".pdopt": "the optimizer's state; the weights are in the .pdparams file beside it",
    ".pdmodel": "an exported program without weights; give the training checkpoint, a .pdparams file",
    ".pdiparams": "the weights of an exported program, without names; give the training checkpoint, a .pdparams file",
}
_TORCH_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch.serialization.MAGIC_NUMBER, pickled


# -- writing ----------------------------------------------------------------------------------------------------------------


def save_atomic(payload: Mapping[str, Any], path: Path) -> None:
    """Writes ``payload`` and its checksum beside ``path``, flushes it to the disk and renames it: a failure leaves the old file.

    Raises:
        CheckpointError: an entry is neither a plain value nor a tensor.
        OSError: the file could not be written (a full disk, say); the message names it.
    """
    content = {**payload, CHECKSUM: checksum(payload)}
    _write_atomic(lambda file: torch.save(content, file), path)


def serialized(payload: Mapping[str, Any]) -> bytes:
    """What :func:`save_atomic` would write, for :func:`write_atomic` to write later."""
    file = io.BytesIO()
    torch.save({**payload, CHECKSUM: checksum(payload)}, file)
    return file.getvalue()


def write_atomic(data: bytes, path: Path) -> None:
    """Writes ``data`` as :func:`save_atomic` does a checkpoint."""
    _write_atomic(lambda file: file.write(data), path)


def _write_atomic(write: Callable[[BinaryIO], Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        cause = _os_error(error)
        reason = (cause.strerror or str(cause)) if cause else str(error).split("\n")[0]
        raise OSError(
            cause.errno if cause else None, f"{reason}: could not save {path}; files saved earlier are untouched"
        ) from error
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Also where a read-only or lost file system refuses, after an error that has been told."""
    with contextlib.suppress(OSError):
        path.unlink()


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C came while torch wrote: its writer then fails as well, and hides the interrupt."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _os_error(error: BaseException) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut, where the system can open folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        return
    finally:
        os.close(handle)


def link_atomic(source: Path, target: Path) -> None:
    """Makes ``target`` the same file as ``source`` (a hard link where the file system has them, else a copy)."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            _copy(source, temporary)
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: could not write {target}; {source} is untouched") from error
    finally:
        _remove(temporary)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        writing.flush()
        os.fsync(writing.fileno())


def numbered_epochs(folder: Path) -> list[Path]:
    """The ``epoch_NNN.pth`` of a run folder, latest epoch first, whatever the clock said."""
    found = [(int(m[1]), path) for path in folder.glob("epoch_*.pth") if (m := re.fullmatch(r"epoch_(\d+)\.pth", path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed while it saved has left."""
    for path in folder.glob(".*.pth.*.tmp"):
        path.unlink(missing_ok=True)


# -- checksum ---------------------------------------------------------------------------------------------------------------


def checksum(content: Mapping[str, Any]) -> str:
    """A sum over every name, value, shape, type and tensor byte of ``content``, the entry ``checksum`` left out.

    CRC-32: it is to find damage, not forgery, and takes a fifth of the time of a cryptographic digest.

    Raises:
        CheckpointError: an entry is neither a plain value nor a tensor.
    """
    total = 0
    for piece in _pieces({key: value for key, value in content.items() if key != CHECKSUM}, ""):
        total = zlib.crc32(piece, total)
    return f"crc32:{total:08x}"


def _pieces(value: Any, where: str) -> Iterator[Any]:
    """``value`` as bytes in an order that does not depend on how a dictionary was filled."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, Mapping):
        yield f"dict {len(value)};".encode()
        for key in sorted(value, key=lambda k: (type(k).__name__, k)):
            yield f"{type(key).__name__} {key!r}:".encode("utf-8", "surrogatepass")
            yield from _pieces(value[key], f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        yield f"{'tuple' if isinstance(value, tuple) else 'list'} {len(value)};".encode()
        for i, item in enumerate(value):
            yield from _pieces(item, f"{where}[{i}]")
    elif value is None or type(value) in (bool, int, float, str, bytes):
        yield f"{type(value).__name__} {value!r};".encode("utf-8", "surrogatepass")
    else:
        raise CheckpointError(f"entry {where} is a {type(value).__name__}: a checkpoint holds plain values and tensors only")


# -- reading ----------------------------------------------------------------------------------------------------------------


def read_checkpoint(path: str | Path, trust: bool = False) -> dict[str, Any]:
    """The content of a checkpoint file as plain values and CPU tensors, without its checksum.

    Reads torch's files (plain values and tensors) and PaddlePaddle's ``.pdparams`` (a pickle of arrays), told apart by what is
    in them. ``trust`` unpickles anything, which can run code.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    path = Path(path)
    require_file(path)
    if path.suffix in _NO_WEIGHTS:
        raise CheckpointError(f"{str(path)!r} is {_NO_WEIGHTS[path.suffix]}")
    try:
        content = _read(path, trust)
    except NotPlainError as error:
        raise CheckpointError(f"checkpoint {str(path)!r} holds more than plain values and tensors: {error}. {_TRUST}") from error
    except Exception as error:  # unpicklers answer damaged bytes with nearly every exception there is
        reason = str(error).split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"checkpoint {str(path)!r} ({path.stat().st_size} bytes) cannot be read: it is truncated, damaged or no checkpoint "
            f"({reason})"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {str(path)!r} holds a {type(content).__name__}, expected a dict of tensors")
    return _verified(content, path)


def require_file(path: str | Path, flag: str = "checkpoint") -> None:
    """Stops when ``path`` is no file; of a folder it says which of its files to give. ``flag``: what the user gave it with.

    Raises:
        CheckpointError: as said.
    """
    path = Path(path)
    if path.is_file():
        return
    if not path.is_dir():
        raise CheckpointError(f"{flag} {str(path)!r} does not exist: expected a checkpoint file")
    known = [path / name for name in ("best.pth", "weights.pth", "last.pth")]
    inside = [p for p in known if p.is_file()] or sorted(p for p in path.iterdir() if p.suffix in (".pth", ".pt", ".pdparams"))
    advice = f"give a file in it: {', '.join(map(str, inside[:3]))}" if inside else "and there is no checkpoint file in it"
    raise CheckpointError(f"{flag} {str(path)!r} is a folder: {advice}")


def read_heading(path: Path, names: Iterable[str], trust: bool = False) -> dict[str, Any] | None:
    """Some entries of a checkpoint without reading its tensors; None where the file cannot be read. Nothing is verified."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True) if is_zip else None
    except Exception:  # mapping a file needs more of a file system than reading it
        content = None
    try:
        content = read_checkpoint(path, trust) if content is None else content
    except CheckpointError:
        return None
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else None


def _read(path: Path, trust: bool) -> Any:
    with path.open("rb") as file:
        start = file.read(len(_TORCH_LEGACY))
    if not start:
        raise ValueError("it is empty")
    if start[:1] != b"\x80" and not start.startswith(b"PK"):
        raise ValueError(f"it starts with {start[:8]!r}, as no checkpoint does")
    if start[:1] == b"\x80" and not _TORCH_LEGACY.startswith(start):
        return _read_pickle(path, trust)
    if start.startswith(b"PK") and not trust:
        _check_parts(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if not start.startswith((b"PK", _TORCH_LEGACY)):  # the first bytes of an old file, cut off
            raise ValueError("its first bytes are cut off") from error
        named = re.findall(r"GLOBAL ([\w.]+)", str(error))
        raise NotPlainError(f"it names {', '.join(map(repr, named)) or 'what is no tensor'}") from error


def _check_parts(path: Path) -> None:
    """torch's writer stores a sum of every part of the file; its reader ignores them."""
    with zipfile.ZipFile(path) as archive:
        claimed = sum(part.file_size for part in archive.infolist())
        if claimed > path.stat().st_size:
            raise ValueError(f"its parts claim {claimed} bytes")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"its part {damaged!r} does not agree with its sum")


def _read_pickle(path: Path, trust: bool) -> Any:
    if trust:
        with path.open("rb") as file:
            return pickle.load(file)
    return read_pickled_arrays(path)


def _verified(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """``content`` without its checksum, once that is found right; other programs' files have none."""
    if CHECKSUM not in content:
        return content
    try:
        right = content[CHECKSUM] == checksum(content)
    except (CheckpointError, TypeError, ValueError, RuntimeError):
        right = False
    if not right:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is damaged: its content does not agree with its checksum. (Who changed it on purpose "
            f"removes the entry {CHECKSUM!r}.)"
        )
    return {key: value for key, value in content.items() if key != CHECKSUM}
