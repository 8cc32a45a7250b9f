"""What the entries of a checkpoint must be. A file with others is refused by name before anything is taken from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mmdet.errors import CheckpointError


class Entry(NamedTuple):
    expected: str
    fits: Callable[[Any], bool]


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) for k in value)


def _is_exp(value: Any) -> bool:
    return (
        _is_named(value)
        and all(isinstance(value.get(k), str) for k in ("name", "file"))
        and _is_named(value.get("values"))
        and _is_named(value.get("given", {}))
    )


def _is_ema(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, Mapping)
        and is_tensors(value.get("model"))
        and (value.get("running") is None or is_tensors(value["running"]))
        and is_count(value.get("updates"))
    )


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and all(type(k) is int and isinstance(v, Mapping) for k, v in value["state"].items())
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in value["param_groups"])
    )


def _is_best(value: Any) -> bool:
    if not (isinstance(value, Mapping) and {"metric", "value", "epoch"} <= set(value) and isinstance(value["metric"], str)):
        return False
    if value["value"] is None:
        return value["epoch"] is None
    return type(value["value"]) is float and not math.isnan(value["value"]) and is_count(value["epoch"])


def _is_named_texts(value: Any) -> bool:
    return _is_named(value) and is_texts(list(value.values()))


def _is_conditions(value: Any) -> bool:
    return (
        _is_named(value)
        and _is_named_texts(value.get("data"))
        and all(is_count(value.get(k)) for k in ("steps_per_epoch", "world"))
        and all(isinstance(value.get(k), str) for k in ("precision", "optimizer", "device", "exp_file"))
    )


_TENSORS = "a dict of tensors"
_COUNT = "an integer, 0 or more"


def _is_guard(value: Any) -> bool:
    numbers = _is_named(value) and all(is_count(v) for k, v in value.items() if k != "recent")
    return numbers and isinstance(value.get("recent", []), list) and all(is_count(v) for v in value.get("recent", []))


# What every file of this package says about itself; only `exp`, `class_names` and `versions` must be there.
IDENTITY = {
    "exp": Entry("{'name': text, 'file': text, 'values': dict}", _is_exp),
    "class_names": Entry("a list of texts", is_texts),
    "versions": Entry("a dict of texts", _is_named_texts),
    "overrides": Entry("a list of texts", is_texts),
    "model": Entry(_TENSORS, is_tensors),
    "ema": Entry("None or {'model': tensors, 'running': tensors or None, 'updates': integer}", _is_ema),
    "step": Entry(_COUNT, is_count),
}
# What a resume needs on top.
TRAINING = {
    **IDENTITY,
    "optimizer": Entry("{'state': dict, 'param_groups': list}", _is_optimizer),
    "scaler": Entry("a dict", lambda value: isinstance(value, Mapping)),
    "epoch": Entry(_COUNT, is_count),
    "position": Entry(_COUNT, is_count),
    "best": Entry("{'metric': text, 'value': float or None, 'epoch': integer or None}", _is_best),
    "evaluation_due": Entry("True or False", lambda value: isinstance(value, bool)),
    "data_seed": Entry(_COUNT, is_count),
    "conditions": Entry("{'data': dict, 'steps_per_epoch': integer, 'precision': text, …}", _is_conditions),
}
# What it takes where it is there; files of earlier versions have none.
OPTIONAL = {"guard": Entry("{'in_a_row': integer, 'recent': list of integers, …}", _is_guard)}


def is_trained_here(content: Mapping[str, Any]) -> bool:
    """Whether a file was written by this package's Trainer, and so knows its exp and class names."""
    return {"versions", "class_names", "exp"} <= set(content)


def check_entries(content: Mapping[str, Any], entries: Mapping[str, Entry], where: str, complete: bool = False) -> None:
    """Stops at the first entry that is not what it must be, or, with ``complete``, that is not there."""
    for name, entry in entries.items():
        if name not in content:
            if complete:
                raise CheckpointError(f"{where} has no entry {name!r}, expected {entry.expected}")
        elif not entry.fits(content[name]):
            raise CheckpointError(f"{where}: entry {name!r} is {_described(content[name])}, expected {entry.expected}")


def _described(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, str | int | float):
        return f"{str(value)[:60]!r} ({kind})"
    return "None" if value is None else f"another {kind}"
