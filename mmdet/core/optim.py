"""Parameter groups by named rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS)


@dataclass(frozen=True)
class ParamRule:
    """Parameters that share a learning-rate and a weight-decay factor.

    A parameter matches when its name matches ``pattern`` (regular expression, searched) and, where ``norm`` is given, when it
    belongs to a normalisation layer (True) or does not (False).
    """

    name: str
    pattern: str = ""
    norm: bool | None = None
    lr_factor: float = 1.0
    decay_factor: float = 1.0

    def matches(self, name: str, owner_is_norm: bool) -> bool:
        return (self.norm is None or self.norm == owner_is_norm) and re.search(self.pattern, name) is not None


REST = ParamRule("rest")


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter, is_norm(module)


def group_parameters(model: nn.Module, rules: Sequence[ParamRule]) -> dict[str, list[nn.Parameter]]:
    """Group name -> its parameters, in the rules' order; what no rule matches is in ``rest``. Empty groups are left out."""
    groups: dict[str, list[nn.Parameter]] = {rule.name: [] for rule in (*rules, REST)}
    for name, parameter, owner_is_norm in _owned_parameters(model):
        rule = next((r for r in rules if r.matches(name, owner_is_norm)), REST)
        groups[rule.name].append(parameter)
    return {name: parameters for name, parameters in groups.items() if parameters}


def build_param_groups(model: nn.Module, rules: Sequence[ParamRule], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups of every parameter of the model, trained now or not (freezing changes with the epoch).

    Each group carries ``name`` and ``base_lr``, the learning rate that the schedule's factor multiplies.
    """
    by_name = {rule.name: rule for rule in (*rules, REST)}
    return [
        {
            "name": name,
            "params": parameters,
            "lr": lr * by_name[name].lr_factor,
            "base_lr": lr * by_name[name].lr_factor,
            "weight_decay": weight_decay * by_name[name].decay_factor,
        }
        for name, parameters in group_parameters(model, rules).items()
    ]
