"""Whether a step fits into memory: tried before training, and what to do when one does not fit later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger

from mmdet.core import meter
from mmdet.core.guard import BufferKeeper
from mmdet.core.normalizers import record_normalizers, use_normalizers
from mmdet.errors import UserError

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # torch 2.4 has the second only


class DoesNotFitError(UserError):
    """A training step needs more memory than the device has."""

    exit_code = 1  # a restart with --resume auto may go on: other batches are smaller


def describe(batch: Any) -> str:
    """A batch in words: its images, their size, the most boxes of an image."""
    facts = batch.facts() if hasattr(batch, "facts") else {}
    words = [f"{facts['images']} images" if "images" in facts else "a batch"]
    words += [f"{name} {value}" for name, value in facts.items() if name != "images"]
    valid = getattr(getattr(batch, "targets", None), "valid", None)
    if valid is not None and valid.numel():
        words.append(f"up to {int(valid.sum(1).max())} boxes in an image")
    return ", ".join(words)


def does_not_fit(trainer: Trainer, batch: Any, when: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"out of memory on {trainer.device} {when}: {describe(batch)} on each device. Use a smaller batch (-b), or keep it and "
        f"compute it in parts (grad_accum={2 * trainer.exp.grad_accum}), smaller images (input_size, multiscale), or amp=fp16"
    )


def warm_up(trainer: Trainer) -> None:
    """One forward and backward pass on the largest batch that the data can give, before the first step: what does not fit fails
    now. Leaves no trace: gradients are dropped, batch-norm statistics put back, random generators are seeded in every step.

    Raises:
        DoesNotFitError: with the batch in words and what to do.
    """
    batch = trainer.exp.largest_batch(trainer.loader)
    if batch is None:
        logger.info("warmup_pass: this exp cannot say what its largest batch is, so none was tried")
        return
    trainer.stage = "the warm-up pass"
    buffers = BufferKeeper(trainer.model)
    part, _ = next(iter(trainer.parallel.micro_batches(batch.to(trainer.device))))
    try:
        with trainer.autocast():
            trainer.model(part).total.backward()
    except OUT_OF_MEMORY as error:
        raise does_not_fit(trainer, part, "in the warm-up pass, which tries the largest input") from error
    finally:
        buffers.restore()
        trainer.optimizer.zero_grad(set_to_none=True)
    memory = meter.memory_text(trainer.device)
    logger.info(f"warm-up pass: {describe(part)}: peak memory {memory}, the optimizer's own state not counted")
    if trainer.device.type == "cuda" and not trainer.options.occupy:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(trainer.device)


class SplitSteps:
    """Steps that did not fit and are done again in smaller parts, with the divisors of the whole batch."""

    def __init__(self) -> None:
        self.told = False

    def parts(self, trainer: Trainer, parts: Iterable[tuple[Any, float]]) -> Iterator[tuple[Any, float, float, Any]]:
        """(piece, weight of its losses, weight of its statistics, context around its forward pass) for the halves of every
        micro-batch.

        A first pass without gradients finds the divisors (numbers of positives and such) of each whole micro-batch.

        Raises:
            DoesNotFitError: a micro-batch is a single image already.
        """
        for part, weight in list(parts):
            count = len(part)
            if count < 2:
                raise does_not_fit(trainer, part, f"at {trainer.stage}, with a single image at a time")
            pieces = part.split(2 if count % 2 == 0 else count)
            if not self.told:
                self.told = True
                logger.warning(
                    f"out of memory at {trainer.stage}: {describe(part)}; the step is done again in {len(pieces)} parts of "
                    f"{len(pieces[0])} images, and so is any other that does not fit (the same update, but for batch-norm "
                    "statistics). grad_accum=2, a smaller -b or smaller images make that unnecessary"
                )
            records = []
            buffers = BufferKeeper(trainer.model)
            for piece in pieces:
                trainer.seed_step()
                with torch.no_grad(), trainer.autocast(), record_normalizers() as record:
                    trainer.model(piece)
                records.append(record)
            buffers.restore()
            for piece in pieces:
                trainer.seed_step()
                yield piece, weight, weight * len(piece) / count, use_normalizers(records)


def free(device: torch.device) -> None:
    """Gives cached blocks back to the device, after a step that did not fit."""
    with contextlib.suppress(RuntimeError):
        if device.type == "cuda":
            torch.cuda.empty_cache()
