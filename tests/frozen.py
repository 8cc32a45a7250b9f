"""Models whose batch norms do not look at the batch, so that a batch and its parts are the same mathematics."""

import torch
from torch import nn

from mmdet.models.norms import FrozenBatchNorm2d


def freeze_norms(model: nn.Module) -> nn.Module:
    """Replaces every batch norm by one that uses its running statistics; scale and shift still learn. Names stay."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                frozen = FrozenBatchNorm2d(norm.num_features, norm.eps, affine_trained=True)
                frozen.load_state_dict(norm.state_dict())
                setattr(parent, name, frozen)
    return model


@torch.no_grad()
def settle_norms(model: nn.Module, batches) -> nn.Module:
    """Gives the batch norms of a detector the mean statistics of some batches, as training would: with those that they are made
    with, what the last layers see all but vanishes."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = None  # a plain mean
    model.train()
    for batch in batches:
        model.predict(batch.images, batch.meta)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.running_var.clamp_(min=0.1 * float(norm.running_var.mean()))  # else a channel that is nearly still explodes later
    return model
