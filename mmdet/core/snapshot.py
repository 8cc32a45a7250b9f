"""The last good state, kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


class Snapshot:
    """Deep copies, in the host's memory, of all that an optimizer step changes: model with buffers, optimizer, EMA, scaler."""

    def __init__(self, trainer: Trainer) -> None:
        self.step = trainer.step
        self._model = _copied(trainer.model.state_dict())
        self._optimizer = _copied(trainer.optimizer.state_dict())
        self._scaler = _copied(trainer.scaler.state_dict())
        self._ema = None if trainer.ema is None else _copied(trainer.ema.running_state())

    def restore(self, trainer: Trainer) -> None:
        """Puts the copies back; the snapshot stays good. Learning rates are set anew in every step."""
        trainer.model.load_state_dict(self._model)
        trainer.optimizer.load_state_dict(_copied(self._optimizer))
        trainer.scaler.load_state_dict(self._scaler)
        if trainer.ema is not None:
            trainer.ema.load_running_state(self._ema)


@torch.no_grad()
def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
