"""Learning-rate schedules: pure functions from the step, counted from 0, to a factor of the base learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

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


# -- curves of iteration-based training ----------------------------------------------------------------------------------------
# From the iteration, counted from 0, to the learning rate itself. ``base_lr`` starts the warm-up, ``warmup_lr`` is its peak;
# without warm-up steps the peak is ``base_lr``. Source of the formulas: design/multitask.md, A8.


def _rise(base_lr: float, warmup_lr: float, warmup_steps: int, after: Schedule) -> Schedule:
    """A straight line from ``base_lr`` to ``warmup_lr`` over ``warmup_steps``, then ``after(it)``."""

    def lr(it: int) -> float:
        return base_lr + (warmup_lr - base_lr) * it / warmup_steps if it < warmup_steps else after(it)

    return lr


def step_lr(base_lr: float, warmup_lr: float, warmup_steps: int, lr_steps: Sequence[int], lr_mults: Sequence[float]) -> Schedule:
    """The peak times every ``lr_mults[k]`` whose ``lr_steps[k]`` has been reached."""
    peak = warmup_lr if warmup_steps else base_lr

    def after(it: int) -> float:
        return peak * math.prod(mult for step, mult in zip(lr_steps, lr_mults, strict=True) if step <= it)

    return _rise(base_lr, warmup_lr, warmup_steps, after)


def cosine_lr(base_lr: float, warmup_lr: float, warmup_steps: int, max_iter: int, eta_min: float = 0.0) -> Schedule:
    """Half a cosine from the peak to ``eta_min`` at ``max_iter``."""
    peak = warmup_lr if warmup_steps else base_lr

    def after(it: int) -> float:
        progress = (it - warmup_steps) / max(max_iter - warmup_steps, 1)
        return eta_min + (peak - eta_min) * (1.0 + math.cos(math.pi * progress)) / 2

    return _rise(base_lr, warmup_lr, warmup_steps, after)


def linear_lr(base_lr: float, warmup_lr: float, warmup_steps: int, max_iter: int, eta_min: float = 0.0) -> Schedule:
    """A straight line from the peak to ``eta_min`` at ``max_iter``."""
    peak = warmup_lr if warmup_steps else base_lr

    def after(it: int) -> float:
        return eta_min + (peak - eta_min) * (1.0 - (it - warmup_steps) / max(max_iter - warmup_steps, 1))

    return _rise(base_lr, warmup_lr, warmup_steps, after)


def hold_then_cosine_lr(
    base_lr: float,
    warmup_lr: float,
    warmup_steps: int,
    max_iter: int,
    freeze_iters: int,
    eta_min: float = 0.0,
    first: Literal["constant", "cosine"] = "constant",
) -> Schedule:
    """``freeze_iters`` at the peak, or down a half cosine of their own; then warm-up and half a cosine over the rest.

    For training new heads first, on a frozen backbone, and everything afterwards.
    """
    peak = warmup_lr if warmup_steps else base_lr
    rest = cosine_lr(base_lr, warmup_lr, warmup_steps, max_iter - freeze_iters, eta_min)

    def lr(it: int) -> float:
        if it >= freeze_iters:
            return rest(it - freeze_iters)
        if first == "constant":
            return peak
        return eta_min + (peak - eta_min) * (1.0 + math.cos(math.pi * it / freeze_iters)) / 2

    return lr


def _ramp(warmup_iters: int, warmup_factor: float, kind: str) -> Schedule:
    """The factor of a warm-up that multiplies another curve: a line up to 1, or constant until it ends."""

    def factor(it: int) -> float:
        if it >= warmup_iters:
            return 1.0
        return warmup_factor if kind == "constant" else warmup_factor + (1.0 - warmup_factor) * it / warmup_iters

    return factor


def warmup_times_cosine_lr(
    initial_lr: float, max_iter: int, warmup_iters: int = 0, warmup_factor: float = 0.0, kind: str = "linear"
) -> Schedule:
    """Half a cosine over the whole run, multiplied by a warm-up factor at its start."""
    factor = _ramp(warmup_iters, warmup_factor, kind)
    return lambda it: factor(it) * initial_lr * (1.0 + math.cos(math.pi * it / max_iter)) / 2


def warmup_times_poly_lr(
    initial_lr: float,
    max_iter: int,
    power: float = 0.9,
    warmup_iters: int = 0,
    warmup_factor: float = 0.0,
    kind: str = "linear",
) -> Schedule:
    """``(1 - it / max_iter) ** power``, multiplied by a warm-up factor at its start."""
    factor = _ramp(warmup_iters, warmup_factor, kind)
    return lambda it: factor(it) * initial_lr * (1.0 - it / max_iter) ** power


def spaced(kind: str, start: float, end: float, epochs: int, step: int = 1, milestones: Sequence[int] = ()) -> list[float]:
    """One factor for each of ``epochs`` epochs, from ``start`` towards ``end``.

    "log", "linear" and "cos" reach ``end`` in the last epoch, in equal ratios, in equal differences, along half a cosine. "step"
    multiplies every ``step`` epochs, so that ``end`` would come in the epoch after the last; "multi-step" at each of
    ``milestones`` (epochs), the last of which brings ``end``.

    Source: the epoch schedules of pysot's lineage (design/siamese.md, B9).

    Raises:
        ValueError: an unknown ``kind``.
    """
    last = max(epochs - 1, 1)
    curves: dict[str, Callable[[int], float]] = {
        "log": lambda i: start * (end / start) ** (i / last),
        "linear": lambda i: start + (end - start) * i / last,
        "cos": lambda i: end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * i / last)),
        "step": lambda i: start * (end / start) ** (i // step * step / max(epochs, 1)),
        "multi-step": lambda i: start * (end / start) ** (sum(i >= m for m in milestones) / max(len(milestones), 1)),
    }
    if kind not in curves:
        raise ValueError(f"schedule {kind!r}: expected one of {', '.join(curves)}")
    return [curves[kind](i) for i in range(epochs)]


def by_epoch(factors: Sequence[float], steps_per_epoch: int) -> Schedule:
    """``factors[epoch]`` throughout each epoch; the last one ever after."""
    return lambda step: factors[min(step // steps_per_epoch, len(factors) - 1)]
