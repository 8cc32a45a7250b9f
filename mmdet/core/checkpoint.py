"""Checkpoint files: written whole or not at all, read without executing anything, and loaded with a report."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdet.core.load_rules import ClassRows, LoadRules, StateDict
from mmdet.errors import CheckpointError

FULL_STATE = ("model", "optimizer", "epoch", "step")


def save_atomic(payload: Mapping[str, Any], path: Path) -> None:
    """Writes to a temporary file beside ``path``, flushes it to the disk and renames it: a crash leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(payload), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: could not save {path}; files saved earlier are untouched") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def link_atomic(source: Path, target: Path) -> None:
    """Makes ``target`` the same file as ``source`` (a hard link where the file system has them, else a copy)."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        temporary.write_bytes(source.read_bytes())
    os.replace(temporary, target)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file as plain values and CPU tensors. A CheckpointError names what is wrong with the file."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {str(path)!r} does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile, OSError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"checkpoint {str(path)!r} ({path.stat().st_size} bytes) cannot be read: it is truncated, damaged, no checkpoint, "
            f"or holds more than plain values and tensors ({reason})"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {str(path)!r} holds a {type(content).__name__}, expected a dict of tensors")
    return content


@dataclass
class LoadReport:
    """What became of every tensor of the model and of the file."""

    source: str
    notes: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    reinitialized: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)  # name -> shapes or class rows

    def summary(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded", f"{len(self.reinitialized)} re-initialised"]
        parts += [f"{len(self.missing)} missing in the file", f"{len(self.unexpected)} of the file unused"]
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.source}: {', '.join(parts)}{notes}"

    def __str__(self) -> str:
        rows = [self.summary()]
        for title in ("reinitialized", "missing", "unexpected"):
            names = getattr(self, title)
            rows += [f"  {title:<13} {name}  {self.details.get(name, '')}".rstrip() for name in names[:20]]
            if len(names) > 20:
                rows.append(f"  {title:<13} … and {len(names) - 20} more")
        return "\n".join(rows)


@dataclass
class _Source:
    """A file's tensors, unwrapped, and what the file says about itself."""

    name: str
    tensors: StateDict
    class_names: tuple[str, ...] | None
    notes: list[str]


def is_trained_here(content: Mapping[str, Any]) -> bool:
    """Whether a file was written by this package's Trainer, and so knows its exp and class names."""
    return {"versions", "class_names", "exp"} <= set(content)


def open_weights(source: str | Path | Mapping[str, Any], raw: bool = False) -> _Source:
    """The tensors of a file or dict, out of whatever wrapper they are in; the EMA's where there are any, unless ``raw``."""
    name = "state_dict" if isinstance(source, Mapping) else str(source)
    content = source if isinstance(source, Mapping) else read_checkpoint(source)
    class_names = tuple(content["class_names"]) if isinstance(content.get("class_names"), list | tuple) else None
    notes: list[str] = []
    ema = content.get("ema")
    if isinstance(ema, Mapping) and isinstance(ema.get("model"), Mapping) and not raw:
        content, _ = ema["model"], notes.append("EMA weights")
    else:
        for key in ("model", "state_dict", "model_state_dict"):
            if isinstance(content.get(key), Mapping):
                notes.append(f"'{key}' of the file")
                content = content[key]
                break
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)}
    if tensors and all(k.startswith("module.") for k in tensors):
        tensors = {k.removeprefix("module."): v for k, v in tensors.items()}
        notes.append("prefix 'module.' stripped")
    return _Source(name, tensors, class_names, notes)


