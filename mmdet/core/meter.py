"""The numbers between two log lines."""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor


class Meter:
    """Collects a step's scalars on the device; they are brought to the host once, when a line is printed."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self.data_times: list[float] = []
        self.step_times: list[float] = []

    def add(self, values: dict[str, Tensor], data_time: float, step_time: float) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.detach())
        self.data_times.append(data_time)
        self.step_times.append(step_time)

    def means(self) -> dict[str, float]:
        """Mean of every scalar since the last line, with one transfer."""
        names = list(self._values)
        if not names:
            return {}
        packed = torch.stack([torch.stack([v.float() for v in self._values[n]]).mean() for n in names])
        return dict(zip(names, packed.tolist(), strict=True))

    def times(self) -> tuple[float, float]:
        """Mean seconds waited for data and seconds of the whole step."""
        count = max(len(self.step_times), 1)
        return sum(self.data_times) / count, sum(self.step_times) / count

    def clear(self) -> None:
        self._values.clear()
        self.data_times.clear()
        self.step_times.clear()


class Eta:
    """Time to go, from the steps' median and what the evaluations took."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=200)
        self._evaluation = 0.0

    def add_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def add_evaluation(self, seconds: float) -> None:
        self._evaluation = seconds

    def seconds(self, steps_left: int, evaluations_left: int) -> float:
        if not self._steps:
            return 0.0
        ordered = sorted(self._steps)
        return ordered[len(ordered) // 2] * steps_left + self._evaluation * evaluations_left


def format_seconds(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def now() -> float:
    return time.perf_counter()


def memory_text(device: torch.device) -> str:
    """Peak memory: of the GPU, or of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
    try:
        import resource
    except ImportError:  # not on Windows
        return "-"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
