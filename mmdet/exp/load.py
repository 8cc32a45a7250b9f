"""From a file, a name or a checkpoint to an experiment."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdet.core import run
from mmdet.core.entries import IDENTITY, check_entries
from mmdet.errors import CheckpointError, UsageError
from mmdet.exp import fields
from mmdet.exp.base import COMMAND_LINE, EXP_FILE, Exp
from mmdet.exp.fields import nearest

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_dir() -> Path:
    """Where the shipped exp files lie: beside the package in a checkout, inside it in a wheel."""
    checkout = _PACKAGE.parent / "exps"
    return checkout if checkout.is_dir() else _PACKAGE / "exps"


def is_shipped(path: str | Path) -> bool:
    return Path(path).resolve().parent == shipped_dir().resolve()


def shipped_names() -> list[str]:
    return sorted(p.stem for p in shipped_dir().glob("*.py") if not p.stem.startswith("_"))


def get_exp(file_or_name: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Exp:
    """The experiment of an exp file (``exps/ppyoloe_s.py``) or of a shipped one's name (``ppyoloe_s``).

    ``overrides``: ``key=value`` words as on the command line, or a mapping of values. An error inside the file keeps its own
    traceback; a wrong name, field or type is a UsageError.
    """
    path = find_exp_file(file_or_name)
    exp = _exp_class(path)()
    exp.set("exp_name", _name_of(path), EXP_FILE)
    exp.set("exp_file", str(path), EXP_FILE)
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            exp.set(name, value, COMMAND_LINE)
    else:
        exp.override(overrides)
    exp.validate()
    return exp


def _name_of(path: Path) -> str:
    """The stem of an exp file; of the copy in a run folder, the name of the exp that it is a copy of."""
    if path.name == run.EXP_COPY and (path.parent / run.RECORD).is_file():
        return run.read_record(path.parent)["exp"]["name"]
    return path.stem


def find_exp_file(file_or_name: str | Path) -> Path:
    path = Path(file_or_name)
    if path.suffix == ".py":
        if path.is_file():
            return path
        if path.parent.name == "exps" and (shipped_dir() / path.name).is_file():
            return shipped_dir() / path.name
        known = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"exp file {str(path)!r} does not exist.{nearest(path.name, known)}")
    if path.name == str(path) and (shipped_dir() / f"{path}.py").is_file():
        return shipped_dir() / f"{path}.py"
    if path.is_file():
        raise UsageError(f"exp file {str(path)!r}: expected a Python file, NAME.py")
    names = shipped_names()
    raise UsageError(f"no shipped exp is called {str(path)!r}.{nearest(str(path), names)} Shipped: {', '.join(names)}")


def _exp_class(path: Path) -> type[Exp]:
    module_name = f"mmdet_exp_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # pickling and get_type_hints look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Exp) and c.__module__ == module_name]
    named = [c for c in own if c.__name__ == "Exp"]
    found = named or own
    if len(found) != 1:
        raise UsageError(
            f"{path}: expected one class derived from mmdet.exp.Exp (or one named 'Exp'), found "
            f"{', '.join(c.__name__ for c in own) or 'none'}"
        )
    return found[0]


def exp_state(exp: Exp) -> dict[str, Any]:
    """What a checkpoint stores of its experiment: plain values."""
    return {"name": exp.exp_name, "file": exp.exp_file, "values": exp.values(), "given": exp.given()}


def exp_of_record(record: Mapping[str, Any], origin: str) -> Exp:
    """The experiment of a run's record, with every value that it had."""
    exp = get_exp(record["exp"]["file"] or record["exp"]["name"])
    for name, value in record["exp"]["values"].items():
        if (
            name in exp.field_names()
            and name != "exp_file"
            and fields.check(name, value, exp.field_type(name)) != getattr(exp, name)
        ):
            exp.set(name, value, origin)
    exp.validate()
    return exp


# Fields that belong to one run or one machine, not to the trained model.
_LOCAL = frozenset({"exp_name", "exp_file", "output_dir", "pretrained_backbone"})


def _recorded_source(state: Mapping[str, Any]) -> str:
    """The exp file that a checkpoint names; where it is not here, the shipped one of that name if it was a shipped one. (A
    person's own file may have a shipped one's name.)"""
    file, name = state.get("file") or "", state.get("name") or ""
    if file and Path(file).is_file():
        return file
    if file and Path(file).parent.name != shipped_dir().name:
        raise CheckpointError(
            f"the checkpoint was made by exp file {file!r}, which is not here: give the exp file with -f "
            "(its run folder has a copy, exp.py)"
        )
    if not name:
        raise CheckpointError("the checkpoint does not say which exp made it: give the exp file with -f")
    return name


def exp_of_checkpoint(checkpoint: Mapping[str, Any], file_or_name: str | Path | None = None) -> Exp:
    """The experiment that made a checkpoint, with the values it had then. ``file_or_name`` replaces the recorded file."""
    check_entries(checkpoint, {"exp": IDENTITY["exp"]}, "the checkpoint")
    state = checkpoint.get("exp") or {}
    source = file_or_name or _recorded_source(state)
    try:
        exp = get_exp(source)
    except UsageError as error:
        raise CheckpointError(
            f"the checkpoint was made by exp {state.get('file') or source!r}: {error} Give the exp file with -f"
        ) from error
    for name, value in (state.get("values") or {}).items():
        if name in exp.field_names() and name not in _LOCAL:
            try:
                checked = fields.check(name, value, exp.field_type(name))
            except UsageError as error:
                raise CheckpointError(f"the exp in the checkpoint has {error}") from error
            if checked != getattr(exp, name):
                exp.set(name, checked, "checkpoint")
    return exp
