"""What happens when a loss or a gradient is no longer a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdet.errors import NonFiniteError


def stop_non_finite(
    where: str,
    losses: dict[str, Tensor],
    norms: dict[str, Tensor],
    lrs: dict[str, float],
    images: Sequence[str],
    cause: NonFiniteError | None = None,
) -> None:
    """Raises a NonFiniteError that says where, each loss term, gradient norms, learning rates and the batch's images.

    ``cause``: what a criterion said of predictions that it could not use; there are no losses then.
    """
    terms = ", ".join(f"{name} {float(value):.6g}" for name, value in losses.items())
    gradients = ", ".join(f"{name} {float(value):.6g}" for name, value in norms.items())
    rates = ", ".join(f"{name} {value:.6g}" for name, value in lrs.items())
    what = str(cause) if cause else f"losses {terms}; gradient norms {gradients}"
    raise NonFiniteError(
        f"training became non-finite at {where}: {what}; lr {rates}; images {', '.join(images)}. Nothing was saved since "
        "the last checkpoint. Look at these images, lower the learning rate (basic_lr_per_img), or clip gradients (clip_norm=10)."
    ) from cause


def require_finite(payload: Any, what: str, name: str = "") -> None:
    """Raises a NonFiniteError that names the first tensor of a payload with NaN or infinity: such a file is not written.

    Weights and batch-norm statistics can overflow in a step whose losses and gradients were still numbers.
    """
    if isinstance(payload, Tensor):
        if payload.is_floating_point() and not bool(torch.isfinite(payload).all()):
            raise NonFiniteError(
                f"{what} would hold values that are not finite ({name}), so nothing was saved; the files saved earlier are "
                "good. Lower the learning rate (basic_lr_per_img=...), or clip gradients (clip_norm=10)."
            )
    elif isinstance(payload, Mapping | list | tuple):
        entries = payload.items() if isinstance(payload, Mapping) else enumerate(payload)
        for key, value in entries:
            require_finite(value, what, f"{name}.{key}" if name else str(key))
