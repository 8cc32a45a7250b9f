"""What the trainer asks of any evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

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
