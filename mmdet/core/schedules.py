"""Learning-rate schedules: pure functions from the step, counted from 0, to a factor of the base learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def linear_warmup(schedule: Schedule, warmup_steps: float, start: float = 0.0) -> Schedule:
    """``start`` to 1 in a straight line over ``warmup_steps``, then ``schedule(step)``."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return start + (1.0 - start) * step / warmup_steps
        return schedule(step)

    return factor


def warmup_cosine(warmup_steps: float, horizon_steps: float, start: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine that would reach 0 at ``horizon_steps`` (which may lie beyond the end of the run).

    Source: the curve ``warm_cosinedecay`` of the reference values (pure/lr.miemie.json).
    """

    def cosine(step: int) -> float:
        progress = (step - warmup_steps) / max(horizon_steps - warmup_steps, 1e-9)
        return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))

    return linear_warmup(cosine, warmup_steps, start)


def warmup_multistep(warmup_steps: float, milestones: Sequence[float], gamma: float = 0.1, start: float = 0.0) -> Schedule:
    """Linear warm-up, then a factor ``gamma`` at every milestone (steps)."""
    return linear_warmup(lambda step: gamma ** sum(step >= m for m in milestones), warmup_steps, start)


def quadratic_warmup_cosine(
    warmup_steps: float, total_steps: float, flat_steps: float = 0, lowest: float = 0.0, start: float = 0.0
) -> Schedule:
    """A quadratic warm-up from ``start``, half a cosine down to ``lowest``, and constant there for the last ``flat_steps``.

    Source: the curve ``yoloxwarmcos`` of the reference values (pure/lr.yolox.json).
    """
    flat_from = total_steps - flat_steps

    def factor(step: int) -> float:
        if step < warmup_steps:
            return start + (1.0 - start) * (step / warmup_steps) ** 2
        if step >= flat_from:
            return lowest
        progress = (step - warmup_steps) / (flat_from - warmup_steps)
        return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
