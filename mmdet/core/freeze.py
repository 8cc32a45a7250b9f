"""Which parameters are trained, as a function of the epoch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from mmdet.core.optim import is_norm
from mmdet.errors import UsageError


def apply_frozen(model: nn.Module, patterns: Sequence[str]) -> bool:
    """Sets ``requires_grad`` so that exactly the parameters whose name matches a pattern (from its start) are frozen.

    Returns whether the set changed. Parameters that the model itself made untrainable keep their state. A pattern that
    matches nothing, or patterns that freeze everything, are usage errors.
    """
    names = dict(model.named_parameters())
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            raise UsageError(f"frozen: pattern {pattern!r} matches no parameter; names look like {next(iter(names))!r}")
    changed = False
    for name, parameter in names.items():
        if not hasattr(parameter, "_trainable_by_design"):
            parameter._trainable_by_design = parameter.requires_grad
        wanted = parameter._trainable_by_design and not any(re.match(p, name) for p in patterns)
        changed |= wanted != parameter.requires_grad
        parameter.requires_grad_(wanted)
        if not wanted:
            parameter.grad = None  # a stale gradient would go on moving it
    if not any(p.requires_grad for p in names.values()):
        raise UsageError(f"frozen: {list(patterns)} leave no parameter to train")
    return changed


def train_mode(model: nn.Module, patterns: Sequence[str]) -> None:
    """``model.train()``, with the norms whose parameters are frozen left in eval mode."""
    model.train()
    for name, module in model.named_modules():
        if is_norm(module) and any(re.match(p, f"{name}.weight") for p in patterns):
            module.eval()
