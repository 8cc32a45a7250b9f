"""What the trainer asks of any evaluator, and how an evaluation is spread over ranks without hanging when one fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from mmdet.core.distributed import all_gather_objects, broadcast_object, get_world_size, is_main

T = TypeVar("T")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Evaluation:
    """What an evaluation found. ``metrics`` and ``per_class`` are the same on every rank."""

    metrics: dict[str, float]  # name -> value; NaN where it is undefined (no ground truth)
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)  # class name -> metric name -> value
    samples: list[dict[str, Any]] = field(default_factory=list)  # a few for pictures, on rank 0 only


class Evaluator(Protocol):
    """It owns its loader and loop, leaves the model as it found it, and returns the same metrics on every rank."""

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Judges ``model``; every rank calls it, an error on one is raised on all."""


class RankError(RuntimeError):
    """Another rank failed. ``rank`` says which, ``remote_traceback`` holds its traceback as text."""

    def __init__(self, rank: int, message: str, remote_traceback: str):
        super().__init__(f"rank {rank} failed in the evaluation: {message}")
        self.rank = rank
        self.remote_traceback = remote_traceback


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device | str = "cpu", amp: str | None = None) -> Iterator[nn.Module]:
    """``model`` in eval(), without gradients, in float32 unless ``amp`` is "bf16" or "fp16".

    In the end, also after an error, every submodule has the training flag that it had before: a frozen norm that was in
    eval() inside a training model stays so. Gradients are switched off by ``no_grad``, not by inference mode, because a
    module may keep a tensor made here (anchor points of a size) for later training steps.

    Args:
        model: any module.
        device: where its inputs lie; decides the kind of autocast.
        amp: None or "off", "bf16", "fp16".
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), _precision(device, amp):
            yield model
    finally:
        for module, flag in flags:
            module.training = flag


def _precision(device: torch.device | str, amp: str | None) -> AbstractContextManager:
    kind = torch.device(device).type
    if amp in (None, "off"):  # also undoes an autocast of the caller
        return torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext()
    if amp not in PRECISIONS:
        raise ValueError(f"amp is {amp!r}; expected off, bf16 or fp16")
    return torch.autocast(kind, dtype=PRECISIONS[amp])


def gather_from_ranks(work: Callable[[], T]) -> list[T]:
    """Runs ``work`` on every rank and returns all results, by rank, on every rank.

    An exception in any rank's work is raised on every rank: the rank's own where it happened, a ``RankError`` that names
    it elsewhere. So nobody waits for a rank that is gone. Results are pickled: plain data and arrays.
    """
    value, error = _attempt(work)
    outcomes = all_gather_objects((value, _describe(error)))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise RankError(rank, *failure)
    return [value for value, _ in outcomes]


def compute_on_main(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 alone and returns its result on every rank; an exception is raised on every rank."""
    value, error = _attempt(work) if is_main() else (None, None)
    if get_world_size() > 1:
        value, failure = broadcast_object((value, _describe(error)))
        if error is None and failure is not None:
            raise RankError(0, *failure)
    if error is not None:
        raise error
    return value


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # not swallowed: both callers raise it once the other ranks know
        return None, error


def _describe(error: Exception | None) -> tuple[str, str] | None:
    if error is None:
        return None
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
