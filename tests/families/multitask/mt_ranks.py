"""What the ranks of the multi-task tests do; each function also works in a single process, which is the truth to compare with."""

import time

import torch
import torch.distributed as dist
from mt_toy import digest, toy_exp
from torch import nn

from mmdet.core.distributed import get_rank, get_world_size
from mmdet.data.structures import ImageMeta, LossOutput
from mmdet.errors import UsageError
from mmdet.families.multitask.batches import IterationBatch, LabelledBatch, TaskBatch
from mmdet.families.multitask.heads import CrossEntropy
from mmdet.families.multitask.model import MultiTaskModel
from mmdet.families.multitask.parallel import MultiTaskParallel
from mmdet.families.multitask.task import TaskSpec

STEPS = 20


class Run:
    """A training loop without a Trainer: the strategy's methods in the Trainer's order."""

    def __init__(self, data, dtype=torch.float64, seed=0, **fields):
        self.exp = toy_exp(data_dir=str(data), **fields)
        self.loader = self.exp.get_train_loader(0, get_rank(), get_world_size())
        torch.manual_seed(seed)
        self.model = self.exp.get_model().to(dtype).train()
        self.optimizer = self.exp.get_optimizer(self.model)
        self.parallel = self.exp.get_parallel()
        self.network = self.parallel.wrap(self.model)
        self.ema = self.exp.get_ema()
        self.ema.attach(self.model)
        self.ema._average = {k: v.to(dtype) for k, v in self.ema._average.items()}
        self.batches = self.loader.batches()
        self.norms, self.scalars = [], []

    def step(self):
        scalars = {}
        for part, weight in self.parallel.micro_batches(next(self.batches)):
            out = self.network(part)
            (out.total * weight).backward()
            for name, value in {**out.losses, **out.stats}.items():
                scalars[name] = scalars.get(name, 0.0) + float(value.detach()) * weight
        self.parallel.reduce_gradients(self.model)
        norms = {k: float(v) for k, v in self.parallel.clip(self.model).items()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = self.model.state_dict()
        self.ema.updates += 1
        for name, average in self.ema._average.items():  # in the run's own precision, which the EMA itself does not keep
            average.lerp_(state[name], 0.1)
        self.norms.append(norms)
        self.scalars.append(self.parallel.reduce_scalars(scalars | {f"grad_norm/{k}": v for k, v in norms.items()}, "cpu"))

    def run(self, steps=STEPS):
        for _ in range(steps):
            self.step()
        return self

    def shared(self):
        return {
            n: p
            for n, p in self.model.state_dict().items()
            if n.startswith(("backbones.", "necks.")) and "running" not in n and "batches" not in n
        }

    def result(self):
        """Everything that must agree, on rank 0 after synchronising; on every rank what it held before."""
        shared = self.shared()
        before = {part: digest({n: v for n, v in shared.items() if n.startswith(part)}) for part in ("backbones", "necks")}
        before["running"] = {n: v.clone() for n, v in self.model.state_dict().items() if "backbones" in n and "running_" in n}
        self.parallel.synchronize(self.model, self.optimizer, self.ema)
        buffers = {}
        for name, p in self.model.named_parameters():
            buffers |= {f"{name} {k}": v.double() for k, v in self.optimizer.state.get(p, {}).items()}
        return {
            "model": {n: v.double() for n, v in self.model.state_dict().items()},
            "ema": {n: v.double() for n, v in self.ema._average.items()},
            "optimizer": buffers,
            "norms": self.norms,
            "scalars": self.scalars,
            "before": before,
            "after": digest(self.model.state_dict()),
        }


VARIANTS = {
    "sgd64": {"dtype": torch.float64},
    "sgd32": {"dtype": torch.float32},
    "adamw64": {
        "dtype": torch.float64,
        "optimizer": "adamw",
        "basic_lr_per_img": 5e-5 / 8,
        "clip": {"backbone": 0.05, "neck": 0.05, "head": 0.05},
    },
    "adamw32": {
        "dtype": torch.float32,
        "optimizer": "adamw",
        "basic_lr_per_img": 5e-5 / 8,
        "clip": {"backbone": 0.05, "neck": 0.05, "head": 0.05},
    },
    "global64": {"dtype": torch.float64, "clip_mode": "global", "clip_norm": 0.05},
    "dropout64": {"dtype": torch.float64, "dropout": 0.3},
}


def run_variants(data, names, steps=STEPS):
    return {name: Run(data, **VARIANTS[name]).run(steps).result() for name in names}


def wrong_clip_rule(data):
    """The reference's rule, thresholds that grow with the size of a rank's own task, as a check of the checker."""
    run = Run(data, clip={"backbone": 0.05})
    task = run.parallel.groups.placement[get_rank()][0].task
    run.parallel.clip_limits["backbone"] *= run.parallel.groups.shards[task] ** 0.5
    run.run()
    first = {n: v.clone() for n, v in run.shared().items()}
    for value in first.values():
        if value.is_floating_point():
            dist.broadcast(value, 0)
    return max(float((first[n] - v).abs().max()) for n, v in run.shared().items() if v.is_floating_point())


# -- groups -------------------------------------------------------------------------------------------------------------------


class Same(nn.Module):
    """A normalisation that does nothing."""

    def forward(self, images, meta=None):
        return images


class Tiny(nn.Module):
    out_channels = (1,)

    def __init__(self, value=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, images):
        return [images[:, :1] * self.w]


class Times(nn.Module):
    """A head with one number; the loss is linear in everything, so gradients are known."""

    def __init__(self, channels):
        super().__init__()
        self.h = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, maps):
        return maps[-1].mean((1, 2, 3)) * self.h