def load_pretrained(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    raw: bool = False,
    class_names: Sequence[str] | None = None,
    default_names: Sequence[str] | None = None,
    strict: bool = False,
) -> LoadReport:
    """Loads a file (or state_dict) in any layout the model knows, and says what became of every tensor.

    ``class_names``: the model's classes, in order; rows of class layers are matched by name where the file knows names too
    (``default_names``: the names of a published file with that many class rows). Tensors of another shape keep their fresh
    initialisation. Raises CheckpointError, with the model untouched, when fewer than half of the file's tensors (class layers
    and constants left out) find a place, or, with ``strict``, when any tensor of either side is left over.
    """
    rules: LoadRules = getattr(model, "load_rules", LoadRules())
    opened = open_weights(source, raw)
    tensors = _rename(opened, rules)
    tensors = {k: v for k, v in tensors.items() if not any(re.fullmatch(c, k) for c in rules.constants)}
    own = model.state_dict()
    report = LoadReport(opened.name, opened.notes)
    new: StateDict = {}
    for name, value in own.items():
        rows = next((r for r in rules.class_rows if re.fullmatch(r.pattern, name)), None)
        if name not in tensors:
            if not name.endswith("num_batches_tracked"):
                report.missing.append(name)
            continue
        file_value = tensors[name]
        if rows is not None:
            merged = _merge_class_rows(value, file_value, rows, class_names, opened.class_names, default_names)
            if merged is not None:
                new[name], note = merged
                (report.loaded if note is None else report.reinitialized).append(name)
                report.details.update({name: note} if note else {})
                continue
        if file_value.shape == value.shape:
            new[name] = file_value
            report.loaded.append(name)
        else:
            report.reinitialized.append(name)
            report.details[name] = f"file {tuple(file_value.shape)}, model {tuple(value.shape)}"
    report.unexpected = [name for name in tensors if name not in own]
    _refuse_foreign(report, rules, strict)
    model.load_state_dict({**own, **{k: v.to(own[k].dtype) for k, v in new.items()}})
    return report


def _rename(opened: _Source, rules: LoadRules) -> StateDict:
    for layout in rules.layouts:
        if layout.matches(opened.tensors.keys()):
            opened.notes.append(f"layout: {layout.name}")
            return layout.rename(opened.tensors)
    return opened.tensors


def _refuse_foreign(report: LoadReport, rules: LoadRules, strict: bool) -> None:
    def is_class_layer(name: str) -> bool:
        return any(re.fullmatch(r.pattern, name) for r in rules.class_rows)

    placed = sum(not is_class_layer(n) for n in report.loaded)
    total = placed + sum(not is_class_layer(n) for n in (*report.reinitialized, *report.unexpected))
    if placed == 0 or placed * 2 < total:
        raise CheckpointError(
            f"{report.source}: matched {placed} of {total} tensors of the file by name and shape; this is no checkpoint of this "
            f"model. The file has e.g. {report.unexpected[:3] or report.reinitialized[:3]}, the model expects e.g. "
            f"{report.missing[:3]}. Choose the exp that made the file."
        )
    left = [*report.reinitialized, *report.missing, *report.unexpected]
    if strict and left:
        raise CheckpointError(f"{report.source}: {len(left)} tensors do not fit: {left[:5]}\n{report}")


def _merge_class_rows(
    value: Tensor,
    file_value: Tensor,
    rows: ClassRows,
    names: Sequence[str] | None,
    file_names: Sequence[str] | None,
    default_names: Sequence[str] | None,
) -> tuple[Tensor, str | None] | None:
    """The model's tensor with the file's rows put where class names agree, and a note when some rows stay fresh.

    None when names say nothing (unknown on a side, or all in the same order): the plain comparison by shape decides.
    """
    num, num_file = (v.shape[0] // rows.groups - rows.per_group_extra for v in (value, file_value))
    if file_names is None and default_names is not None and len(default_names) == num_file:
        file_names = default_names
    if names is None or file_names is None or tuple(names) == tuple(file_names) or value.shape[1:] != file_value.shape[1:]:
        return None
    if len(names) != num or len(file_names) != num_file:
        return None
    grouped, file_grouped = (v.reshape(rows.groups, -1, *v.shape[1:]) for v in (value.clone(), file_value.to(value.dtype)))
    extra = rows.per_group_extra
    grouped[:, :extra] = file_grouped[:, :extra]
    fresh = []
    for i, name in enumerate(names):
        if name in file_names:
            grouped[:, extra + i] = file_grouped[:, extra + list(file_names).index(name)]
        else:
            fresh.append(name)
    note = f"class rows by name: {len(names) - len(fresh)} of {len(names)} from the file" if fresh else None
    return grouped.reshape(value.shape), note
