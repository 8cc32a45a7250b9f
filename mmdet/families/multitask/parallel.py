"""How tasks are trained on any number of processes with the same update.

Objective of an iteration, with S_t batches of task t and w_t its weight:

    sum over t of w_t * (1 / S_t) * sum over s < S_t of L_t(batch of shard s)

where every L is normalised inside its own batch. A rank computes the batches of its shards one after another; gradients of a
component are then summed over the ranks that hold it. So the update does not depend on where the shards are computed, up to the
order of additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmdet.core.distributed import all_gather_objects, get_rank, get_world_size
from mmdet.core.ema import EMA
from mmdet.core.parallel import Parallel, total_norm
from mmdet.errors import UsageError
from mmdet.families.multitask.batches import IterationBatch, TaskBatch
from mmdet.families.multitask.collectives import (
    broadcast_tensors,
    collect_optimizer_state,
    handshake,
    signature,
    sum_gradients,
    weighted_mean,
)
from mmdet.families.multitask.groups import OwnerMap, TaskGroups, build_task_groups
from mmdet.families.multitask.model import MultiTaskModel
from mmdet.families.multitask.task import TaskSpec

NormMode = Literal["local", "frozen", "sync"]


class MultiTaskParallel(Parallel):
    """Tasks on process groups.

    Args:
        specs: the tasks.
        clip: largest gradient norm by kind of component ("backbone", "neck", "head", "task"), each component by itself; 0 or
            absent: none.
        clip_norm: largest norm over everything together, with ``clip_mode="global"``; 0: none.
        clip_mode: which of the two counts.
        norms: batch norms by kind of component: "local" (statistics of each batch, running ones averaged), "frozen", "sync".
        seed: of the random layers, which depend on (seed, step, task, shard) alone.
        scaled: gradients carry fp16's scale, so that an overflow on one rank must be one on all.
        settings: lines that all processes must agree on.
        group_timeout: seconds after which a rank that waits for a dead one gives up.
    """

    def __init__(
        self,
        specs: Sequence[TaskSpec],
        clip: Mapping[str, float] | None = None,
        clip_norm: float = 0.0,
        clip_mode: Literal["component", "global"] = "component",
        norms: Mapping[str, NormMode] | None = None,
        seed: int = 0,
        scaled: bool = False,
        settings: Sequence[str] = (),
        group_timeout: float = 1800.0,
    ) -> None:
        super().__init__(clip_norm=clip_norm)
        self.specs, self.clip_limits, self.clip_mode = tuple(specs), dict(clip or {}), clip_mode
        self.norm_modes, self.seed, self.settings = dict(norms or {}), seed, list(settings)
        self.scaled = scaled
        self.group_timeout = group_timeout
        self.owner = OwnerMap(specs)
        self.groups: TaskGroups | None = None
        self.rank = 0

    # -- before training --------------------------------------------------------------------------------------------------

    def wrap(self, model: MultiTaskModel) -> nn.Module:
        """The first call lays the tasks out on the ranks, makes sure that these agree, and gives every component the values of
        its first rank; a later one (another set of trained parameters) only notes what is trained."""
        first = self.groups is None
        if first:
            self.rank = get_rank()
            self.groups = build_task_groups(self.specs, get_world_size())
        self._note(model)
        if first and get_world_size() > 1:
            self._check_sync()
            handshake(self.groups.components, self._signatures(model), self.settings)
            self._process_groups = self.groups.materialize(self.group_timeout)
            self._synchronize_norms(model)
            for key, ranks in self.groups.components.items():
                if len(ranks) > 1 and self.rank in ranks:
                    broadcast_tensors(self._tensors(model, key), ranks[0], self._group(key))
        if first:
            self._network = _ShardNetwork(model, self)
        return self._network

    def _note(self, model: MultiTaskModel) -> None:
        names = dict(model.named_parameters())
        outside = [name for name in names if name not in {n for own in self.owner.of(list(names)).values() for n in own}]
        if outside:
            raise UsageError(f"parameter {outside[0]!r} belongs to no component: heads, necks and backbones hold all of them")
        self._parameters = {key: [names[n] for n in own] for key, own in self.owner.of(list(names)).items()}

    def _signatures(self, model: MultiTaskModel) -> dict[str, list[str]]:
        """Of the components of this rank, without tensors that are in no checkpoint."""
        state = model.state_dict()
        return {k: signature(k, {n: state[n] for n in own}) for k, own in self.owner.of(list(state)).items()}

    def _tensors(self, model: nn.Module, key: str) -> list[Tensor]:
        state = model.state_dict(keep_vars=True)
        return [state[name] for name in self.owner.of(list(state))[key]]

    def _group(self, key: str) -> Any:
        return self._process_groups[self.groups.components[key]]

    def _check_sync(self) -> None:
        for key, ranks in self.groups.components.items():
            if self.norm_modes.get(key.split("/")[0]) == "sync":
                counts = {self.groups.units_of(key, r) for r in ranks}
                if len(counts) > 1:
                    raise UsageError(
                        f"synchronised batch norm of {key}: its ranks {list(ranks)} must have equally many batches; they have "
                        f"{[self.groups.units_of(key, r) for r in ranks]}. Use as many processes as shards, or local norms"
                    )

    def _synchronize_norms(self, model: MultiTaskModel) -> None:
        """Batch norms of "sync" components see the batches of all ranks of their group, and of no other."""
        on_cuda = next(model.parameters()).device.type == "cuda"
        for key, module in model.components().items():
            if self.norm_modes.get(key.split("/")[0]) != "sync":
                continue
            if not on_cuda:
                logger.info(
                    f"synchronised batch norm works on CUDA only: {key} keeps local statistics, averaged before evaluation"
                )
            elif len(self.groups.components[key]) > 1 and self.rank in self.groups.components[key]:
                for name, child in list(module.named_children()):
                    setattr(module, name, nn.SyncBatchNorm.convert_sync_batchnorm(child, self._group(key)))

    # -- the step ---------------------------------------------------------------------------------------------------------

    def micro_batches(self, batch: IterationBatch) -> Iterable[tuple[TaskBatch, float]]:
        """This rank's batches, in task order, each with weight 1 / S_t; the model applies w_t."""
        self._network.begin()
        return [(part, 1.0 / self.groups.shards[part.task]) for part in batch.parts]

    def sync(self, is_last: bool) -> AbstractContextManager:
        return nullcontext()  # gradients travel once, in reduce_gradients

    def reduce_gradients(self, model: nn.Module) -> None:
        self._network.end()
        if get_world_size() > 1:
            for key, ranks in self.groups.components.items():
                if len(ranks) > 1 and self.rank in ranks:
                    sum_gradients([p for p in self._parameters[key] if p.requires_grad], self._group(key))
            if self.scaled:
                self._share_overflow(model)

    @torch.no_grad()
    def _share_overflow(self, model: nn.Module) -> None:
        """A gradient that overflowed on one rank makes one of every rank NaN: the scalers of all ranks then leave out the same
        steps, where one alone would let shared components drift apart."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        bad = ~total_norm(gradients).isfinite()
        if not self.all_finite(~bad):
            gradients[0].fill_(torch.nan)

    @torch.no_grad()
    def clip(self, model: nn.Module) -> dict[str, Tensor]:
        """Scales gradients down and returns the norms before, by component, of this rank's components. Thresholds never depend
        on the rank and norms are those of reduced gradients, so shared components stay equal. Norms that are not finite leave
        gradients as they are: the step is going to be left out."""
        gradients = {key: self._gradients(key) for key in self.groups.owned(self.rank)}
        norms = {_short(key, self.groups): total_norm(found) for key, found in gradients.items() if found}
        if self.clip_mode == "global":
            norms = {"all": self._global_norm(gradients, next(model.parameters()).device), **norms}
            _scale([g for found in gradients.values() for g in found], norms["all"], self.clip_norm)
            return norms
        for key, found in gradients.items():
            if found:
                _scale(found, norms[_short(key, self.groups)], self.clip_limits.get(key.split("/")[0], 0.0))
        return norms

    def _gradients(self, key: str) -> list[Tensor]:
        return [p.grad for p in self._parameters[key] if p.grad is not None]

    def _global_norm(self, gradients: Mapping[str, list[Tensor]], device: torch.device) -> Tensor:
        """Over all components of all ranks, each counted once, by its first rank."""
        mine = [total_norm(found) for key, found in gradients.items() if self.groups.components[key][0] == self.rank and found]
        square = sum((n.double() ** 2 for n in mine), torch.zeros((), dtype=torch.float64)).to(device, torch.float64)
        if get_world_size() > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def locate(self, model: nn.Module) -> str:
        """The first parameter with a gradient that is not finite, of any rank; empty if there is none."""
        found = super().locate(model)
        return next((f"{name} on rank {r}" if r else name for r, name in enumerate(all_gather_objects(found)) if name), "")

    # -- everything in one place --------------------------------------------------------------------------------------------

    def average_buffers(self, model: nn.Module) -> None:
        """Means over the shards of running batch-norm statistics, in each component's group."""
        state = model.state_dict(keep_vars=True)
        names = _statistics(model)
        self._average({key: [state[n] for n in own if n in names] for key, own in self.owner.of(list(state)).items()})

    def _average(self, tensors: Mapping[str, list[Tensor]]) -> None:
        for key, ranks in self.groups.components.items():
            if len(ranks) > 1 and self.rank in ranks:
                counts = {r: self.groups.units_of(key, r) for r in ranks}
                weighted_mean(tensors[key], counts[self.rank], sum(counts.values()), self._group(key))

    @torch.no_grad()
    def synchronize(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None) -> None:
        """Afterwards every rank has all weights, batch-norm statistics (averaged over shards) and EMA values, and rank 0 also
        the optimizer's buffers of every component, so that one file resumes on any number of processes."""
        if get_world_size() == 1:
            return
        self.average_buffers(model)
        average = {} if ema is None else ema.running_state()["average"]
        if average:
            names = _statistics(model)
            owned = self.owner.of(list(average))
            self._average({key: [average[n] for n in own if n in names] for key, own in owned.items()})
        device = next(model.parameters()).device
        for key, ranks in self.groups.components.items():
            if len(ranks) < get_world_size():
                tensors = self._tensors(model, key) + [average[n] for n in self.owner.of(list(average)).get(key, [])]
                if tensors:
                    broadcast_tensors(tensors, ranks[0])
                if self._parameters[key] and 0 not in ranks:
                    collect_optimizer_state(optimizer, self._parameters[key], ranks[0], self.rank, device)

    def reduce_scalars(self, values: dict[str, float], device: torch.device) -> dict[str, float]:
        """Scalars of the tasks over ranks: sums, since each batch carries 1 / S_t and is on one rank; gradient norms, which are
        equal where they are known, as they are."""
        ranks = all_gather_objects(values)
        result: dict[str, float] = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            known = [rank[name] for rank in ranks if name in rank]
            result[name] = known[0] if name.startswith("grad_norm/") else sum(known)
        for spec in self.specs:
            logger.info(f"task {spec.name}: {_of_task(spec.name, result)}")
        return result


