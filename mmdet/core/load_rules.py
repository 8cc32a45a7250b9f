"""What a model tells the checkpoint loader about the files that were published for it."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from torch import Tensor

StateDict = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """One foreign naming of the same tensors, recognised by its keys."""

    name: str
    matches: Callable[[Set[str]], bool]  # the file's keys -> is it this layout
    rename: Callable[[StateDict], StateDict]  # the file's tensors -> the same under our names


@dataclass(frozen=True)
class ClassRows:
    """Tensors whose dim 0 holds class rows: ``lead`` rows that stand alone, then ``groups`` blocks of ``per_group_extra + C``
    rows, the class rows last."""

    pattern: str  # regular expression that the whole state_dict key must match
    groups: int = 1
    per_group_extra: int = 0
    lead: int = 0


@dataclass(frozen=True)
class LoadRules:
    layouts: tuple[Layout, ...] = ()
    class_rows: tuple[ClassRows, ...] = ()
    constants: tuple[str, ...] = ()  # regular expressions of a file's constant tensors, consumed silently
