"""A trained model out of a checkpoint, whole, to be judged or used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loguru import logger
from torch import nn

from mmdet.core.checkpoint import LoadOptions
from mmdet.errors import CheckpointError

if TYPE_CHECKING:
    from mmdet.exp import Exp


def load_trained(
    exp: Exp, model: nn.Module, path: str, content: Mapping[str, Any], options: LoadOptions
) -> tuple[str, int | None]:
    """Loads the file ``path``, whose ``content`` was read before, into ``model``.

    Returns:
        The kind of its weights ("EMA" or "raw"), and the training step where the file tells it.

    Raises:
        CheckpointError: the file lacks tensors of the model, or has no raw weights although they were asked for.
    """
    if options.raw and content.get("weights") == "ema":
        raise CheckpointError(f"{path} holds EMA weights only; the raw ones are in last.pth and best.pth of the same run")
    report = exp.load_pretrained(model, path, options)
    fresh = [*report.missing, *report.reinitialized]
    if fresh:
        logger.info(f"{report}")
        raise CheckpointError(
            f"{path} does not hold the whole model: {len(fresh)} tensors would stay freshly initialised, such as "
            f"{fresh[0]}{' (' + report.details[fresh[0]] + ')' if fresh[0] in report.details else ''}. Choose the exp and the "
            "num_classes that the file was made with"
        )
    logger.info(report.summary())
    has_average = isinstance(content.get("ema"), Mapping) or content.get("weights") == "ema"
    step = content.get("step")
    return "EMA" if has_average and not options.raw else "raw", int(step) if isinstance(step, int) else None