class Sum(nn.Module):
    def forward(self, predictions, batch):
        return LossOutput({"loss_sum": predictions.mean()})


def linear_task(name, backbone=0, shards=1, **more):
    return TaskSpec(name, "classification", None, 1, Times, shards=shards, share={"backbone": backbone}, criterion=Sum, **more)


def linear_model(specs, normalize_weights=True, value=1.0):
    return MultiTaskModel(specs, Same(), lambda: Tiny(value), list, normalize_weights=normalize_weights)


def value_batch(task, shard, value):
    images = torch.full((1, 3, 1, 1), float(value), dtype=torch.float64)
    return TaskBatch(task, shard, LabelledBatch(images, torch.zeros(1, dtype=torch.int64), [ImageMeta((1, 1), (1, 1))], [0]))


def gradients_of(specs, values, normalize_weights):
    """Reduced gradients of the linear model; ``values``: (task, shard) -> the input, which is the local gradient of w."""
    model = linear_model(specs, normalize_weights)
    parallel = MultiTaskParallel(specs)
    network = parallel.wrap(model)
    units = parallel.groups.placement[get_rank()]
    for part, weight in parallel.micro_batches(IterationBatch([value_batch(t, s, values[t, s]) for t, s in units])):
        (network(part).total * weight).backward()
    parallel.reduce_gradients(model)
    return {n: None if p.grad is None else float(p.grad) for n, p in model.named_parameters()}


def case_x04():
    """Two groups of two, a shared scalar; the tasks' data sets have 3 and 5 batches."""
    specs = [linear_task("a", shards=2), linear_task("b", shards=2)]
    values = {(0, 0): 1, (0, 1): 3, (1, 0): 10, (1, 1): 30}
    summed, mean = gradients_of(specs, values, False), gradients_of(specs, values, True)
    model = linear_model(specs)
    parallel = MultiTaskParallel(specs)
    network = parallel.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(15):  # 5 passes over one, 3 over the other
        parts = [value_batch(t, s, step % (3, 5)[t] + s) for t, s in parallel.groups.placement[get_rank()]]
        for part, weight in parallel.micro_batches(IterationBatch(parts)):
            (network(part).total * weight).backward()
        parallel.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {"summed": summed, "mean": mean, "end": {n: float(p.detach()) for n, p in model.named_parameters()}}


def group_members(shards, backbones):
    """Who is in this rank's groups, asked of the groups themselves."""
    specs = [linear_task(n, b, s) for n, s, b in zip("abc", shards, backbones, strict=True)]
    parallel = MultiTaskParallel(specs)
    parallel.wrap(linear_model(specs))
    found = {}
    for key in parallel.groups.owned(get_rank()):
        ranks = parallel.groups.components[key]
        if len(ranks) > 1:
            answers = [None] * len(ranks)
            dist.all_gather_object(answers, get_rank(), group=parallel._group(key))
            found[key] = answers
        else:
            found[key] = [get_rank()]
    return found


