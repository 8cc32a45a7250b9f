"""Which process does what: shards of tasks on ranks, and the ranks that hold a component in common.

Pure functions of (tasks, number of processes), so that every rank comes to the same result without talking; only
:meth:`TaskGroups.materialize` makes process groups.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch.distributed as dist

from mmdet.errors import UsageError
from mmdet.families.multitask.task import COMPONENTS, TaskSpec, component_key, members_of


class Unit(NamedTuple):
    """One batch of an iteration: shard ``shard`` of task number ``task``."""

    task: int
    shard: int


def effective_shards(shards: Sequence[int], world: int) -> list[int]:
    """Batches per task and iteration on ``world`` processes.

    Up to sum(shards) processes it is ``shards``: the arithmetic does not depend on the number of processes. With k times as
    many, every shard is there k times, with batches of its own: a larger total batch.

    Raises:
        UsageError: ``world`` is larger than the sum and no multiple of it.
    """
    total = sum(shards)
    if world > total and world % total:
        raise UsageError(
            f"{world} processes for tasks of {list(shards)} shards: expected 1 to {total} processes or a multiple of {total}"
        )
    return [s * max(world // total, 1) for s in shards]


def place_shards(shards: Sequence[int], world: int) -> list[list[Unit]]:
    """The units of each rank: contiguous in task order, as evenly as it goes. With ``world`` = sum(shards), one each."""
    units = [Unit(t, s) for t, count in enumerate(effective_shards(shards, world)) for s in range(count)]
    return [units[r * len(units) // world : (r + 1) * len(units) // world] for r in range(world)]


@dataclass(frozen=True)
class TaskGroups:
    """The layout of a run on ``world`` processes."""

    world: int
    shards: tuple[int, ...]  # batches per iteration of each task
    placement: tuple[tuple[Unit, ...], ...]  # of each rank
    task_ranks: tuple[tuple[int, ...], ...]  # of each task, ascending; the first is its root
    components: Mapping[str, tuple[int, ...]]  # component -> ranks that train it, ascending; in the order of COMPONENTS
    users: Mapping[str, tuple[int, ...]]  # component -> tasks that use it

    @property
    def roots(self) -> tuple[int, ...]:
        return tuple(ranks[0] for ranks in self.task_ranks)

    def owned(self, rank: int) -> list[str]:
        """The components that a rank trains."""
        return [key for key, ranks in self.components.items() if rank in ranks]

    def units_of(self, key: str, rank: int) -> int:
        """How many of a rank's batches go through a component."""
        return sum(unit.task in self.users[key] for unit in self.placement[rank])

    def materialize(self, timeout_seconds: float = 1800.0) -> dict[tuple[int, ...], Any]:
        """Process groups by rank set, made by all ranks in the same order: None stands for all ranks, and a set of one rank,
        or one that this process is not in, needs no group."""
        groups: dict[tuple[int, ...], Any] = {}
        for ranks in dict.fromkeys([*self.components.values(), *self.task_ranks]):
            if len(ranks) == self.world or len(ranks) == 1:
                groups[ranks] = None
            else:
                groups[ranks] = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_seconds))
        return groups

    def describe(self, specs: Sequence[TaskSpec]) -> list[list[Any]]:
        """Rows of a table: task, shards, samples per iteration, ranks, root."""
        return [
            [spec.name, self.shards[t], self.shards[t] * spec.batch_size, " ".join(map(str, ranks)), ranks[0]]
            for t, (spec, ranks) in enumerate(zip(specs, self.task_ranks, strict=True))
        ]


def build_task_groups(specs: Sequence[TaskSpec], world: int) -> TaskGroups:
    """The layout of ``specs`` on ``world`` processes.

    Raises:
        UsageError: the number of processes does not fit the shards.
    """
    shards = [spec.shards for spec in specs]
    placement = place_shards(shards, world)
    task_ranks = [tuple(r for r in range(world) if any(u.task == t for u in placement[r])) for t in range(len(specs))]
    users = {key: tuple(tasks) for component in COMPONENTS for key, tasks in members_of(specs, component).items()}
    components = {key: tuple(sorted({r for t in tasks for r in task_ranks[t]})) for key, tasks in users.items()}
    own = [(f"task/{spec.name}", t) for t, spec in enumerate(specs)]  # criteria with parameters, and own_parameters
    components |= {key: task_ranks[t] for key, t in own}
    users |= {key: (t,) for key, t in own}
    return TaskGroups(
        world, tuple(effective_shards(shards, world)), tuple(map(tuple, placement)), tuple(task_ranks), components, users
    )


class OwnerMap:
    """Parameter or buffer name of the model -> the component that it belongs to. Computed once, from names alone."""

    def __init__(self, specs: Sequence[TaskSpec]) -> None:
        self._prefixes = {f"criteria.{spec.name}.": f"task/{spec.name}" for spec in specs}
        self._prefixes |= {f"own.{spec.name}.": f"task/{spec.name}" for spec in specs}
        for task in range(len(specs)):
            for component in COMPONENTS:
                key = component_key(specs, task, component)
                if key is not None:
                    self._prefixes[f"{component}s.{key.split('/', 1)[1]}."] = key

    def __getitem__(self, name: str) -> str:
        for prefix, key in self._prefixes.items():
            if name.startswith(prefix):
                return key
        raise KeyError(f"{name} belongs to no component; known are {', '.join(self._prefixes)}")

    def of(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Component -> its names, sorted. What lies outside (the first layer, which only normalises) is left out."""
        result: dict[str, list[str]] = {key: [] for key in dict.fromkeys(self._prefixes.values())}
        for name in sorted(names):
            if any(name.startswith(prefix) for prefix in self._prefixes):
                result[self[name]].append(name)
        return result


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
