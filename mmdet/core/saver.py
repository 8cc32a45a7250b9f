"""The files of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdet.core.checkpoint import link_atomic, save_atomic
from mmdet.core.guard import require_finite


class Saver:
    """Writes ``last.pth``, ``best.pth``, ``epoch_NNN.pth`` (N epochs done) and ``weights.pth`` of one run folder."""

    def __init__(self, run_dir: Path, keep: int, last_is_epoch: int | None = None) -> None:
        self.run_dir, self.keep = run_dir, keep
        self._last_is_epoch = last_is_epoch  # epochs done in the present last.pth, where it stands at an epoch's end

    def save_last(self, payload: Mapping[str, Any], epochs_done: int | None, best: bool = False) -> None:
        """``epochs_done`` is None inside an epoch. The last.pth of the epoch before is kept as ``epoch_NNN.pth``.

        ``best``: it is the best so far, and ``best.pth`` as well. That is written first: a run killed in between does the epoch
        again, while a last.pth that knows of a better best.pth than there is could not be mended.
        """
        require_finite(payload, "the checkpoint")
        last = self.run_dir / "last.pth"
        if self._last_is_epoch is not None and last.is_file() and self.keep:
            link_atomic(last, self.run_dir / f"epoch_{self._last_is_epoch:03d}.pth")
        if best:
            save_atomic(payload, self.run_dir / "best.pth")
            link_atomic(self.run_dir / "best.pth", last)
        else:
            save_atomic(payload, last)
        self._last_is_epoch = epochs_done
        earlier = sorted(self.run_dir.glob("epoch_*.pth"), key=lambda p: (p.stat().st_mtime_ns, p.name))
        for path in earlier[: max(len(earlier) - self.keep, 0)]:
            path.unlink()

    def save_weights(self, payload: Mapping[str, Any]) -> None:
        require_finite(payload, "the weights")
        save_atomic(payload, self.run_dir / "weights.pth")
