"""An evaluation as text, for logs and terminals."""

from __future__ import annotations

import io
import math
import re

from rich.box import Box
from rich.console import Console
from rich.table import Table

from mmdet.evaluators.evaluator import Evaluation

# rich's "simple head" in ASCII, for terminals and log files of any encoding
_RULE_BELOW_HEAD = Box("\n".join(["    ", "    ", " -- ", *["    "] * 5]) + "\n", ascii=True)
_MEANINGS = {
    "AP": "mean over IoU 0.50 to 0.95",
    "AP50": "IoU 0.50",
    "AP75": "IoU 0.75",
    "APs": "small objects, below 32 x 32 px",
    "APm": "medium objects",
    "APl": "large objects, above 96 x 96 px",
    "ARs": "recall of small objects",
    "ARm": "recall of medium objects",
    "ARl": "recall of large objects",
}


def format_summary(evaluation: Evaluation) -> str:
    """One line per metric, with its meaning: ``AP      0.5123  mean over IoU 0.50 to 0.95``."""
    width = max([6, *map(len, evaluation.metrics)])
    lines = (f"{name:<{width}}  {_number(value):>9}  {_meaning(name)}".rstrip() for name, value in evaluation.metrics.items())
    return "\n".join(lines)


def format_per_class(evaluation: Evaluation) -> str:
    """A table with one row per class, in the order of the classes; counts are whole numbers."""
    columns = list(dict.fromkeys(key for row in evaluation.per_class.values() for key in row))
    table = Table(box=_RULE_BELOW_HEAD, pad_edge=False, show_edge=False)
    table.add_column("class", no_wrap=True, overflow="ignore")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in evaluation.per_class.items():
        cells = (_cell(column, row.get(column, math.nan)) for column in columns)
        table.add_row(_plain(name), *cells)
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _meaning(name: str) -> str:
    if name in _MEANINGS:
        return _MEANINGS[name]
    limit = re.fullmatch(r"AR(\d+)", name)
    if not limit:
        return ""
    return f"recall with at most {limit[1]} detection{'' if limit[1] == '1' else 's'} per image and class"


def _cell(column: str, value: float) -> str:
    return f"{value:.0f}" if column in ("objects", "detections") and math.isfinite(value) else _number(value)


def _number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}"


def _plain(name: str) -> str:
    """A class name on one line, whatever is in it."""
    return " ".join(name.split()) or '""'
