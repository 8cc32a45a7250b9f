"""Leaving out a step that went wrong, and bringing back the last good state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from torch import Tensor

from mmdet.core import guard
from mmdet.core.snapshot import Snapshot

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


class Recovery:
    """What the Trainer does for a run to survive steps that are not finite. All ranks call it alike."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.guard = trainer, guard.NonFiniteGuard()
        self.buffers = guard.BufferKeeper(trainer.model)
        self.snapshot: Snapshot | None = None

    def agree(self, losses: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> tuple[bool, bool, int]:
        """Whether this step is good on all ranks, whether fp16 gradients overflowed (the scaler's business while it can still
        lower its scale), and the number of a stop signal that some rank received. The step's one look at the device."""
        trainer = self.trainer
        terms = torch.stack([v.to(trainer.device) for v in losses.values()])
        bad = ~terms.isfinite().all()
        if trainer.exp.max_loss:
            bad |= terms.sum() > trainer.exp.max_loss
        overflow = ~torch.stack([v.detach().to(trainer.device).float() for v in norms.values()]).isfinite().all()
        asked = torch.tensor(float(trainer.signals.number), device=trainer.device)
        flags = trainer.parallel.all_max(torch.stack([bad.float(), overflow.float(), asked]))
        bad_loss, bad_gradient, number = flags.tolist()
        good = not bad_loss and (not bad_gradient or (trainer.scaler.is_enabled() and trainer.scaler.get_scale() > 1.0))
        return good, bool(bad_gradient), int(number)

    def describe(self, losses: Mapping[str, Tensor], norms: Mapping[str, Tensor], said: str, batch: Any) -> str:
        """What is wrong with a step, while its gradients are still there. ``said``: what the model said of its predictions."""
        trainer = self.trainer
        images = trainer.exp.name_images(batch.image_ids) if hasattr(batch, "image_ids") else []
        found = {"parameter": trainer.parallel.locate(trainer.model), "predictions": said}
        rates = ", ".join(f"{g['name']} {g['lr']:.6g}" for g in trainer.optimizer.param_groups)
        limit = trainer.exp.max_loss and f"counted as such are losses above max_loss={trainer.exp.max_loss:g}; "
        return f"{limit or ''}{guard.describe_step(losses, norms, found, images)}; lr {rates}"

    def left_out(self, report: str) -> None:
        """The step that has just been counted was left out."""
        where = f"{self.trainer.stage} (iteration {self.trainer.step})"
        self.guard.last = f"{where}: {report}"
        if self.guard.left_out(self.trainer.step) == "restore":
            self.bring_back(where, report)
            return
        logger.warning(
            f"{where} was left out, not finite: {report}. {self.guard.in_a_row} in a row, {len(self.guard.recent)} lately; "
            f"{guard.IN_A_ROW} in a row or {guard.IN_WINDOW} in {guard.WINDOW} steps bring back an earlier state"
        )

    def bring_back(self, where: str, report: str) -> None:
        """The last good snapshot, and from here on the data in another order; the schedule goes on.

        Raises:
            NonFiniteError: that was done too often already.
        """
        self.guard.restored(where, report)
        self.snapshot.restore(self.trainer)
        self.trainer.reorder_data()
        logger.warning(
            f"{where}: not finite: {report}. The state of iteration {self.snapshot.step} is back, data go on with "
            f"data_seed={self.trainer.data_seed} (time {self.guard.restores} of {guard.RESTORES})"
        )

    def take_snapshot(self) -> None:
        """Of a state that is finite on all ranks; else the last one comes back."""
        trainer = self.trainer
        averages = {} if trainer.ema is None else trainer.ema.running_state()["average"]
        own = {f"EMA of {n}": v for n, v in averages.items()}
        buffers = guard.named_tensors(trainer.optimizer.state_dict()["state"])
        # A huge gradient's square overflows in the optimizer while the weights stay finite.
        own |= {f"optimizer's state {n}": value for n, value in buffers}
        name = guard.first_non_finite(trainer.model.state_dict(), own)
        if not trainer.parallel.all_finite(torch.tensor(not name, device=trainer.device)):
            if self.snapshot is None:
                self.guard.restores = guard.RESTORES  # there is nothing to go back to
            self.bring_back(f"iteration {trainer.step}", f"{name or 'the state of another rank'} holds NaN or infinity")
        self.snapshot = Snapshot(trainer)
