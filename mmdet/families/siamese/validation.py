"""The losses on fixed pairs after every epoch, so that epochs can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loguru import logger
from torch import nn

from mmdet.core.failure import gather_from_ranks
from mmdet.core.hooks import Hook
from mmdet.core.summary import plain_table
from mmdet.evaluators.evaluator import evaluation_mode

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer
    from mmdet.families.siamese.pairs import FixedPairs

KIND = "validation"  # of the lines in metrics.jsonl
SHOWN_EPOCHS = 20  # of the history, in the log


def validation_losses(model: nn.Module, batches, device: torch.device) -> tuple[dict[str, float], int]:
    """Sums over ``batches`` of losses and stats times their number of pairs, and the number of pairs. In float32, with labels of
    the first phase and equal weights; the model is left as it was."""
    sums: dict[str, float] = {}
    count = 0
    with evaluation_mode(model, device):
        for batch in batches:
            out = model.validate(batch.to(device))
            values = {"loss": out.total, **out.losses, **out.stats}
            for name, value in zip(values, torch.stack([v.float() for v in values.values()]).tolist(), strict=True):
                sums[name] = sums.get(name, 0.0) + value * len(batch)
            count += len(batch)
    return sums, count


class ValidationPass(Hook):
    """Judges the losses on the same pairs after every epoch and tells the history of all epochs.

    Args:
        make_pairs: the pairs; called once, when training starts.
        batch_size: pairs of a rank at a time.
    """

    def __init__(self, make_pairs: Callable[[], FixedPairs], batch_size: int) -> None:
        self.make_pairs, self.batch_size = make_pairs, batch_size
        self.history: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.pairs = self.make_pairs()
        if trainer.rank == 0:
            self.history = read_history(trainer.run_dir / "metrics.jsonl", trainer.step)

    def on_epoch_end(self, trainer: Trainer) -> None:
        model = trainer.judged_model()
        batches = self.pairs.batches(self.batch_size, trainer.rank, trainer.world)
        shares = gather_from_ranks(lambda: validation_losses(model, batches, trainer.device))
        means = pooled(shares)
        if means and trainer.rank == 0:
            epoch = trainer.step // trainer.loader.steps_per_epoch
            trainer.recorder.numbers(KIND, trainer.step, {"epoch": epoch, **means})
            self.history.append({"epoch": epoch, **means})
            logger.info(f"\n{history_table(self.history, len(self.pairs))}")


def pooled(shares: list[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Means over the pairs of all ranks; empty if there are none."""
    count = sum(number for _, number in shares)
    names = next((sums for sums, number in shares if number), {})
    return {name: sum(sums.get(name, 0.0) for sums, _ in shares) / count for name in names}


def read_history(path: Path, step: int) -> list[dict[str, float]]:
    """The epochs that an earlier part of the run recorded, up to ``step``; of an epoch that was done twice, the later one."""
    found: dict[float, dict[str, float]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == KIND and record["step"] <= step:
                found[record["values"]["epoch"]] = record["values"]
    return [found[epoch] for epoch in sorted(found)]


def history_table(history: list[dict[str, float]], count: int) -> str:
    names, shown = [name for name in history[-1] if name != "epoch"], history[-SHOWN_EPOCHS:]
    rows = [[int(row["epoch"]), *("-" if row.get(n) is None else f"{row[n]:.4f}" for n in names)] for row in shown]
    return plain_table(f"validation on {count} fixed pairs", ["epoch", *names], rows)
