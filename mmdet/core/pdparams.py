"""PaddlePaddle's ``.pdparams``: a pickle of ``{name: array}``, read without unpickling.

``pickle.load`` would import and call whatever the file names. Here the standard library only cuts the file into its
instructions (``pickletools``); the few that such files need are carried out below, on plain containers, numbers and arrays.
Nothing is imported or called by name, and nothing becomes larger than the file says it is.
"""

from __future__ import annotations

import math
import mmap
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_MARK = object()
_DEPTH = 16  # of dictionaries and lists
_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_DTYPE = re.compile(r"[fiu][248]|[iub]1")  # floats, integers, bool; no objects, texts, dates or records


class NotPlainError(Exception):
    """The file asks for something else than arrays and plain containers; the message says what."""


class _Name:
    """Stands for an importable name of the file. It is never imported."""

    def __init__(self, module: str, name: str) -> None:
        self.text = f"{module}.{name}"
        self.key = name if module in _ARRAY_MODULES else self.text.replace("__builtin__.", "builtins.")


class _Dtype:
    """A NumPy type under construction; ``order`` is its byte order, which comes after."""

    def __init__(self, code: Any) -> None:
        if not (isinstance(code, str) and _DTYPE.fullmatch(code)):
            raise NotPlainError(f"arrays of type {code!r}, which are no numbers")
        self.code, self.order = code, "="

    def set_state(self, state: Any) -> None:
        """(version, byte order, sub-array, names, fields, item size, alignment, flags): all but the order must say nothing."""
        plain = isinstance(state, tuple) and len(state) >= 5 and state[0] in (3, 4) and state[1] in ("<", ">", "|", "=")
        if not plain or any(part is not None for part in state[2:5]):
            raise NotPlainError(f"arrays of records or of an unknown byte order: {str(state)[:60]}")
        self.order = state[1]

    def numpy(self) -> np.dtype:
        return np.dtype(self.code).newbyteorder(self.order)


class _Array:
    """An array under construction: NumPy makes an empty one and gives it its state after."""

    value: np.ndarray | None = None

    def set_state(self, state: Any) -> None:
        """(version, shape, dtype, column-major, bytes)"""
        if not (isinstance(state, tuple) and len(state) == 5 and state[0] == 1):
            raise NotPlainError("an array of an unknown form")
        _, shape, dtype, by_columns, data = state
        self.value = _array(data, dtype, shape, "F" if by_columns else "C")


def _array(data: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray):
        raise NotPlainError("an array that does not hold numbers as bytes")
    numeric = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not numeric or len(shape) > 32 or math.prod(shape) * dtype.numpy().itemsize != len(data):
        raise ValueError(f"an array of shape {str(shape)[:60]} has {len(data)} bytes")
    return np.frombuffer(data, dtype.numpy()).reshape(shape, order=order)


def _new_array(kind: Any, shape: Any, code: Any) -> _Array:
    if not isinstance(kind, _Name) or kind.key not in _KINDS:
        raise NotPlainError("an array of another class than NumPy's own")
    return _Array()


