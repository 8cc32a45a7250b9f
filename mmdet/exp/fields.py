"""Typed fields: a value is checked against its annotation, and a word of the command line is read by it."""

from __future__ import annotations

import ast
import difflib
import math
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mmdet.errors import UsageError

# Height and width in pixels; one integer means a square.
Size = Annotated[tuple[int, int], "(H, W) px"]

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}


class _WrongTypeError(Exception):
    """Carries what was expected up to where the field's name is known."""


def describe(annotation: Any) -> str:
    """The annotation as a user would write it."""
    if annotation == Size:
        return "(H, W) or one integer"
    if get_origin(annotation) is Annotated:
        return describe(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if annotation is type(None):
        return "None"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(describe(a) for a in get_args(annotation))
    if get_origin(annotation) is not None:
        return str(annotation).replace("typing.", "")
    return getattr(annotation, "__name__", str(annotation))


def check(name: str, value: Any, annotation: Any) -> Any:
    """``value`` as the annotation wants it (ints become floats, lists tuples), or a UsageError that names the field."""
    try:
        return _convert(value, annotation)
    except _WrongTypeError as error:
        raise UsageError(f"{name}={value!r}: expected {error}, got {type(value).__name__}") from error


def parse(name: str, text: str, annotation: Any) -> Any:
    """A word of the command line as a value of the annotated type."""
    if _wants_text(annotation):
        return check(name, _unquote(text), annotation)
    if text.strip().lower() in _WORDS:
        value = _WORDS[text.strip().lower()]
        if annotation in (int, float) and isinstance(value, bool):
            raise UsageError(f"{name}={text}: expected {describe(annotation)}")
        return check(name, value, annotation)
    if annotation is bool and text.strip() in ("0", "1"):
        return text.strip() == "1"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise UsageError(f"{name}={text}: expected {describe(annotation)}") from error
    try:
        return _convert(value, annotation)
    except _WrongTypeError as error:
        raise UsageError(f"{name}={text}: expected {error}") from error


def _wants_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(a, str) for a in get_args(annotation))
    return annotation is str


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _convert(value: Any, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if annotation is Any:
        return value
    if origin is Annotated:
        if annotation == Size and type(value) is int:
            return (value, value)
        try:
            return _convert(value, get_args(annotation)[0])
        except _WrongTypeError as error:
            raise _WrongTypeError(describe(annotation)) from error
    if origin is Literal:
        if value in get_args(annotation):
            return value
    elif origin in (Union, types.UnionType):
        return _convert_union(value, annotation)
    elif origin is tuple:
        return _convert_tuple(value, annotation)
    elif origin is dict:
        if isinstance(value, dict):
            key_type, value_type = get_args(annotation)
            return {_convert(k, key_type): _convert(v, value_type) for k, v in value.items()}
    elif annotation is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
            return float(value)
    elif annotation is type(None):
        if value is None:
            return None
    elif type(value) is annotation:
        return value
    raise _WrongTypeError(describe(annotation))


def _convert_union(value: Any, annotation: Any) -> Any:
    for option in get_args(annotation):
        try:
            return _convert(value, option)
        except _WrongTypeError:
            continue
    raise _WrongTypeError(describe(annotation))


def _convert_tuple(value: Any, annotation: Any) -> tuple:
    if not isinstance(value, tuple | list):
        raise _WrongTypeError(describe(annotation))
    items = get_args(annotation)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_convert(v, items[0]) for v in value)
    if len(value) != len(items):
        raise _WrongTypeError(f"{describe(annotation)} ({len(items)} values, not {len(value)})")
    return tuple(_convert(v, t) for v, t in zip(value, items, strict=True))


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known name that looks most like ``name``, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{match[0]}'?" if match else ""


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """``key=value`` words, and the pairs ``key value``, as (key, value)."""
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if "=" in word:
            key, value = word.split("=", 1)
        elif rest and word.isidentifier():
            key, value = word, rest.pop(0)
        else:
            raise UsageError(f"'{word}': expected key=value (or the pair: key value)")
        pairs.append((key.strip(), value))
    return pairs
