"""Additions to a run. No family needs one: what a recipe does by time is a function of epoch or step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmdet.core.files import link_atomic
from mmdet.errors import UsageError

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer


class Hook:
    """Override what is needed; every method gets the Trainer. A method whose name looks like one of these and is none is an
    error when the class is made: it would never be called."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        known = [name for name in vars(Hook) if name.startswith("on_")]
        wrong = [n for n in vars(cls) if n.startswith(("on_", "before_", "after_")) and n not in known]
        if wrong:
            raise UsageError(f"hook {cls.__name__}: {wrong[0]!r} is never called; a hook's methods are {', '.join(known)}")

    def on_train_start(self, trainer: Trainer) -> None: ...

    def on_epoch_start(self, trainer: Trainer) -> None: ...

    def on_step_end(self, trainer: Trainer) -> None: ...

    def on_epoch_end(self, trainer: Trainer) -> None: ...

    def on_train_end(self, trainer: Trainer) -> None: ...


class KeepCheckpoint(Hook):
    """Keeps the full state after ``epochs_done`` epochs as ``file_name`` in the run folder, whatever comes later.

    A run that was killed before it could do so does it when it is resumed there.
    """

    def __init__(self, epochs_done: int, file_name: str) -> None:
        self.epochs_done, self.file_name = epochs_done, file_name

    def on_train_start(self, trainer: Trainer) -> None:
        if trainer.resumption is not None and not (trainer.run_dir / self.file_name).exists():
            self._keep(trainer, trainer.resumption.path.name)

    def on_epoch_end(self, trainer: Trainer) -> None:
        if trainer.is_saved:
            self._keep(trainer, "last.pth")

    def _keep(self, trainer: Trainer, source: str) -> None:
        if trainer.rank == 0 and trainer.step == self.epochs_done * trainer.loader.steps_per_epoch:
            link_atomic(trainer.run_dir / source, trainer.run_dir / self.file_name)
