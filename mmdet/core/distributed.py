"""Ranks, gathering and reducing. Every function works, and costs nothing, in a single process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    return dist.get_rank() if is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def is_main() -> bool:
    return get_rank() == 0


def barrier() -> None:
    if get_world_size() > 1:
        dist.barrier()


def all_gather_objects(value: Any) -> list[Any]:
    """Every rank's ``value``, by rank, on every rank. Values are pickled: plain data only."""
    if get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any, source: int = 0) -> Any:
    """``value`` of rank ``source`` on every rank."""
    if get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def mean_scalars(values: dict[str, float], device: torch.device | str = "cpu") -> dict[str, float]:
    """Means over ranks of scalars that every rank holds under the same names, one packed all-reduce."""
    if get_world_size() == 1 or not values:
        return dict(values)
    packed = torch.tensor(list(values.values()), dtype=torch.float64 if str(device) == "cpu" else torch.float32, device=device)
    dist.all_reduce(packed)
    return dict(zip(values, (packed / get_world_size()).tolist(), strict=True))
