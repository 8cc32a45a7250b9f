"""A file's tensors into a model, with a report of every one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmdet.core.load_rules import ClassRows, LoadRules, StateDict
from mmdet.core.weights import LoadOptions, Weights, open_weights
from mmdet.errors import CheckpointError

_SHOWN = 20  # names of a kind in the table


@dataclass
class LoadReport:
    """What became of every tensor of the model and of the file."""

    source: str
    notes: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    reinitialized: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # by the user's patterns, of either side
    details: dict[str, str] = field(default_factory=dict)  # name -> shapes or class rows

    def summary(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded", f"{len(self.reinitialized)} re-initialised"]
        parts += [f"{len(self.missing)} missing in the file", f"{len(self.unexpected)} of the file unused"]
        parts += [f"{len(self.ignored)} ignored as asked"] if self.ignored else []
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.source}: {', '.join(parts)}{notes}"

    def __str__(self) -> str:
        rows = [self.summary()]
        for title in ("reinitialized", "missing", "unexpected", "ignored"):
            names = getattr(self, title)
            rows += [f"  {title:<13} {name}  {self.details.get(name, '')}".rstrip() for name in names[:_SHOWN]]
            if len(names) > _SHOWN:
                rows.append(f"  {title:<13} … and {len(names) - _SHOWN} more")
        return "\n".join(rows)


@dataclass(frozen=True)
class ClassNames:
    """Names of the rows of class layers; None where nobody knows them."""

    model: tuple[str, ...] | None
    file: tuple[str, ...] | None
    default: tuple[str, ...] | None  # of a published file that says nothing but has that many rows

    def of_file(self, num: int) -> tuple[str, ...] | None:
        if self.file is None and self.default is not None and len(self.default) == num:
            return self.default
        return self.file


def load_pretrained(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    options: LoadOptions | None = None,
    class_names: Sequence[str] | None = None,
    default_names: Sequence[str] | None = None,
    strict: bool = False,
) -> LoadReport:
    """Loads a file (or state_dict) in any layout the model knows, and says what became of every tensor.

    ``class_names``: the model's classes, in order; rows of class layers are matched by name where the file knows names too
    (``default_names``: the names of a published file with that many class rows). Tensors of another shape keep their fresh
    initialisation.

    Raises:
        CheckpointError: the model is untouched then. Fewer than half of the file's tensors (class layers and constants left
            out) find a place, or none where ``options`` has patterns; a part of the model gets nothing while the file has other
            tensors; or, with ``strict``, a tensor of either side is left over.
    """
    options = options or LoadOptions()
    rules: LoadRules = getattr(model, "load_rules", LoadRules())
    opened = open_weights(source, options)
    report = LoadReport(opened.name, opened.notes)
    tensors = _without_constants(_in_our_layout(opened, rules), rules)
    own = model.state_dict()
    names = ClassNames(*(None if n is None else tuple(n) for n in (class_names, opened.class_names, default_names)))
    new = _match(own, tensors, rules, names, options, report)
    placed, total = _counts(report, rules)
    if placed == 0 or (placed * 2 < total and not options.chosen):
        raise _foreign(report, placed, total, "choose the exp that made the file")
    bare = _bare_parts(own, report, rules)
    if bare and placed < total and not options.chosen:
        advice = (
            f"choose the exp that made the file (nothing in it is for {', '.join(bare)}; pretrained_backbone= takes backbones)"
        )
        raise _foreign(report, placed, total, advice)
    left = [*report.reinitialized, *report.missing, *report.unexpected]
    if strict and left:
        raise CheckpointError(f"{report.source}: {len(left)} tensors do not fit: {left[:5]}\n{report}")
    model.load_state_dict({**own, **new})
    return report


def load_backbone(
    model: nn.Module, source: str | Path | Mapping[str, Any], *, options: LoadOptions | None = None, part: str = "backbone"
) -> LoadReport:
    """Loads a file of ``model.backbone`` alone, its names with or without ``backbone.`` in front, in any layout the model knows;
    of a whole detector's file the backbone's part.

    Raises:
        CheckpointError: the model has no such part, or fewer than half of its tensors or of the file's find a place.
    """
    options = options or LoadOptions()
    own = {name: value for name, value in model.state_dict().items() if name.startswith(f"{part}.")}
    if not own:
        raise CheckpointError(f"{source}: a {type(model).__name__} has no part called {part!r} to load it into")
    rules: LoadRules = getattr(model, "load_rules", LoadRules())
    opened = open_weights(source, options)
    report = LoadReport(opened.name, [*opened.notes, f"{part} only"])
    tensors, layout = _best_reading(opened.tensors, own, rules, f"{part}.")
    report.notes += [f"layout: {layout}"] if layout else []
    new = _match(own, tensors, LoadRules(), ClassNames(None, None, None), options, report)
    placed, wanted = len(report.loaded), len(report.loaded) + len(report.reinitialized) + len(report.missing)
    of_file = placed + len(report.reinitialized) + len(report.unexpected)
    if placed == 0 or (placed * 2 < max(wanted, of_file) and not options.chosen):
        raise _foreign(report, placed, of_file, f"give the weights of this {part}, which has {wanted} tensors")
    model.load_state_dict({**model.state_dict(), **new})
    return report


# -- names ------------------------------------------------------------------------------------------------------------------


def _in_our_layout(opened: Weights, rules: LoadRules) -> StateDict:
    for layout in rules.layouts:
        if layout.matches(opened.tensors.keys()):
            opened.notes.append(f"layout: {layout.name}")
            return layout.rename(opened.tensors)
    return opened.tensors


def _best_reading(tensors: StateDict, own: StateDict, rules: LoadRules, prefix: str) -> tuple[StateDict, str]:
    """The tensors under our names, by the layout that finds most of them a place (a part of a model does not show its layout),
    and that layout's name, empty for our own."""
    best, best_placed, best_layout = {}, -1, ""
    for layout in (None, *rules.layouts):
        renamed = tensors if layout is None else layout.rename(tensors)
        inside = {name: value for name, value in renamed.items() if name.startswith(prefix)}
        found = inside or {prefix + name: value for name, value in renamed.items()}
        placed = sum(name in own and own[name].shape == value.shape for name, value in found.items())
        if placed > best_placed:
            best, best_placed, best_layout = found, placed, "" if layout is None else layout.name
    return best, best_layout


