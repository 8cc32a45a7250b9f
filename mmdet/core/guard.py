"""What happens when a loss or a gradient is no longer a number.

The step is left out on all ranks: its batch and its place in the schedule are used up, while weights, batch-norm statistics,
optimizer, EMA and EMA count stay as they were. ``IN_A_ROW`` such steps in a row, or ``IN_WINDOW`` in ``WINDOW`` steps, bring
back the last good snapshot, and data go on in another order; time is not turned back. After ``RESTORES`` of them the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from loguru import logger
from torch import Tensor, nn

from mmdet.core.distributed import all_gather_objects, get_world_size
from mmdet.errors import NonFiniteError

IN_A_ROW, IN_WINDOW, WINDOW, RESTORES = 3, 10, 1000, 3
TOLERATED = 0.1  # part of a run's steps that may be left out
ZERO_STEPS = 200  # steps after which a loss term or a count of positives that is exactly 0 is worth a warning
_ADVICE = "Look at these images, lower the learning rate (basic_lr_per_img), or clip gradients (clip_norm=10)"


class NonFiniteGuard:
    """Counts the steps that were left out, and decides. Every rank counts alike, from flags that all ranks share."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.recent: list[int] = []  # steps left out since the last restore, within WINDOW
        self.skipped, self.restores = 0, 0  # in the whole run
        self.last = ""  # what was wrong with the last bad step, in words

    def passed(self) -> None:
        """A step was good."""
        self.in_a_row = 0

    def left_out(self, step: int) -> Literal["skip", "restore"]:
        """Step ``step`` was left out: what to do now."""
        self.skipped += 1
        self.in_a_row += 1
        self.recent = [s for s in self.recent if s > step - WINDOW] + [step]
        return "restore" if self.in_a_row >= IN_A_ROW or len(self.recent) >= IN_WINDOW else "skip"

    def restored(self, where: str, report: str) -> None:
        """A snapshot is about to be brought back.

        Raises:
            NonFiniteError: that has been done ``RESTORES`` times already; ``report`` says what was wrong last.
        """
        if self.restores >= RESTORES:
            raise NonFiniteError(
                f"training became non-finite at {where}: {report}. The weights were brought back {RESTORES} times and "
                f"{self.skipped} steps were left out in all; it does not get better. Only finite states were saved. {_ADVICE}."
            )
        self.restores += 1
        self.in_a_row, self.recent = 0, []

    def require_good_end(self, steps: int) -> None:
        """All ``steps`` of the run are done.

        Raises:
            NonFiniteError: it ended while steps were failing, or more than ``TOLERATED`` of them had since the last restore.
        """
        if self.in_a_row > 1 or len(self.recent) > max(1, TOLERATED * min(steps, WINDOW)):
            raise NonFiniteError(
                f"training ended, but {len(self.recent)} of its {steps} steps were non-finite and left out, the last "
                f"{self.in_a_row} in a row. What was saved is finite, but not what {steps} steps would have learnt. "
                f"{self.last and f'The last one: {self.last}. '}{_ADVICE}."
            )

    def summary(self) -> str:
        """The count for the end of a run; empty where nothing happened."""
        if not self.skipped and not self.restores:
            return ""
        return f"steps left out because they were not finite: {self.skipped}; earlier states brought back: {self.restores}"

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "recent": list(self.recent), "skipped": self.skipped, "restores": self.restores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.recent = int(state["in_a_row"]), [int(s) for s in state["recent"]]
        self.skipped, self.restores = int(state["skipped"]), int(state["restores"])


def describe_step(
    losses: Mapping[str, Tensor], norms: Mapping[str, Tensor], found: Mapping[str, str], images: Iterable[str]
) -> str:
    """What was wrong with a step, of all ranks; every rank calls it once the ranks have agreed to leave the step out.

    ``found``: what this rank saw besides numbers: "parameter" (the first with a bad gradient) and "predictions" (what the model
    said of its own outputs); empty where there is nothing.
    """
    terms = {name: float(value) for name, value in losses.items()}
    bad = [name for name, value in terms.items() if not math.isfinite(value)]
    mine = {"terms": terms, "bad": bad, "found": dict(found), "images": list(images)}
    ranks = all_gather_objects(mine)
    guilty = [r for r, other in enumerate(ranks) if other["bad"] or other["found"].get("predictions")]
    lines = [_of_rank(r, ranks[r]) for r in guilty or range(len(ranks))]
    gradients = ", ".join(f"{name} {float(value):.6g}" for name, value in norms.items())
    parameter = next((r["found"]["parameter"] for r in ranks if r["found"].get("parameter")), "")
    first = f" (first bad gradient: {parameter})" if parameter else ""
    return f"{'; '.join(lines)}; gradient norms {gradients}{first}"


def _of_rank(rank: int, what: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name} {value:.6g}" for name, value in what["terms"].items())
    where = f" on rank {rank}" if get_world_size() > 1 else ""
    predictions = what["found"].get("predictions", "")
    return f"losses{where}: {values}{predictions and f'; {predictions}'}; images {', '.join(what['images'])}"


class ZeroWatch:
    """Warns, once for each, of loss terms and counts of positives that have been exactly 0 for ``ZERO_STEPS`` steps."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._warned: set[str] = set()

    def look(self, step: int, scalars: Mapping[str, float]) -> None:
        """``scalars``: means since the last line, of all ranks."""
        for name, value in scalars.items():
            if not name.rsplit("/", 1)[-1].startswith(("loss_", "num_")):
                continue
            if value != 0:
                self._since.pop(name, None)
                continue
            first = self._since.setdefault(name, step)
            if step - first >= ZERO_STEPS and name not in self._warned:
                self._warned.add(name)
                kind = "no positives were found" if name.rsplit("/", 1)[-1].startswith("num_") else "it teaches nothing"
                logger.warning(f"{name} has been exactly 0 for {step - first} steps: {kind}; look at the annotations")


@torch.no_grad()
def first_non_finite(*states: Mapping[str, Tensor]) -> str:
    """Name of the first tensor that holds NaN or infinity; empty if none does. One transfer from the device."""
    tensors = {n: t for state in states for n, t in state.items() if t.is_floating_point() and t.numel()}
    if not tensors:
        return ""
    largest = torch.stack([v.float() for v in torch._foreach_norm(list(tensors.values()), float("inf"))])
    good = torch.isfinite(largest).tolist()
    return next((name for name, fine in zip(tensors, good, strict=True) if not fine), "")


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of nested plain values, with the way to it as its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))


def require_finite(payload: Any, what: str) -> None:
    """Raises a NonFiniteError that names the first tensor of a payload with NaN or infinity: such a file is not written."""
    name = first_non_finite(dict(named_tensors(payload)))
    if name:
        raise NonFiniteError(
            f"{what} would hold values that are not finite ({name}), so nothing was saved; the files saved earlier are "
            "good. Lower the learning rate (basic_lr_per_img=...), or clip gradients (clip_norm=10)."
        )


class BufferKeeper:
    """The model's buffers as they were before a step: a step that is left out, or done again, must not move batch-norm
    statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept = [b.detach().clone() for b in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._kept)