def _of_task(name: str, scalars: Mapping[str, float]) -> str:
    """What is known of a task, in words: its loss, top-1 where there is one, then the terms (with the task's weight)."""
    first = {k.split("/")[0]: v for k, v in scalars.items() if k in (f"loss/{name}", f"top1/{name}")}
    terms = {k.split("/", 1)[1].removeprefix("loss_"): v for k, v in scalars.items() if k.startswith(f"{name}/")}
    return " ".join(f"{k} {v:.4g}" for k, v in (first | terms).items())


def _short(key: str, groups: TaskGroups) -> str:
    """``backbone`` and ``neck`` where there is only one of them; heads by task."""
    kind = key.split("/")[0]
    alone = sum(other.split("/")[0] == kind for other in groups.components) == 1
    return kind if alone and kind in ("backbone", "neck") else key


@torch.no_grad()
def _scale(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    if limit and gradients:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(norm.isfinite(), factor, torch.ones_like(factor))
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def _statistics(model: nn.Module) -> set[str]:
    """Names of the running statistics of batch norms that are being trained."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
        for name in ("running_mean", "running_var")
    }


class _ShardNetwork(nn.Module):
    """Forward of one batch as if it were alone: random layers are seeded by (seed, step, task, shard), and the running
    statistics of a component start from their values before the iteration for each of its batches; afterwards they are the mean.
    That is what as many processes as shards would come to.
    """

    def __init__(self, model: MultiTaskModel, parallel: MultiTaskParallel) -> None:
        super().__init__()
        self.model, self._parallel = model, parallel
        groups, rank = parallel.groups, parallel.rank
        self._users = {k: groups.users[k] for k in groups.components if groups.units_of(k, rank) > 1}
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._before: dict[str, list[Tensor]] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._running: dict[str, list[Tensor]] = {}

    def forward(self, part: TaskBatch) -> Any:
        keys = [key for key, users in self._users.items() if part.task in users] if self.model.training else []
        for key in keys:
            self._start(key)
        if self.model.training:
            entropy = [self._parallel.seed, part.step, part.task, part.shard]
            torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        out = self.model(part)
        for key in keys:
            self._collect(key)
        return out

    @torch.no_grad()
    def _start(self, key: str) -> None:
        if key not in self._before:
            module = self.model.components()[key]
            norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.running_mean is not None]
            self._running[key] = [b for m in norms for b in (m.running_mean, m.running_var, m.num_batches_tracked)]
            self._before[key] = [b.clone() for b in self._running[key]]
        else:  # the backward pass of the batch before is over, so its statistics may be changed
            for buffer, value in zip(self._running[key], self._before[key], strict=True):
                buffer.copy_(value)

    @torch.no_grad()
    def _collect(self, key: str) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._sums:
            self._sums[key] = [b.clone() for b in self._running[key]]
        else:
            for total, buffer in zip(self._sums[key], self._running[key], strict=True):
                total.add_(buffer)

    @torch.no_grad()
    def end(self) -> None:
        """All batches of the iteration are done: running statistics become the means."""
        for key, totals in self._sums.items():
            for buffer, total in zip(self._running[key], totals, strict=True):
                mean = total / self._counts[key] if total.is_floating_point() else total // self._counts[key]
                buffer.copy_(mean)
        self.begin()
