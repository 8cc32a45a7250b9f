"""The tensors of a file, out of whatever they are wrapped in, and what the user wants of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmdet.core.entries import IDENTITY, check_entries, is_texts, is_trained_here
from mmdet.core.files import read_checkpoint
from mmdet.core.load_rules import StateDict
from mmdet.errors import CheckpointError, UsageError

_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_SILENT = ("StructuredToParameterName@@",)  # Paddle's names of the same parameters


@dataclass(frozen=True)
class LoadOptions:
    """How a file is read. A wrong pattern is a UsageError when this is made."""

    raw: bool = False  # the raw weights, not their moving average (EMA)
    trust: bool = False  # unpickle anything, which can run code
    load_map: tuple[str, ...] = ()  # PATTERN=REPLACEMENT: regular expressions, replaced in the file's names
    ignore: tuple[str, ...] = ()  # regular expressions, searched in names: of the file, not loaded; of the model, left fresh

    def __post_init__(self) -> None:
        for flag, patterns in (("--load-map", [p for p, _ in self.renames()]), ("--ignore", self.ignore)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise UsageError(f"{flag} {pattern!r}: no regular expression ({error})") from error

    def renames(self) -> list[tuple[str, str]]:
        """(pattern, replacement) of ``load_map``; the last ``=`` of a word divides it."""
        wrong = [word for word in self.load_map if not word.rpartition("=")[0]]
        if wrong:
            raise UsageError(f"--load-map {wrong[0]!r}: expected PATTERN=REPLACEMENT, such as '^encoder=backbone'")
        return [(word.rpartition("=")[0], word.rpartition("=")[2]) for word in self.load_map]

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignore)

    @property
    def chosen(self) -> bool:
        """Whether the user says which tensors are wanted."""
        return bool(self.load_map or self.ignore)


@dataclass
class Weights:
    """A file's tensors, unwrapped, and what the file says about itself."""

    name: str
    tensors: StateDict
    class_names: tuple[str, ...] | None
    notes: list[str]


def open_weights(source: str | Path | Mapping[str, Any], options: LoadOptions | None = None) -> Weights:
    """The tensors of a file or dict; the EMA's where there are any, unless ``options.raw``.

    Raises:
        CheckpointError: the file cannot be read, or one of its entries is not what its name says.
    """
    options = options or LoadOptions()
    in_memory = isinstance(source, Mapping)
    name = "state_dict" if in_memory else str(source)
    content = source if in_memory else read_checkpoint(source, options.trust)
    if is_trained_here(content):
        check_entries(content, IDENTITY, f"checkpoint {name!r}")
    notes: list[str] = []
    class_names = _class_names(content, notes)
    named = _unwrapped(content, name, options.raw, notes)
    tensors = {k: v for k, v in named.items() if isinstance(k, str) and isinstance(v, Tensor)}
    others = [str(k) for k in named if k not in tensors and k not in _SILENT]
    if others and named is not content:
        notes.append(f"{len(others)} entries that are no tensors left out: {', '.join(others[:3])}")
    for prefix in _PREFIXES:
        if tensors and all(k.startswith(prefix) for k in tensors):
            tensors = {k.removeprefix(prefix): v for k, v in tensors.items()}
            notes.append(f"prefix '{prefix}' stripped")
    return Weights(name, _renamed(tensors, options, name), class_names, notes)


def _class_names(content: Mapping[str, Any], notes: list[str]) -> tuple[str, ...] | None:
    names = content.get("class_names")
    if names is None or is_texts(names):
        return None if names is None else tuple(names)
    notes.append(f"'class_names' left out: a {type(names).__name__}, no list of texts")
    return None


def _unwrapped(content: Mapping[str, Any], name: str, raw: bool, notes: list[str]) -> Mapping[str, Any]:
    ema = content.get("ema")
    if not raw and ema is not None and not isinstance(ema, Tensor):
        notes.append("EMA weights")
        average = _state(ema)
        if average is None:
            raise CheckpointError(
                f"{name}: entry 'ema' is a {type(ema).__name__}, expected a dict of tensors; --raw takes the other weights"
            )
        return next((inner for key in _WRAPPERS if (inner := _state(average.get(key))) is not None), average)
    present = [key for key in _WRAPPERS if key in content and not isinstance(content[key], Tensor)]
    found = next((key for key in present if _state(content[key]) is not None), None)
    if found is not None:
        notes.append("EMA weights" if content.get("weights") == "ema" else f"'{found}' of the file")
        return _state(content[found])
    if present:
        kind = type(content[present[0]]).__name__
        raise CheckpointError(f"{name}: entry {present[0]!r} is a {kind}, expected a dict of tensors")
    return content


def _state(value: Any) -> Mapping[str, Any] | None:
    """The tensors of a dict, or of a module (which only a trusted file can hold)."""
    if isinstance(value, nn.Module):
        return value.state_dict()
    return value if isinstance(value, Mapping) else None


def _renamed(tensors: StateDict, options: LoadOptions, source: str) -> StateDict:
    new_names = {name: name for name in tensors}
    for pattern, replacement in options.renames():
        if not any(re.search(pattern, name) for name in new_names.values()):
            examples = ", ".join(list(new_names.values())[:3])
            raise CheckpointError(f"--load-map {pattern!r} matches none of the names in {source}, such as {examples}")
        try:
            new_names = {old: re.sub(pattern, replacement, name) for old, name in new_names.items()}
        except (re.error, IndexError) as error:
            raise UsageError(f"--load-map: the replacement {replacement!r} does not fit its pattern ({error})") from error
    result: StateDict = {}
    for old, name in new_names.items():
        if name in result:
            raise CheckpointError(f"--load-map gives two tensors of {source} the name {name!r}; one of them is {old!r}")
        result[name] = tensors[old]
    return result
