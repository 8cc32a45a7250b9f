"""Random numbers on the device that depend on where a pair stands in the run, and on nothing else.

A generator's stream depends on how many numbers were drawn before; a hash of (seed, step, position, stream, element) does not. So
labels are the same for any number of ranks and micro-batches, on any device, after any resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEY_RANGE = 2**32  # keys are integers in [0, KEY_RANGE)
_LOW_BITS = KEY_RANGE - 1


def mix(values: Tensor) -> Tensor:
    """A bijective hash of 32-bit integers held in int64, of any shape.

    Multipliers and shifts: Chris Wellons, "Prospecting for Hash Functions" (2018), the function lowbias32. Products wrap around
    at 64 bits, which leaves the lower 32 right.
    """
    values = values ^ (values >> 16)
    values = (values * 0x7FEB352D) & _LOW_BITS
    values = values ^ (values >> 15)
    values = (values * 0x846CA68B) & _LOW_BITS
    return values ^ (values >> 16)


class Draw:
    """Random numbers of the pairs of a batch.

    Args:
        seed: of the run.
        step: since the start of training.
        positions: (B,) int64, of the pairs in the epoch.
    """

    def __init__(self, seed: int, step: int, positions: Tensor) -> None:
        of_step = mix(mix(torch.tensor(seed & _LOW_BITS)) ^ (step & _LOW_BITS))
        self._base = mix(int(of_step) ^ (positions & _LOW_BITS))

    def keys(self, stream: int, shape: tuple[int, ...]) -> Tensor:
        """(B, *shape) int64 in [0, 2^32), independent for every ``stream``."""
        count = 1
        for size in shape:
            count *= size
        elements = torch.arange(count, device=self._base.device)
        keys = mix(mix(self._base ^ (stream << 20)).unsqueeze(1) ^ elements)
        return keys.reshape(len(self._base), *shape)

    def integers(self, stream: int, low: int, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) int64, uniform in [low, high], both included."""
        return low + (self.keys(stream, shape) * (high - low + 1)) // KEY_RANGE


def choose(mask: Tensor, count: Tensor, keys: Tensor) -> Tensor:
    """At most ``count`` of the true elements of each row, those with the smallest keys.

    Args:
        mask: (..., N) bool.
        count: (...) int64.
        keys: (..., N) int64 in [0, 2^32).

    Returns:
        (..., N) bool.
    """
    order = keys.masked_fill(~mask, KEY_RANGE).argsort(dim=-1, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return mask & (rank < count.unsqueeze(-1))
