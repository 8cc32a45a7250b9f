"""What happens when a loss or a gradient is no longer a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmdet.errors import NonFiniteError


def stop_non_finite(
    losses: dict[str, Tensor], norms: dict[str, Tensor], lrs: dict[str, float], where: str, image_ids: Sequence[Any]
) -> None:
    """Raises a NonFiniteError that says where, each loss term, gradient norms, learning rates and the batch's images."""
    terms = ", ".join(f"{name} {float(value):.6g}" for name, value in losses.items())
    gradients = ", ".join(f"{name} {float(value):.6g}" for name, value in norms.items())
    rates = ", ".join(f"{name} {value:.6g}" for name, value in lrs.items())
    raise NonFiniteError(
        f"training became non-finite at {where}: losses {terms}; gradient norms {gradients or 'not computed'}; lr {rates}; "
        f"image ids {list(image_ids)}. Nothing was saved since the last checkpoint. Look at these images, or lower the "
        "learning rate (basic_lr_per_img=...), or clip gradients (clip_norm=10)."
    )
