"""What ranks tell each other: gradients in flat buckets, a handshake before the first step, and whole components.

Every function is called by all ranks with the components in the same order, so that no two ranks wait for each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmdet.core.distributed import all_gather_objects, broadcast_object
from mmdet.errors import UsageError

BUCKET_BYTES = 25 * 2**20


def buckets(parameters: Sequence[nn.Parameter], limit: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Parameters in order, cut into runs of one type that need at most ``limit`` bytes together (one parameter at least)."""
    runs: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        num_bytes = p.numel() * _work_type(p).itemsize
        if not runs or size + num_bytes > limit or _work_type(runs[-1][0]) != _work_type(p):
            runs.append([])
            size = 0
        runs[-1].append(p)
        size += num_bytes
    return runs


def _work_type(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """The gradients of ``parameters`` summed over ``group``. One that no member has stays None; where only some have it, the
    others count as zero: a mask travels with the numbers."""
    for run in buckets(parameters):
        work = _work_type(run[0])
        pieces = [torch.zeros(p.numel(), dtype=work, device=p.device) if p.grad is None else _flat(p.grad, work) for p in run]
        mask = torch.tensor([float(p.grad is not None) for p in run], dtype=work, device=run[0].device)
        flat = torch.cat([*pieces, mask])
        dist.all_reduce(flat, group=group)
        *totals, present = flat.split([*(p.numel() for p in run), len(run)])
        for p, total, has in zip(run, totals, present.tolist(), strict=True):
            if not has:
                p.grad = None
            elif p.grad is None:
                p.grad = total.view_as(p).to(p.dtype)
            else:
                p.grad.copy_(total.view_as(p))


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().reshape(-1).to(dtype)


# -- before the first step ---------------------------------------------------------------------------------------------------


def signature(key: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """What ranks must agree on about a component: names, shapes and types of its tensors, sorted by name."""
    return [f"{name} {tuple(t.shape)} {t.dtype} of {key}" for name, t in sorted(tensors.items())]


def handshake(members: Mapping[str, Sequence[int]], signatures: Mapping[str, list[str]], settings: Sequence[str]) -> None:
    """Compares, before anything else is exchanged, each component among its ranks and the settings among all.

    Raises:
        UsageError: on every rank, with the first difference: a collective of unequal parts would never end.
    """
    mine = {key: _digest(signatures.get(key, [])) for key in members} | {"": _digest(settings)}
    ranks = all_gather_objects(mine)
    everybody = range(len(ranks))
    for key, who in {"": everybody, **members}.items():
        if len({ranks[r][key] for r in who}) > 1:
            lists = all_gather_objects(list(settings) if key == "" else signatures.get(key, []))
            raise UsageError(_first_difference(key, {r: lists[r] for r in who}))


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _first_difference(key: str, lists: Mapping[int, list[str]]) -> str:
    what = f"component {key}" if key else "the tasks and settings"
    first = min(lists)
    for rank, lines in lists.items():
        here, there = set(lists[first]), set(lines)
        extra = sorted(here ^ there)
        if extra:
            owner, other = (first, rank) if extra[0] in here else (rank, first)
            return (
                f"{what} is not the same on all its ranks: rank {owner} has {extra[0]!r}, rank {other} has not. Start every "
                "process with the same exp file and overrides"
            )
    return f"{what} is not the same on all its ranks: its tensors come in another order"


# -- whole components --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], source: int, group: Any = None) -> None:
    """The values of rank ``source`` (of all ranks) in every tensor of the others, in place, one collective per type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_type.setdefault(t.dtype, []).append(t)
    for dtype, same in sorted(by_type.items(), key=lambda item: str(item[0])):
        work = torch.uint8 if dtype == torch.bool else dtype
        flat = torch.cat([t.detach().reshape(-1).to(work) for t in same])
        dist.broadcast(flat, source, group=group)
        for t, value in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(value.view_as(t))


@torch.no_grad()
def weighted_mean(tensors: Sequence[Tensor], weight: float, total: float, group: Any) -> None:
    """``sum over ranks of weight x tensor / total`` in every tensor, in place; ``total`` is the sum of the weights."""
    if not tensors:
        return
    flat = torch.cat([_flat(t, _work_type(t)) for t in tensors]) * (weight / total)
    dist.all_reduce(flat, group=group)
    for t, value in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(value.view_as(t))


@torch.no_grad()
def collect_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], source: int, rank: int, device: torch.device
) -> None:
    """The optimizer's buffers of ``parameters``, from rank ``source`` to rank 0."""
    mine = [optimizer.state.get(p, {}) for p in parameters] if rank == source else []
    form = [{k: (tuple(v.shape), str(v.dtype)) if isinstance(v, Tensor) else v for k, v in s.items()} for s in mine]
    form = broadcast_object(form, source)
    for p, entries in zip(parameters, form, strict=True):
        state = optimizer.state.get(p, {})
        received = {k: v for k, v in entries.items() if not isinstance(v, tuple)}
        for name, (shape, dtype) in ((k, v) for k, v in entries.items() if isinstance(v, tuple)):
            kind = getattr(torch, dtype.removeprefix("torch."))
            value = state[name].to(device) if rank == source else torch.empty(shape, dtype=kind, device=device)
            dist.broadcast(value, source)
            received[name] = value if shape else value.cpu()  # counts of steps live on the CPU
        if rank == 0 and received:
            optimizer.state[p] = received
