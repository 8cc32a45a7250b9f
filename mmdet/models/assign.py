"""What assigners of points to boxes share. B images, M most boxes of an image, I ignore regions, A points over all levels.

An assigner takes images in chunks, so that its intermediate tensors stay inside ``assign_bytes`` together; images do not
influence each other, so the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdet.data.structures import LossOutput, Targets
from mmdet.models.points import inside_boxes

ASSIGN_BYTES = 256 * 2**20
INSIDE_BYTES = 32  # of all tensors that live at once per (region, point) pair in ``inside_ignored``, rounded up
STAND_IN = 10.0  # largest value of predictions that replace those that are no numbers: safe under exp, whatever it means


class Assignment(NamedTuple):
    """For each point of each image the box that it learns. Where not ``positive``, the other fields mean nothing."""

    positive: Tensor  # (B, A) bool
    box_index: Tensor  # (B, A) int64, row of Targets
    scores: Tensor  # (B, A) target score, 0 where not positive


def finite_predictions(
    predictions: NamedTuple, names: Sequence[str], watched: Mapping[str, Tensor] | None = None
) -> tuple[NamedTuple, str]:
    """The predictions as they are and "", where all is finite; else stand-ins and a sentence for :func:`spoil`.

    A process that raised here would leave the others waiting for it in the next exchange between processes. So it goes on, with
    values small enough for every matching, through which gradients still reach every parameter, and whose losses count for
    nothing.

    Args:
        predictions: what the head says.
        names: its fields that the network computes, tensors (B, ...) or tuples of them.
        watched: what must be finite, (B, ...) each, under the names for the sentence; default: those fields.
    """
    tensors = {n: getattr(predictions, n).detach() for n in names} if watched is None else dict(watched)
    finite = torch.stack([t.isfinite().all() for t in tensors.values()]).tolist()
    if all(finite):
        return predictions, ""
    name, tensor = next(item for item, good in zip(tensors.items(), finite, strict=True) if not good)
    bad = ~tensor.isfinite().flatten(1)
    fault = (
        f"the predicted {name} {tuple(tensor.shape)} hold {int(bad.sum())} values that are NaN or infinite, in images "
        f"{bad.any(1).nonzero().flatten().tolist()} of the batch"
    )
    return predictions._replace(**{n: _stand_in(getattr(predictions, n)) for n in names}), fault


def _stand_in(value: Tensor | tuple[Tensor, ...]) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_stand_in, value))
    return value.nan_to_num(0.0, 0.0, 0.0).clamp(-STAND_IN, STAND_IN)


def spoil(output: LossOutput, fault: str) -> LossOutput:
    """``output`` with every loss NaN, where there is a ``fault``: whoever sees the total knows that the step is lost."""
    if not fault:
        return output
    return replace(output, losses={name: value * torch.nan for name, value in output.losses.items()}, nonfinite=fault)


def check_labels(targets: Targets, num_classes: int) -> None:
    """Raises ValueError naming the labels outside [0, ``num_classes``)."""
    wrong = targets.valid & ((targets.labels < 0) | (targets.labels >= num_classes))
    if wrong.any():
        values = sorted(set(targets.labels[wrong].tolist()))
        raise ValueError(f"labels {values} in the batch, but the model has {num_classes} classes (0 to {num_classes - 1})")


def image_chunks(batch: int, image_bytes: int, assign_bytes: int) -> list[slice]:
    """Slices of ``batch`` images that need ``image_bytes`` each and fit in ``assign_bytes`` together; one image at least."""
    size = max(1, assign_bytes // max(1, image_bytes))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


@torch.no_grad()
def inside_ignored(points: Tensor, ignore: Tensor, assign_bytes: int = ASSIGN_BYTES) -> Tensor:
    """Points (A, 2) that lie in some ignore box of the image, ignore (B, I, 4) px -> (B, A) bool. Padding holds no point."""
    batch, regions = ignore.shape[:2]
    result = torch.zeros((batch, len(points)), dtype=torch.bool, device=points.device)
    if regions:
        for rows in image_chunks(batch, regions * len(points) * INSIDE_BYTES, assign_bytes):
            result[rows] = inside_boxes(points, ignore[rows].unsqueeze(2)).any(1)
    return result


def targets_at(values: Tensor, assigned: Assignment) -> Tensor:
    """Rows of a Targets field (B, M, ...) at each point's box -> (B, A, ...); zeros where the batch has no boxes at all."""
    batch, num_points = assigned.box_index.shape
    if not values.shape[1]:
        return values.new_zeros((batch, num_points, *values.shape[2:]))
    rows = torch.arange(batch, device=values.device).unsqueeze(1)
    return values[rows, assigned.box_index]
