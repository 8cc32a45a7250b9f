"""What a sum of losses is divided by: numbers of positives, of images, sums of scores, over everything that makes one update.

A criterion passes its own share and gets the divisor. Normally the share is that of a whole batch. A step can also be computed in
parts, each small enough for the memory, whose gradients add up to those of the whole batch:

    records = []
    for part in parts:
        with torch.no_grad(), record_normalizers() as record:
            network(part)
        records.append(record)
    for part in parts:
        with use_normalizers(records):
            network(part).total.backward()  # weight 1: a part's losses are its share of the batch's

Equal up to the statistics of batch norms, which see one part only, as long as both passes over a part compute the same: the
caller puts back the buffers that the first pass moved, and seeds the generators alike where layers draw random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mmdet.core.distributed import get_world_size

Record = list[Tensor]  # the packed values of each call, in the order of the calls

_recording: Record | None = None  # where values go instead of to the other ranks
_given: Iterator[Tensor] | None = None  # the values that replace those of each call
_local = False  # whether a call's own values are all there is: no sum over ranks


def mean_normalizers(*values: Tensor) -> tuple[Tensor, ...]:
    """``max(sum over ranks, 1) / world`` of each scalar, with one packed all-reduce.

    Every rank must call it in every training step, also without boxes. At world size 1 it is ``max(value, 1)``, the formula
    of the reference implementations.
    """
    packed = _settle(torch.stack([v.detach().to(torch.promote_types(v.dtype, torch.float32)).reshape(()) for v in values]))
    world = 1 if _local else get_world_size()
    if world > 1 and _recording is None:
        dist.all_reduce(packed)
    return tuple((packed.clamp(min=1.0) / world).unbind())


def image_normalizer(images: int, like: Tensor) -> Tensor:
    """The number of images of this rank's batch, () in at least float32 on the device of ``like``. All ranks hold equally many,
    so nothing is reduced."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return _settle(torch.full((1,), float(images), dtype=dtype, device=like.device))[0]


def _settle(packed: Tensor) -> Tensor:
    """What the running context makes of a call's own values (F,)."""
    if _recording is not None:
        _recording.append(packed.clone())
    if _given is None:
        return packed
    try:
        total = next(_given)
    except StopIteration:
        total = None
    if total is None or total.shape != packed.shape:
        raise RuntimeError("use_normalizers: the model asks for other normalisers than it did while they were recorded")
    return total.to(packed).clone()


@contextmanager
def local_normalizers() -> Iterator[None]:
    """Inside, nothing is summed over ranks: for batches that stand alone, such as those of ranks that do different things."""
    global _local
    before, _local = _local, True
    try:
        yield
    finally:
        _local = before


def summed_ranks() -> int:
    """How many ranks' shares a divisor counts at present."""
    return 1 if _local else get_world_size()


@contextmanager
def record_normalizers() -> Iterator[Record]:
    """Inside, every call's values are kept in the list that is yielded, and nothing is reduced over ranks: the losses that come
    out are not for learning."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


@contextmanager
def use_normalizers(records: Sequence[Record]) -> Iterator[None]:
    """Inside, for one forward pass, the sums of ``records``, one for each part of the batch, stand for the model's own values.

    Sums over ranks are taken as always, so where there are several processes all must work in as many parts.

    Raises:
        RuntimeError: the model asks for other values, or more, than those that were recorded.
    """
    global _given
    totals = [torch.stack(calls).sum(0) for calls in zip(*records, strict=True)]
    before, _given = _given, iter(totals)
    try:
        yield
    finally:
        _given = before
