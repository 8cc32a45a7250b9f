"""How one update is computed over micro-batches and processes: the seam between the Trainer and a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmdet.core.distributed import get_world_size


def total_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all tensors together, ()."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


class Parallel:
    """The default strategy: one model, DistributedDataParallel where there are several processes, ``grad_accum`` equal
    micro-batches. Another strategy (tasks on process groups, say) overrides these methods; the Trainer stays as it is.
    """

    def __init__(
        self,
        grad_accum: int = 1,
        clip_norm: float = 0.0,
        clip_groups: Callable[[nn.Module], dict[str, list[nn.Parameter]]] | None = None,
    ) -> None:
        self.grad_accum, self.clip_norm, self.clip_groups = grad_accum, clip_norm, clip_groups
        self._wrapped: nn.Module | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose forward computes the losses of a micro-batch. Called again when the set of trained parameters
        changes, since DDP fixes that set when it is made."""
        self._wrapped = model
        if get_world_size() > 1:
            device = next(model.parameters()).device
            ids = [device.index] if device.type == "cuda" else None
            self._wrapped = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
        return self._wrapped

    def micro_batches(self, batch: Any) -> Iterable[tuple[Any, float]]:
        """Parts of this rank's batch with the weight of each part's loss."""
        if self.grad_accum == 1:
            return [(batch, 1.0)]
        return [(part, 1.0 / self.grad_accum) for part in batch.split(self.grad_accum)]

    def sync(self, is_last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients travel with the last one only."""
        if is_last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def reduce_gradients(self, model: nn.Module) -> None:
        """Makes the gradients of the ranks equal; DDP did so already in backward."""

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Means over ranks of the float buffers (batch-norm statistics), before the model is judged or saved."""
        if get_world_size() == 1:
            return
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        if buffers:
            flat = torch.cat([b.reshape(-1).float() for b in buffers])
            dist.all_reduce(flat)
            flat /= get_world_size()
            for buffer, value in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(value.view_as(buffer))

    def all_finite(self, flag: Tensor) -> bool:
        """Whether ``flag`` (bool, ()) is True on every rank. The step's one look at the device."""
        if get_world_size() > 1:
            count = flag.to(torch.float32)
            dist.all_reduce(count, op=dist.ReduceOp.MIN)
            return bool(count > 0)
        return bool(flag)

    def clip(self, model: nn.Module) -> dict[str, Tensor]:
        """Scales gradients down to ``clip_norm`` and returns the norms before, by group (``all`` when global)."""
        groups = self.clip_groups(model) if self.clip_groups else {"all": list(model.parameters())}
        norms = {}
        for name, parameters in groups.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = total_norm(gradients)
            if self.clip_norm and gradients:
                torch._foreach_mul_(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
            norms[name] = norm
        return norms