def _encode(text: Any, encoding: Any) -> bytes:
    """How protocol 2 spells bytes: as text, to be encoded."""
    if not isinstance(text, str) or encoding != "latin1":
        raise NotPlainError(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _nothing(*args: Any) -> bytes:
    """How protocol 2 spells bytes of length 0."""
    if args:
        raise NotPlainError("bytes made from arguments")
    return b""


def _dictionary(*args: Any) -> dict:
    if args:
        raise NotPlainError("a dictionary made from arguments")
    return {}


# What a file may call: names of NumPy and Python, and what is done here instead.
_CALLS: dict[str, Callable] = {
    "_reconstruct": _new_array,
    "numpy.dtype": lambda code, align=False, copy=True: _Dtype(code),
    "scalar": lambda dtype, data: _array(data, dtype, (), "C").item(),
    "_frombuffer": lambda data, dtype, shape, order: _array(data, dtype, shape, "F" if order == "F" else "C"),
    "_codecs.encode": _encode,
    "builtins.bytes": _nothing,
    "builtins.tuple": lambda items: tuple(items),
    "collections.OrderedDict": _dictionary,
}
_KINDS = {"numpy.ndarray"}  # named as an argument, never called


class _Machine:
    """The stack and memo of a pickle, for the instructions that plain data needs."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.text = ""

    def since_mark(self) -> list[Any]:
        at = next(i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("its stack is empty")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def name(self, module: Any, name: Any) -> None:
        found = _Name(str(module), str(name))
        if found.key not in _CALLS and found.key not in _KINDS:
            raise NotPlainError(f"it names {found.text[:80]!r}")
        self.stack.append(found)

    def call(self) -> None:
        function, args = self.pop(2)
        if not isinstance(function, _Name) or function.key not in _CALLS or not isinstance(args, tuple):
            raise NotPlainError("a call of something that is not NumPy's")
        self.stack.append(_CALLS[function.key](*args))

    def build(self) -> None:
        target, state = self.pop(2)
        if not isinstance(target, _Dtype | _Array):
            raise NotPlainError(f"a state for a {type(target).__name__}")
        target.set_state(state)
        self.stack.append(target)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("entries for something that is no dictionary")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, str | int):
                raise NotPlainError(f"a dictionary with keys of type {type(key).__name__}")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("items for something that is no list")
        target.extend(items)


_ACTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda m, arg: None,
    "FRAME": lambda m, arg: None,
    "MARK": lambda m, arg: m.stack.append(_MARK),
    "NONE": lambda m, arg: m.stack.append(None),
    "NEWTRUE": lambda m, arg: m.stack.append(True),
    "NEWFALSE": lambda m, arg: m.stack.append(False),
    "EMPTY_TUPLE": lambda m, arg: m.stack.append(()),
    "EMPTY_LIST": lambda m, arg: m.stack.append([]),
    "EMPTY_DICT": lambda m, arg: m.stack.append({}),
    "TUPLE": lambda m, arg: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, arg: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, arg: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, arg: m.stack.append(tuple(m.pop(3))),
    "APPEND": lambda m, arg: m.extend(m.pop(1)),
    "APPENDS": lambda m, arg: m.extend(m.since_mark()),
    "SETITEM": lambda m, arg: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, arg: m.set_items(m.since_mark()),
    "MEMOIZE": lambda m, arg: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, arg: m.memo.__setitem__(arg, m.stack[-1])),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, arg: m.stack.append(m.memo[arg])),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), lambda m, arg: m.stack.append(arg)),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), lambda m, arg: m.stack.append(arg)),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), lambda m, arg: m.stack.append(arg)),
    "GLOBAL": lambda m, arg: m.name(*arg.split(" ", 1)),
    "STACK_GLOBAL": lambda m, arg: m.name(*m.pop(2)),
    "REDUCE": lambda m, arg: m.call(),
    "BUILD": lambda m, arg: m.build(),
}


def read_pickled_arrays(path: Path) -> dict[Any, Any]:
    """The file's content with every array as a CPU tensor (also those stored as (name, array)); other plain values as they are.

    Raises:
        NotPlainError: it asks for something else than arrays and plain containers.
        ValueError and others: it is cut short or damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        content = _run(data)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
    return _finished(content, {}, 0)


def _run(data: mmap.mmap) -> Any:
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.pop(1)[0]
        action = _ACTIONS.get(opcode.name)
        if action is None:
            raise NotPlainError(f"pickle instruction {opcode.name}")
        action(machine, argument)
    raise ValueError("it has no end")


def _finished(value: Any, done: dict[int, Any], depth: int) -> Any:
    """Tensors for arrays, at any depth. ``done``: what became of an object, by its id, so that shared parts are made once."""
    if depth > _DEPTH:
        raise ValueError(f"it is nested more than {_DEPTH} deep")
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], _Array):
        value = value[1]  # how paddle.save writes tensors of nested data: (parameter's name, array)
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {key: _finished(item, done, depth + 1) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            done[id(value)] = type(value)(_finished(item, done, depth + 1) for item in value)
        else:
            done[id(value)] = _leaf(value)
    return done[id(value)]


def _leaf(value: Any) -> Any:
    array = value.value if isinstance(value, _Array) else value
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
    if isinstance(array, _Array | _Name | _Dtype) or array is _MARK or (array is None and value is not None):
        raise ValueError("it holds an array without numbers")
    return array
