"""Additions to a run. No family needs one: what a recipe does by time is a function of epoch or step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


class Hook:
    """Override what is needed; every method gets the Trainer."""

    def on_train_start(self, trainer: Trainer) -> None: ...

    def on_epoch_start(self, trainer: Trainer) -> None: ...

    def on_step_end(self, trainer: Trainer) -> None: ...

    def on_epoch_end(self, trainer: Trainer) -> None: ...

    def on_train_end(self, trainer: Trainer) -> None: ...