def _without_constants(tensors: StateDict, rules: LoadRules) -> StateDict:
    return {name: value for name, value in tensors.items() if not _any_match(rules.constants, name)}


def _any_match(patterns: Iterable[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


# -- tensors ----------------------------------------------------------------------------------------------------------------


def _match(
    own: StateDict, tensors: StateDict, rules: LoadRules, names: ClassNames, options: LoadOptions, report: LoadReport
) -> StateDict:
    """The model's tensors that come from the file, in the model's types; fills the report."""
    _check_ignore(options, [*own, *tensors], report.source)
    new: StateDict = {}
    for name, value in own.items():
        if options.ignores(name):
            report.ignored.append(name)
        elif name not in tensors:
            if not name.endswith("num_batches_tracked"):  # not every framework has it
                report.missing.append(name)
        else:
            found, note = _fitted(name, value, tensors[name], rules, names, report)
            if found is not None:
                new[name] = found.to(value.dtype)
            if note:
                report.details[name] = note
            (report.reinitialized if note else report.loaded).append(name)
    foreign = [name for name in tensors if name not in own]
    report.ignored += [name for name in foreign if options.ignores(name)]
    report.unexpected += [name for name in foreign if not options.ignores(name)]
    return new


def _check_ignore(options: LoadOptions, names: Sequence[str], source: str) -> None:
    for pattern in options.ignore:
        if not any(re.search(pattern, name) for name in names):
            raise CheckpointError(f"--ignore {pattern!r} matches no tensor, neither of the model nor of {source}")


def _fitted(
    name: str, value: Tensor, file_value: Tensor, rules: LoadRules, names: ClassNames, report: LoadReport
) -> tuple[Tensor | None, str]:
    """What the model's tensor becomes (None: it stays fresh), and why not all of it comes from the file (empty: it does)."""
    rows = next((r for r in rules.class_rows if re.fullmatch(r.pattern, name)), None)
    shapes = f"file {tuple(file_value.shape)}, model {tuple(value.shape)}"
    if file_value.is_complex() or (value.is_floating_point() and not file_value.is_floating_point()):
        return None, f"file {file_value.dtype}, model {value.dtype}"
    if rows is not None:
        merged = _merge_class_rows(value, file_value, rows, names, report)
        if merged is not None:
            found, note = merged
            return found, f"{shapes}; {note}" if note else ""
    return (file_value, "") if file_value.shape == value.shape else (None, shapes)


def _merge_class_rows(
    value: Tensor, file_value: Tensor, rows: ClassRows, names: ClassNames, report: LoadReport
) -> tuple[Tensor, str] | None:
    """The model's tensor with the file's rows put where class names agree, and a note when some rows stay fresh.

    None when names say nothing (unknown on a side, or all in the same order): the plain comparison by shape decides.
    """
    if not value.dim() or value.shape[1:] != file_value.shape[1:] or file_value.dim() != value.dim():
        return None
    lead, extra = rows.lead, rows.per_group_extra
    num, num_file = ((v.shape[0] - lead) // rows.groups - extra for v in (value, file_value))
    if file_value.shape[0] != lead + rows.groups * (extra + num_file):
        return None
    wanted, there = names.model, names.of_file(num_file)
    if there is not None and there is not names.file:
        _note_default(report, num_file)
    if wanted is None or there is None or wanted == there or len(wanted) != num or len(there) != num_file:
        return None
    merged, theirs = value.clone(), file_value.to(value.dtype)
    merged[:lead] = theirs[:lead]
    grouped, file_grouped = (v[lead:].view(rows.groups, -1, *v.shape[1:]) for v in (merged, theirs))
    grouped[:, :extra] = file_grouped[:, :extra]
    for i, name in enumerate(wanted):
        if name in there:
            grouped[:, extra + i] = file_grouped[:, extra + there.index(name)]
    known = sum(name in there for name in wanted)
    note = f"class rows by name: {known} of {len(wanted)} from the file" if known < len(wanted) else ""
    return merged, note


def _note_default(report: LoadReport, num: int) -> None:
    note = f"the file has no class names: its {num} classes are taken for those of the published files"
    if note not in report.notes:
        report.notes.append(note)


# -- is it this model's file? ------------------------------------------------------------------------------------------------


def _counts(report: LoadReport, rules: LoadRules) -> tuple[int, int]:
    """Tensors of the file that found a place, and all of them; class layers left out."""
    patterns = [r.pattern for r in rules.class_rows]
    placed = sum(not _any_match(patterns, n) for n in report.loaded)
    return placed, placed + sum(not _any_match(patterns, n) for n in (*report.reinitialized, *report.unexpected))


def _bare_parts(own: StateDict, report: LoadReport, rules: LoadRules) -> list[str]:
    """Parts of the model (the first words of its names) that got nothing, class layers left out: another architecture's file
    may share most of its tensors, those of a common backbone."""
    patterns = [r.pattern for r in rules.class_rows]
    parts = dict.fromkeys(name.split(".")[0] for name in own if not _any_match(patterns, name))
    served = {name.split(".")[0] for name in report.loaded}
    return [part for part in parts if part not in served]


def _foreign(report: LoadReport, placed: int, total: int, advice: str) -> CheckpointError:
    examples = report.unexpected[:3] or [f"{n} ({report.details[n]})" for n in report.reinitialized[:3]]
    return CheckpointError(
        f"{report.source}: matched {placed} of {total} tensors of the file by name and shape; this is no checkpoint of this "
        f"model. The file has e.g. {', '.join(examples) or 'nothing'}, the model expects e.g. "
        f"{', '.join((report.missing or report.reinitialized)[:3])}. Either {advice}, or say with --load-map and --ignore which "
        "tensors are wanted"
    )
