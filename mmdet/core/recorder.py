"""Everything a run tells: log lines, progress bar, metrics and TensorBoard. Only rank 0 speaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from loguru import logger
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mmdet.core.logger import MetricsWriter, console
from mmdet.core.meter import format_seconds


class Recorder:
    """Opened with the run folder; every method is a no-op on the other ranks."""

    def __init__(self, speaks: bool, progress: bool) -> None:
        self.speaks = speaks
        self._writer: MetricsWriter | None = None
        self._bar: Progress | None = None
        self._task: Any = None
        self._wants_bar = progress and speaks and console.is_terminal

    def open(self, run_dir: Path, resumed: tuple[int, Path] | None = None) -> None:
        """``resumed``: the step and the file that the run goes on from. It is marked in the metrics: of the lines before, readers
        drop those of later steps."""
        if self.speaks:
            self._run_dir = run_dir
            self._writer = MetricsWriter(run_dir, None if resumed is None else resumed[0])
            if resumed is not None:
                self._writer.write("resume", resumed[0], event="resume", **{"from": str(resumed[1])})

    def start_epoch(self, epoch: int, max_epoch: int, steps: int, done: int) -> None:
        if self._wants_bar:
            columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("eta {task.fields[eta]}")]
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(f"epoch {epoch + 1}/{max_epoch}", total=steps, completed=done, eta="-")
            self._bar.start()

    def step(self, eta_seconds: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, eta=format_seconds(eta_seconds))

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def train_line(
        self, step: int, where: str, scalars: dict[str, float], lrs: dict[str, float], norms: dict[str, float], **info
    ) -> None:
        """``info``: epoch, eta, data_time, step_time (seconds), rate (images/s), memory, facts (of the batch)."""
        if self._writer is None:
            return
        wait, whole = info["data_time"], info["step_time"]
        bound = "data" if wait > 0.5 * whole else "compute"
        losses = " ".join(f"{name.removeprefix('loss_')} {value:.4g}" for name, value in scalars.items() if "/" not in name)
        facts = " ".join(f"{k} {v}" for k, v in info["facts"].items() if k != "images")
        gradient = " ".join(f"{'grad' if k == 'all' else f'grad/{k}'} {v:.3g}" for k, v in norms.items())
        rate = f" {info['rate']:.1f} images/s" if info["rate"] else ""
        logger.info(
            f"{where} eta {format_seconds(info['eta'])} | {losses} | {gradient} | lr {max(lrs.values()):.3g} {facts} | "
            f"data {wait:.3f} of step {whole:.3f} s ({bound}-bound){rate} mem {info['memory']}"
        )
        self._writer.write(
            "train",
            step,
            epoch=info["epoch"],
            **scalars,
            lr=lrs,
            grad_norm=norms,
            time={"data": wait, "iter": whole},
            **info["facts"],
        )
        board = {f"train/{k}": v for k, v in scalars.items()} | {f"lr/{k}": v for k, v in lrs.items()}
        board |= {f"grad_norm/{k}": v for k, v in norms.items()} | {"time/data": wait, "time/iter": whole}
        self._writer.scalars(step, board)

    def evaluation(self, step: int, epoch: int, metrics: dict[str, float], per_class: dict[str, dict[str, float]]) -> None:
        if self._writer is None:
            return
        self._writer.write("eval", step, epoch=epoch, metrics=metrics, per_class=per_class)
        board = {f"val/{name}": value for name, value in metrics.items()}
        board |= {f"val/AP/{name}": row["AP"] for name, row in per_class.items() if "AP" in row}
        self._writer.scalars(step, board)

    def numbers(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Further numbers of a step, for hooks: a line of ``kind`` in the metrics and TensorBoard's ``<kind>/<name>``."""
        if self._writer is None:
            return
        self._writer.write(kind, step, values=values)
        self._writer.scalars(step, {f"{kind}/{name}": value for name, value in values.items()})

    def pictures(self, name: str, step: int, images: Sequence[np.ndarray]) -> None:
        """A picture for people: in TensorBoard, and the newest as ``<name>.jpg`` in the run folder.

        ``images``: (H, W, 3) uint8 RGB each, put below each other.
        """
        if self._writer is None or not images:
            return
        width = max(image.shape[1] for image in images)
        rows = [np.pad(i, ((0, 4), (0, width - i.shape[1]), (0, 0)), constant_values=255) for i in images]
        picture = np.concatenate(rows)
        self._writer.image(name, picture, step)
        try:
            cv2.imencode(".jpg", picture[..., ::-1])[1].tofile(self._run_dir / f"{name}.jpg")
        except OSError as error:
            logger.warning(f"{name}.jpg cannot be written ({error.strerror or error})")

    def close(self) -> None:
        self.stop_bar()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
