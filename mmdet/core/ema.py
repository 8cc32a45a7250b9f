"""Exponential moving average of the weights, kept apart from the weights that are trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Decay = Callable[[int], float]


def threshold_decay(limit: float) -> Decay:
    """``min(limit, (1 + s) / (10 + s))``, s the update counted from 0 (design/recipes.md, 3.5)."""
    return lambda updates: min(limit, (1 + updates) / (10 + updates))


def exponential_decay(limit: float) -> Decay:
    """``limit * (1 - exp(-k / 2000))``, k the update counted from 1 (design/recipes.md, 3.5)."""
    return lambda updates: limit * (1 - math.exp(-(updates + 1) / 2000))


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


class EMA:
    """``average = d * average + (1 - d) * weights`` after every optimizer step, with ``d = decay(updates)``.

    Float parameters and buffers are averaged (batch-norm statistics too), in at least float32; integer buffers follow the model.
    ``start``: the average begins as a ``copy`` of the weights or at ``zero``; from zero, ``correct`` divides it by
    ``1 - d_last ** updates`` when it is read. Reading never changes the running average.
    """

    def __init__(
        self, decay: Decay, start: Literal["copy", "zero"] = "copy", correct: bool = False, cycle_epochs: int | None = None
    ) -> None:
        self.decay, self.start, self.correct, self.cycle_epochs = decay, start, correct, cycle_epochs
        self.updates = 0
        self._average: dict[str, Tensor] = {}
        self._module: nn.Module | None = None

    @classmethod
    def of_type(cls, decay_type: str, limit: float, cycle_epochs: int | None = None) -> EMA:
        """The three kinds of the PP-YOLO lineage; ``exponential`` as YOLOX has it, from a copy (design/recipes.md, 3.5)."""
        if decay_type == "exponential":
            return cls(exponential_decay(limit), "copy", False, cycle_epochs)
        decay = threshold_decay(limit) if decay_type == "threshold" else (lambda updates: limit)
        return cls(decay, "zero", True, cycle_epochs)

    def attach(self, model: nn.Module) -> None:
        """Begins the average of ``model``. Call it after the model is on its device."""
        self._module = copy.deepcopy(model).eval().requires_grad_(False)
        self._restart(model)

    def _restart(self, model: nn.Module) -> None:
        self.updates = 0
        self._average = {
            name: torch.zeros_like(value, dtype=_wide(value)) if self.start == "zero" else value.detach().clone().to(_wide(value))
            for name, value in model.state_dict().items()
            if value.is_floating_point()
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        decay = self.decay(self.updates)
        self.updates += 1
        state = model.state_dict()
        current = [state[name].detach().to(value.dtype) for name, value in self._average.items()]
        torch._foreach_lerp_(list(self._average.values()), current, 1.0 - decay)

    def start_epoch(self, model: nn.Module, epoch: int) -> None:
        """Starts state and count again every ``cycle_epochs`` epochs."""
        if self.cycle_epochs and epoch and epoch % self.cycle_epochs == 0:
            self._restart(model)

    def averaged(self) -> dict[str, Tensor]:
        """The average as it is judged: corrected copies (or, uncorrected, the running tensors themselves)."""
        if not self.correct:
            return self._average
        correction = 1.0 - self.decay(self.updates - 1) ** self.updates if self.updates else 1.0
        return {name: value / correction for name, value in self._average.items()}

    @torch.no_grad()
    def module(self, model: nn.Module) -> nn.Module:
        """A module in eval mode that holds the average (before the first update: the weights of ``model``)."""
        state = model.state_dict()
        averaged = self.averaged() if self.updates else {}
        for name, value in self._module.state_dict().items():
            value.copy_(averaged.get(name, state[name]))
        return self._module.eval()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """``model``: the judged weights, for whoever loads them; ``running``: the raw average, for an exact resume."""
        judged = {name: value.clone() for name, value in self.module(model).state_dict().items()}
        running = self._average if self.correct else None
        return {"model": judged, "running": running, "updates": self.updates}

    def running_state(self) -> dict[str, Any]:
        """The running tensors themselves and the count: what an update changes."""
        return {"average": self._average, "updates": self.updates}

    def load_running_state(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, value in self._average.items():
            value.copy_(state["average"][name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
        source = state["running"] if self.correct else state["model"]
        for name, value in self._average.items():
            value.copy_(source[name])
