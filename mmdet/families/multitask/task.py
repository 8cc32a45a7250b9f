"""What one task of a multi-task experiment is: data, head, weight, and which components it shares with which other tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from mmdet.errors import UsageError
from mmdet.families.multitask.sampler import MODES

Kind = Literal["detection", "classification", "multilabel", "pairwise"]
KINDS = ("detection", "classification", "multilabel", "pairwise")
COMPONENTS = ("backbone", "neck", "head")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class TaskSpec:
    """One task.

    ``share`` says which components the task has and with whom: tasks with the same number under a component have that component
    in common. Without ``neck`` the head reads the backbone's maps; without ``head`` the head is the task's own.

    ``shards`` fixes the arithmetic whatever the number of processes: an iteration has that many batches of ``batch_size`` samples
    of this task, and the task's loss is their mean.

    Raises:
        UsageError: a value cannot work; the task is named.
    """

    name: str  # letters, digits, underscores
    kind: Kind
    data: Any  # opens the data set of a split: see mmdet.families.multitask.sources
    batch_size: int  # samples per shard and iteration
    head: Callable[[Sequence[int]], nn.Module]  # channels of the maps that it gets -> head
    weight: float = 1.0  # factor of the task's loss, relative to the other tasks'
    shards: int = 1  # batches per iteration
    share: Mapping[str, int] = field(default_factory=lambda: {"backbone": 0, "neck": 0})
    levels: tuple[int, ...] | None = None  # which maps the head gets, in its order (coarse first: (2, 1, 0)); None: all
    backbone: Callable[[], nn.Module] | None = None  # None: the exp's get_backbone
    neck: Callable[[Sequence[int]], nn.Module] | None = None  # channels -> neck; None: the exp's get_neck
    criterion: Callable[[], nn.Module] | None = None  # (predictions, batch) -> LossOutput; needed for detection
    postprocess: Callable[..., Any] | None = None  # (boxes, scores, meta) -> list[Detections]; None: greedy suppression
    pipeline: Callable[[], Callable] | None = None  # makes (source, key, rng) -> Sample; None: the kind's
    eval_transform: Callable[[tuple[int, int]], Callable] | None = None  # size -> (Sample -> Sample); None: the kind's
    input_size: tuple[int, int] | None = None  # (H, W) px in training; None: the exp's
    test_size: tuple[int, int] | None = None  # (H, W) px in evaluation; None: the exp's
    sampling: str = "epoch_shuffle"  # how samples are drawn: see GivenIterationSampler
    images_per_class: int = 4  # of a chunk, with sampling="class_chunks"
    seed: int = 0  # of the task's order and augmentation, beside the exp's
    own_parameters: tuple[str, ...] = ()  # patterns (fnmatch) of parameters of shared components that the task has to itself
    lr_mult: float = 1.0  # factor of the head's learning rate
    decay_mult: float = 1.0  # factor of the head's weight decay

    def __post_init__(self) -> None:
        self._expect("name", bool(_NAME.fullmatch(self.name)), "letters, digits and underscores, a letter first")
        self._expect("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        self._expect("weight", 0 <= self.weight < float("inf"), "a number, 0 or more")
        self._expect("shards", type(self.shards) is int and self.shards >= 1, "a whole number, at least 1")
        self._expect("batch_size", type(self.batch_size) is int and self.batch_size >= 1, "a whole number, at least 1")
        self._expect("sampling", self.sampling in MODES, f"one of {', '.join(MODES)}")
        self._expect("images_per_class", self.images_per_class >= 1, "at least 1")
        self._expect("seed", type(self.seed) is int and self.seed >= 0, "a whole number, 0 or more")
        self._expect("lr_mult", self.lr_mult > 0, "a positive number")
        self._expect("decay_mult", self.decay_mult >= 0, "0 or more")
        known = set(self.share) <= set(COMPONENTS) and all(type(v) is int and v >= 0 for v in self.share.values())
        self._expect("share", known and "backbone" in self.share, "share ids (0, 1, ...) of backbone and, if wanted, neck, head")
        if self.kind == "detection":
            self._expect("criterion", self.criterion is not None, "what makes the criterion that belongs to the head")

    def _expect(self, name: str, right: bool, expectation: str) -> None:
        if not right:
            raise UsageError(f"task {self.name!r}: {name}={getattr(self, name)!r}: expected {expectation}")

    @property
    def is_detection(self) -> bool:
        return self.kind == "detection"


def check_specs(specs: Sequence[TaskSpec]) -> None:
    """Stops when tasks do not fit together.

    Raises:
        UsageError: no task; a name twice; no positive weight; tasks that share a component contradict each other about it.
    """
    names = [spec.name for spec in specs]
    if not names:
        raise UsageError("tasks: expected at least one TaskSpec")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"tasks: the name {twice[0]!r} is given {names.count(twice[0])} times; make each one unique")
    if not sum(spec.weight for spec in specs) > 0:
        raise UsageError(f"tasks: every weight is 0 ({', '.join(names)}): expected a positive one")
    for component in COMPONENTS:
        for key, members in members_of(specs, component).items():
            _check_agreement(key, [specs[t] for t in members], component)


def _check_agreement(key: str, members: Sequence[TaskSpec], component: str) -> None:
    """A shared component is made once and has one learning rate: its tasks must not ask for different ones."""
    first = members[0]
    for other in members[1:]:
        fields = {"backbone": ("backbone",), "neck": ("neck",), "head": ("lr_mult", "decay_mult")}[component]
        for name in fields:
            if getattr(first, name) != getattr(other, name):
                raise UsageError(
                    f"tasks {first.name!r} and {other.name!r} share {key} but give different {name}s "
                    f"({getattr(first, name)!r}, {getattr(other, name)!r}): give it the same one, or another share id"
                )
        if component == "head" and (first.kind, first.levels) != (other.kind, other.levels):
            raise UsageError(f"tasks {first.name!r} and {other.name!r} share {key}: expected the same kind and levels")
        if component == "neck" and first.share["backbone"] != other.share["backbone"]:
            raise UsageError(
                f"tasks {first.name!r} and {other.name!r} share {key} but have different backbones "
                f"({first.share['backbone']}, {other.share['backbone']}): give the necks different share ids"
            )


def component_key(specs: Sequence[TaskSpec], task: int, component: str) -> str | None:
    """Name of the component that a task uses, ``backbone/0``, ``neck/1``, ``head/NAME``; None where it has none.

    A head is named after the first task that uses it.
    """
    spec = specs[task]
    if component == "head":
        share = spec.share.get("head")
        first = next((s for s in specs if share is not None and s.share.get("head") == share), spec)
        return f"head/{first.name}"
    return f"{component}/{spec.share[component]}" if component in spec.share else None


def members_of(specs: Sequence[TaskSpec], component: str) -> dict[str, list[int]]:
    """Component name -> the tasks that use it, in order."""
    members: dict[str, list[int]] = {}
    for task in range(len(specs)):
        key = component_key(specs, task, component)
        if key is not None:
            members.setdefault(key, []).append(task)
    return members


def task_weights(specs: Sequence[TaskSpec], normalize: bool = True) -> list[float]:
    """The weight w_t of each task in the objective: its part of the sum, so that they add up to 1, or as given."""
    total = sum(spec.weight for spec in specs) if normalize else 1.0
    return [spec.weight / total for spec in specs]