def start_values():
    """Every rank begins with other values; what a component has after the start."""
    specs = [linear_task(n, b, s) for n, s, b in zip("abc", (1, 2, 1), (0, 0, 1), strict=True)]
    model = linear_model(specs, value=float(get_rank()))
    with torch.no_grad():
        for head in model.heads.values():
            head.h.fill_(100.0 + get_rank())
    MultiTaskParallel(specs).wrap(model)
    return {n: float(p.detach()) for n, p in model.named_parameters()}


def odd_rank():
    """Rank 2 has a layer that the others lack, then another setting."""
    specs = [linear_task("a"), linear_task("b", shards=3)]
    model = linear_model(specs)
    if get_rank() == 2:
        model.backbones["0"].extra = nn.Linear(2, 2)
    start = time.monotonic()
    messages = []
    for settings in ([], [f"seed={get_rank() // 3}"]):
        try:
            MultiTaskParallel(specs, settings=settings).wrap(model if not settings else linear_model(specs))
            messages.append("nothing was noticed")
        except UsageError as error:
            messages.append(str(error))
    return messages, time.monotonic() - start


def accuracy_over_ranks():
    """Case MT-24: 3 of 4 on one rank, 1 of 4 on another, as the log gets it."""
    specs = [linear_task("a", shards=4)]
    logits = torch.eye(4)
    labels = torch.tensor([[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]][get_rank()])
    parallel = MultiTaskParallel(specs)
    parallel.wrap(linear_model(specs))
    batch = LabelledBatch(torch.zeros(4, 3, 1, 1), labels, [ImageMeta((1, 1), (1, 1))] * 4, [0, 1, 2, 3])
    out = CrossEntropy()(logits, batch)
    mine = float(out.stats["top1"])
    return mine, parallel.reduce_scalars({"top1/a": mine / parallel.groups.shards[0]}, torch.device("cpu"))["top1/a"]


def partly_unused():
    """Task b never touches its own head's second layer, and the shared backbone has a part that only task a uses."""

    class Forked(Tiny):
        def __init__(self):
            super().__init__()
            self.only_a = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.nobody = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, images):
            return [super().forward(images)[0] * (self.only_a if float(images.flatten()[0]) < 5 else 1.0)]

    specs = [linear_task("a"), linear_task("b", shards=3)]
    model = MultiTaskModel(specs, Same(), Forked, list, normalize_weights=False)
    parallel = MultiTaskParallel(specs)
    network = parallel.wrap(model)
    units = parallel.groups.placement[get_rank()]
    for part, weight in parallel.micro_batches(IterationBatch([value_batch(t, s, 2 if t == 0 else 9) for t, s in units])):
        (network(part).total * weight).backward()
    parallel.reduce_gradients(model)
    return {n: None if p.grad is None else float(p.grad) for n, p in model.named_parameters()}


def overflow():
    """One rank's own head overflows: the first step is good, the second is not, anywhere."""
    specs = [linear_task("a"), linear_task("b", shards=3)]
    model = linear_model(specs)
    parallel = MultiTaskParallel(specs, scaled=True)
    network = parallel.wrap(model)
    found = []
    for value in (1.0, float("inf")):
        units = parallel.groups.placement[get_rank()]
        parts = [value_batch(t, s, value if t == 0 else 1.0) for t, s in units]
        for part, weight in parallel.micro_batches(IterationBatch(parts)):
            (network(part).losses[f"{model.names[part.task]}/loss_sum"] * weight).backward()
        if get_rank() == 0 and value > 1:
            model.backbones["0"].w.grad.fill_(1.0)  # only the head's stays infinite
        parallel.reduce_gradients(model)
        found.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
        model.zero_grad()
    return found


def four_ranks(data):
    """Everything that needs four processes, in one spawn."""
    return {
        "variants": run_variants(data, list(VARIANTS)),
        "wrong rule": wrong_clip_rule(data),
        "members": [group_members((1, 2, 1), (0, 0, 1)), group_members((1, 2, 1), (0, 1, 0))],
        "start": start_values(),
        "odd": odd_rank(),
        "x04": case_x04(),
        "top1": accuracy_over_ranks(),
        "unused": partly_unused(),
        "overflow": overflow(),
    }


def packed(data):
    return run_variants(data, ["sgd64", "global64", "adamw64"], steps=6)
