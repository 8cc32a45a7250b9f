"""The training loop, for any task. The whole step stands in :meth:`Trainer._train_step`, in the order in which it happens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from mmdet.core import failure, guard, memory, meter, run, state, summary
from mmdet.core.distributed import get_rank, get_world_size
from mmdet.core.ending import report_end
from mmdet.core.freeze import apply_frozen, train_mode
from mmdet.core.launch import choose_device, init_process_group, usable_amp
from mmdet.core.logger import LOG_FILE, close_log_file, keep_for_log_file, open_log_file
from mmdet.core.preempt import Stopped, StopSignals, interruptible
from mmdet.core.recorder import Recorder
from mmdet.core.recovery import Recovery
from mmdet.core.resume import open_resume, restore
from mmdet.core.run_folder import choose_run_dir, enter_run_dir
from mmdet.core.saver import Saver
from mmdet.errors import NonFiniteError, UsageError
from mmdet.exp.base import Exp


class Trainer:
    """Trains what an experiment describes.

    Asks of a batch ``to(device, non_blocking)``; of a model in training ``forward(batch) -> LossOutput``; of the evaluator
    ``evaluate(model) -> Evaluation``. A batch may also have ``facts() -> dict`` for the log line and ``image_ids``.
    Building it writes nothing to the disk.
    """

    def __init__(self, exp: Exp, options: run.RunOptions | None = None) -> None:
        self.exp, self.options = exp, options or run.RunOptions()
        exp.validate()
        self.device = choose_device(self.options.device)
        init_process_group(self.device)
        self.rank, self.world = get_rank(), get_world_size()
        keep_for_log_file(self.rank)
        self.resumption = open_resume(exp, self.options)  # a resumed run's own command line says where its data is
        exp.check_sources()
        self.amp = usable_amp(exp.amp, self.device)
        exp.check_world(self.world)
        torch.use_deterministic_algorithms(exp.deterministic, warn_only=True)
        summary.log_head(self)
        exp.prepare()
        self.step, self.best = 0, {"metric": exp.best_metric, "value": None, "epoch": None}
        self.evaluation_due = False  # of the epoch that has just ended
        self.data_seed = 0 if self.resumption is None else int(self.resumption.saved["data_seed"])
        self.run_dir = choose_run_dir(self)
        self._build()
        if self.resumption is not None:
            restore(self, self.resumption)

    def _build(self) -> None:
        """The order is fixed: each line needs the ones before it (an optimizer made before SyncBN or ``.to`` would hold other
        tensors than the model; EMA must copy loaded weights; DDP wraps the final modules)."""
        exp = self.exp
        self.loader = self._new_loader()
        seed_everything(exp.seed, 0, 0)  # the same fresh weights on all ranks
        self.model = exp.get_model()
        state.load_start(self)
        self.model.to(self.device)
        if exp.channels_last:
            self.model.to(memory_format=torch.channels_last)
        if exp.sync_bn and self.world > 1:
            if self.device.type == "cuda":
                self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
            else:
                logger.info("sync_bn works on CUDA only: every process keeps its own statistics, averaged before evaluation")
        self.optimizer = exp.get_optimizer(self.model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp == "fp16")
        self.ema = exp.get_ema()
        if self.ema is not None:
            self.ema.attach(self.model)
        if exp.compile:
            self.model.compile()
        self.parallel = exp.get_parallel()
        apply_frozen(self.model, exp.frozen(0))
        self.network = self.parallel.wrap(self.model)
        self.lr_factor = exp.get_lr_schedule(self.loader.steps_per_epoch)
        self.evaluator = exp.get_evaluator(
            batch_size=self.options.eval_batch_size,
            workers=self.options.workers,
            rank=self.rank,
            world=self.world,
            device=self.device,
        )
        self.conditions = state.conditions(self)
        self.recovery, self.zeros, self.split_steps = Recovery(self), guard.ZeroWatch(), memory.SplitSteps()
        self.signals, self._asked = StopSignals(guard_native=self.world > 1), 0
        self.hooks = list(exp.get_hooks())
        self.meter, self.eta = meter.Meter(), meter.Eta()
        self.recorder = Recorder(self.rank == 0, self.options.progress)
        self.batches = self.lock = self.saver = None
        self.is_saved = True  # the last save reached the disk
        self.stage = ""  # what is being done, in words, for messages
        self._facts: dict[str, Any] = {}

    @property
    def guard(self) -> guard.NonFiniteGuard:
        return self.recovery.guard

    # -- the run --------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.step // self.loader.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.exp.max_epoch * self.loader.steps_per_epoch

    def _at_epoch_end(self) -> bool:
        return self.step > 0 and self.step % self.loader.steps_per_epoch == 0

    def _this_step(self) -> str:
        steps = self.loader.steps_per_epoch
        return f"epoch {self.epoch + 1}/{self.exp.max_epoch} step {self.step % steps + 1}/{steps}"

    def train(self) -> dict[str, Any]:
        """Trains to ``max_epoch`` and returns the best metric: {"metric", "value", "epoch"}."""
        summary.log_plan(self)
        self.stage = "the start of training"
        self.signals.install()
        try:
            self._open_run()
            self._warm_up()
            self._call("on_train_start")
            if self.evaluation_due:
                self._end_epoch(self.epoch - 1)
            self.recovery.take_snapshot()
            self.batches = self._open_batches()
            while self.step < self.total_steps:
                self._train_epoch()
            self.stage = "the end of training"
            self._call("on_train_end")
            self.guard.require_good_end(self.total_steps)
            summary.log_end(self)
            failure.stop_watch()
        except (Exception, KeyboardInterrupt) as error:
            report_end(self, error)
            raise
        finally:
            self.close()
        return self.best

    def dry_run(self) -> dict[str, float]:
        """One training step, nothing written: the losses of the first batch."""
        summary.log_plan(self)
        try:
            self.batches = self._open_batches()
            self._start_epoch()
            self._train_step()
            if self.guard.skipped:
                raise NonFiniteError(f"the step was not finite: {self.guard.last}")
            return self.meter.means()
        finally:
            self.close()

    def _train_epoch(self) -> None:
        epoch, steps = self.epoch, self.loader.steps_per_epoch
        self._start_epoch()
        self._call("on_epoch_start")
        self.recorder.start_epoch(epoch, self.exp.max_epoch, steps, self.step % steps)
        while self.step < (epoch + 1) * steps:
            self._train_step()
            self._call("on_step_end")
            self.recorder.step(self._eta())
            inside = self.step % steps
            if self.step % self.exp.print_interval == 0 or inside == 0:
                self._log_step()
            if inside and (self._asked or self._save_is_due()):
                self._save(epochs_done=None)
                self._stop_if_asked()
        self.recorder.stop_bar()
        if self._any_loss is False:
            logger.warning(f"every loss of epoch {epoch + 1} was exactly 0: nothing is being learnt; look at the annotations")
        self._end_epoch(epoch)

    def _start_epoch(self) -> None:
        self._any_loss = None  # of the lines of this epoch, whether a loss was other than 0
        patterns = self.exp.frozen(self.epoch)
        if apply_frozen(self.model, patterns):
            self.network = self.parallel.wrap(self.model)
        train_mode(self.model, patterns)
        if self.ema is not None and self.step % self.loader.steps_per_epoch == 0:
            self.ema.start_epoch(self.model, self.epoch)

    def _train_step(self) -> None:
        self.stage = self._this_step()
        start = meter.now()
        batch = self._next_batch()
        data_time = meter.now() - start
        if self.step == self._first_step:
            self.recorder.pictures("training_images", self.step, self.exp.training_pictures(batch))

        factor = self.lr_factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        self.seed_step()
        self.recovery.buffers.keep()

        losses, stats, said = self._forward_backward(batch)
        self.parallel.reduce_gradients(self.model)
        self.scaler.unscale_(self.optimizer)
        norms = self.parallel.clip(self.model)
        good, overflow, self._asked = self.recovery.agree(losses, norms)

        if good:
            self.scaler.step(self.optimizer)  # fp16's scaler leaves out a step whose gradients overflow
            if self.ema is not None and not overflow:
                self.ema.update(self.model)
            report = ""
        else:
            self.recovery.buffers.restore()
            report = self.recovery.describe(losses, norms, said, batch)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

        self.step += 1
        seconds = meter.now() - start
        self.eta.add_step(seconds)
        self._facts = batch.facts() if hasattr(batch, "facts") else {}
        if not good:
            self.recovery.left_out(report)
            return
        self.recovery.guard.passed()
        total = torch.stack(list(losses.values())).sum()
        grads = {f"grad_norm/{name}": value for name, value in norms.items()}
        self.meter.add({"loss": total, **losses, **stats, **grads}, data_time, seconds)
        if self.step % self.exp.snapshot_interval == 0:
            self.recovery.take_snapshot()

    def _next_batch(self) -> Any:
        """A single process does not wait for data once it is asked to stop: they may never come. Several must agree first."""
        if self.world > 1:
            return next(self.batches)
        try:
            with self.signals.allowed(), interruptible():
                return next(self.batches)
        except Stopped as stopped:
            self._asked = stopped.number
            self._save(epochs_done=None)
            raise

    def _forward_backward(self, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
        """Adds up gradients over micro-batches. Returns losses, statistics, and what the model said of predictions that are not
        finite; in smaller parts where one process runs out of memory."""
        parts = [(part, weight, weight, contextlib.nullcontext()) for part, weight in self.parallel.micro_batches(batch)]
        try:
            return self._add_up(parts, len(parts))
        except memory.OUT_OF_MEMORY as error:
            if self.world > 1:  # the others are in this step's collectives: all stop
                raise memory.does_not_fit(self, batch, f"at {self.stage}") from error
        self.recovery.buffers.restore()
        self.optimizer.zero_grad(set_to_none=True)
        memory.free(self.device)
        try:
            return self._add_up(self.split_steps.parts(self, self.parallel.micro_batches(batch)), None)
        except memory.OUT_OF_MEMORY as error:
            raise memory.does_not_fit(self, batch, f"at {self.stage}, in half the batch as well") from error

    def _add_up(self, parts: Iterable, count: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
        losses: dict[str, Tensor] = {}
        stats: dict[str, Tensor] = {}
        said = ""
        for i, (part, weight, share, context) in enumerate(parts):
            with self.parallel.sync(is_last=i + 1 == count):
                with context, self.autocast():
                    out = self.network(part)
                self.scaler.scale(out.total * weight).backward()
            said = said or out.nonfinite
            for kept, new, factor in ((losses, out.losses, weight), (stats, out.stats, share)):
                for name, value in new.items():
                    kept[name] = kept.get(name, 0.0) + value.detach().float() * factor
        return losses, stats, said

    def seed_step(self) -> None:
        seed_everything(self.exp.seed, self.step, self.rank)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.amp == "off":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16 if self.amp == "bf16" else torch.float16)

    # -- evaluation and files -------------------------------------------------------------------------------------------

    def _end_epoch(self, epoch: int) -> None:
        """Saves, evaluates, and saves what came of it: a failing evaluation costs no training, a resume starts with it."""
        done, improved = epoch + 1, False
        if self.evaluator is not None and (done % self.exp.eval_interval_at(epoch) == 0 or done == self.exp.max_epoch):
            self.evaluation_due = True
            self._save(epochs_done=None)
            self._stop_if_asked()
            improved = self._evaluate(epoch)
            self.evaluation_due = False
        self._save(epochs_done=done, improved=improved)
        self._call("on_epoch_end")
        if self.step < self.total_steps:
            self._stop_if_asked()

    def judged_model(self) -> nn.Module:
        """The module that evaluation sees: the EMA's where EMA is on, else the unwrapped model."""
        return self.model if self.ema is None else self.ema.module(self.model)

    def _evaluate(self, epoch: int) -> bool:
        self.stage = f"the evaluation after epoch {epoch + 1}/{self.exp.max_epoch}"
        start = meter.now()
        kind = "raw" if self.ema is None else "EMA"
        logger.info(f"evaluating the {kind} weights of step {self.step} in float32")
        try:
            with self.signals.allowed():
                evaluation = self.evaluator.evaluate(self.judged_model())
        except failure.RankError as error:
            if error.signal:
                raise Stopped(error.signal) from error
            raise
        self.eta.add_evaluation(meter.now() - start)
        metric = self.exp.best_metric
        if metric not in evaluation.metrics:
            raise UsageError(f"best_metric={metric!r}: the evaluator gives {', '.join(evaluation.metrics)}")
        value = evaluation.metrics[metric]
        for line in self.exp.evaluation_lines(evaluation):
            logger.info(line)
        self.recorder.evaluation(self.step, epoch + 1, evaluation.metrics, evaluation.per_class)
        self.recorder.pictures("predictions", self.step, self.exp.evaluation_pictures(evaluation))
        improved = value == value and (self.best["value"] is None or value > self.best["value"])
        if improved:
            self.best = {"metric": metric, "value": float(value), "epoch": epoch + 1}
        elif value != value:
            logger.warning(f"{metric} is undefined (no ground truth): it cannot become the best")
        best = "none yet" if self.best["value"] is None else f"{self.best['value']:.4f} in epoch {self.best['epoch']}"
        logger.info(f"epoch {epoch + 1}/{self.exp.max_epoch}: {metric} {value:.4f}, best {best}")
        return improved

    def _save(self, epochs_done: int | None, improved: bool = False) -> None:
        self.parallel.synchronize(self.model, self.optimizer, self.ema)
        self.recovery.take_snapshot()
        self.is_saved = failure.compute_on_main(lambda: self._write(epochs_done, improved))

    def _write(self, epochs_done: int | None, improved: bool) -> bool:
        self.lock.check()
        weights = state.judged_weights(self) if improved or self.best["value"] is None else None
        is_last = bool(self._asked) or (epochs_done is not None and self.step == self.total_steps)
        return self.saver.save(state.training_state(self), epochs_done, weights, best=improved, must=is_last)

    def _save_is_due(self) -> bool:
        return bool(self.exp.save_interval_steps) and self.step % self.exp.save_interval_steps == 0

    def _stop_if_asked(self) -> None:
        """Right after a save."""
        if self._asked:
            raise Stopped(self._asked)

    def _open_run(self) -> None:
        in_last = self.epoch if self._at_epoch_end() and not self.evaluation_due and self.resumption.is_last else None
        self.run_dir = Path(failure.compute_on_main(lambda: enter_run_dir(self)))
        self.saver = Saver(self.run_dir, self.exp.keep_checkpoints, in_last, self.exp.max_failed_saves)
        if self.rank:
            open_log_file(self.run_dir / LOG_FILE)
        logger.info(f"run folder: {self.run_dir}")

    # -- small things ---------------------------------------------------------------------------------------------------

    def _new_loader(self) -> Any:
        return self.exp.get_train_loader(workers=self.options.workers, rank=self.rank, world=self.world, data_seed=self.data_seed)

    def reorder_data(self) -> None:
        """From the present step on, the samples of another order."""
        self.data_seed += 1
        self._close_loader()
        self.loader = self._new_loader()
        self.batches = self._open_batches()

    def _warm_up(self) -> None:
        train_mode(self.model, self.exp.frozen(self.epoch))
        wanted = self.exp.warmup_pass
        if wanted == "on" or (wanted == "auto" and self.device.type == "cuda") or self.options.occupy:
            memory.warm_up(self)

    def _open_batches(self) -> Any:
        self._first_step = self.step
        return iter(self.exp.get_prefetcher(self.loader.batches(start_step=self.step), self.device))

    def _call(self, name: str) -> None:
        for hook in self.hooks:
            getattr(hook, name)(self)

    def _eta(self) -> float:
        epochs_left = self.exp.max_epoch - self.epoch
        return self.eta.seconds(self.total_steps - self.step, -(-epochs_left // self.exp.eval_interval_at(self.epoch)))

    def _log_step(self) -> None:
        if not self.meter.step_times:  # all steps since the last line were left out
            return
        scalars = self.parallel.reduce_scalars(self.meter.means(), self.device)
        norms = {k.removeprefix("grad_norm/"): scalars.pop(k) for k in list(scalars) if k.startswith("grad_norm/")}
        self._any_loss = bool(self._any_loss) or scalars["loss"] != 0
        self.zeros.look(self.step, scalars)
        data_time, step_time = self.meter.times()
        done = self.step - 1
        steps = self.loader.steps_per_epoch
        images = self._facts.get("images", 0) * self.world
        self.recorder.train_line(
            self.step,
            f"epoch {done // steps + 1}/{self.exp.max_epoch} step {done % steps + 1}/{steps}",
            scalars,
            {g["name"]: g["lr"] for g in self.optimizer.param_groups},
            norms,
            epoch=done // steps + 1,
            eta=self._eta(),
            data_time=data_time,
            step_time=step_time,
            rate=images / step_time if step_time else 0.0,
            memory=meter.memory_text(self.device),
            facts=self._facts,
        )
        self.meter.clear()

    def close(self) -> None:
        self.recorder.close()
        close_log_file()
        self._close_loader()
        if self.lock is not None:
            self.lock.release()
        self.signals.close()  # last: a launcher sends SIGTERM when the first process has ended, which must not leave the lock

    def _close_loader(self) -> None:
        if hasattr(self.loader, "close"):
            self.loader.close()


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Python's, NumPy's and torch's generators as a function of (seed, step, rank), so that no generator state is saved."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
