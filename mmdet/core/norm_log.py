"""Norms of gradients and weights while a model learns: where they explode or vanish, and which part moves how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from mmdet.core.hooks import Hook
from mmdet.core.parallel import total_norm

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

Level = Literal["part", "tensor"]


def norms_by_level(model: nn.Module, level: Level) -> dict[str, Tensor]:
    """L2 norms, () each, of the parameters that have a gradient: ``grad/<name>``, ``weight/<name>`` and their quotient
    ``ratio/<name>``, for each tensor or for each part (the first word of the tensors' names), and ``.../all``."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            groups.setdefault(name if level == "tensor" else name.split(".")[0], []).append(parameter)
    groups["all"] = [parameter for group in groups.values() for parameter in group]
    norms = {}
    for name, parameters in groups.items():
        gradient = total_norm([p.grad for p in parameters]).float()
        weight = total_norm([p.detach() for p in parameters]).float()
        norms |= {f"grad/{name}": gradient, f"weight/{name}": weight, f"ratio/{name}": gradient / (weight + 1e-12)}
    return norms


class NormLog(Hook):
    """Records :func:`norms_by_level` as ``norms`` at every ``print_interval`` steps, when the optimizer is about to use the
    gradients: after reduction, unscaling and clipping (``grad_norm`` in the log is the norm before clipping)."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._norms: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer) -> None:
        if trainer.rank == 0:  # gradients are the same everywhere
            trainer.optimizer.register_step_pre_hook(lambda *_: self._measure(trainer))

    def _measure(self, trainer: Trainer) -> None:
        if (trainer.step + 1) % trainer.exp.print_interval == 0:
            with torch.no_grad():
                self._norms = norms_by_level(trainer.model, self.level)

    def on_step_end(self, trainer: Trainer) -> None:
        if self._norms:
            values = torch.stack(list(self._norms.values())).tolist()
            trainer.recorder.numbers("norms", trainer.step, dict(zip(self._norms, values, strict=True)))
            self._norms = {}
