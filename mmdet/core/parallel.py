"""How one update is computed over micro-batches and processes: the seam between the Trainer and a strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmdet.core.distributed import get_world_size, mean_scalars
from mmdet.core.ema import EMA
from mmdet.core.guard import first_non_finite


def total_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all tensors together, ()."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _statistics(model: nn.Module) -> list[Tensor]:
    """Running statistics of the batch norms that are being trained. Frozen ones and other constants are left alone: their mean
    over three ranks would be off by a rounding."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


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
            with warnings.catch_warnings():  # newer versions name another argument, which older ones do not know
                warnings.simplefilter("ignore", FutureWarning)
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

    def synchronize(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None) -> None:
        """On every rank, before every save and every evaluation: afterwards rank 0 holds all that a checkpoint needs, and every
        rank judges the same module. A strategy whose ranks own different parts brings them together here; this one averages
        batch-norm statistics (the running update is linear, so averaging at the end equals averaging every step)."""
        self.average_buffers(model)
        if ema is not None:
            names = {id(b): name for name, b in model.named_buffers()}
            running = ema.running_state()["average"]
            self._average([running[names[id(b)]] for b in _statistics(model) if names[id(b)] in running])

    def average_buffers(self, model: nn.Module) -> None:
        """Means over ranks of the running batch-norm statistics."""
        self._average(_statistics(model))

    @torch.no_grad()
    def _average(self, tensors: list[Tensor]) -> None:
        if get_world_size() == 1 or not tensors:
            return
        flat = torch.cat([t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in tensors])
        dist.all_reduce(flat)
        flat /= get_world_size()
        for tensor, value in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value.view_as(tensor))

    def all_max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over all ranks of ``values`` (F,), float32: the one collective of a step, for the guard's flags
        and the number of a stop signal."""
        if get_world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def all_finite(self, flag: Tensor) -> bool:
        """Whether ``flag`` (bool, ()) is True on every rank."""
        return not bool(self.all_max((~flag).to(torch.float32).reshape(1)))

    def reduce_scalars(self, values: dict[str, float], device: torch.device) -> dict[str, float]:
        """Logged scalars over ranks, on every rank, at every log line: means of what all ranks hold under the same names."""
        return mean_scalars(values, device)

    def locate(self, model: nn.Module) -> str:
        """Name of the first parameter whose gradient is not finite; empty if there is none."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return first_non_finite(gradients)

    def clip(self, model: nn.Module) -> dict[str, Tensor]:
        """Scales gradients down to ``clip_norm`` and returns the norms before, by group (``all`` when global). Gradients whose
        norm is not finite are left as they are, for the report: the step is going to be left out."""
        groups = self.clip_groups(model) if self.clip_groups else {"all": list(model.parameters())}
        norms = {}
        for name, parameters in groups.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = total_norm(gradients)
            if self.clip_norm and gradients:
                factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_(gradients, torch.where(norm.isfinite(), factor, torch.ones_like(factor)))
            norms[name] = norm
        return norms
