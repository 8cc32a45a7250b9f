"""A task that is no detector (a line fitted to points), to drive the Trainer with in milliseconds."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from mmdet.data.structures import LossOutput
from mmdet.evaluators.evaluator import Evaluation
from mmdet.exp import Exp


@dataclass
class Points:
    x: torch.Tensor  # (B, 3)
    y: torch.Tensor  # (B,)
    index: list[int]
    step: int = 0

    def to(self, device, non_blocking=False):
        return Points(self.x.to(device), self.y.to(device), self.index, self.step)

    def split(self, parts):
        n = len(self.y) // parts
        return [Points(self.x[i : i + n], self.y[i : i + n], self.index[i : i + n], self.step) for i in range(0, len(self.y), n)]

    @property
    def image_ids(self):
        return self.index


class PointLoader:
    """24 fixed points; the order of an epoch is a function of (seed, epoch)."""

    def __init__(self, batch_size, seed, rank=0, world=1, data_seed=0):
        draw = np.random.default_rng(7)
        self.x = torch.tensor(draw.standard_normal((24, 3)), dtype=torch.float32)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
        self.batch_size, self.seed = batch_size, [seed, data_seed] if data_seed else [seed]
        self.rank, self.world = rank, world
        self.steps_per_epoch = 24 // batch_size
        self.seen = []

    def batches(self, start_step=0):
        step = start_step
        while True:
            epoch, inside = divmod(step, self.steps_per_epoch)
            order = np.random.default_rng([*self.seed, epoch]).permutation(24)
            rows = order[inside * self.batch_size : (inside + 1) * self.batch_size][self.rank :: self.world]
            self.seen.append(rows.tolist())
            yield Points(self.x[rows], self.y[rows], rows.tolist(), step)
            step += 1


class Line(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(8, 1)

    def forward(self, batch):
        out = self.last(self.drop(torch.tanh(self.norm(self.first(batch.x))))).squeeze(1)
        error = out - batch.y
        if not self.training:
            return error
        return LossOutput(
            {"loss_square": (error**2).mean(), "loss_size": 1e-3 * (out**2).mean()}, {"max_error": error.abs().max()}
        )


class LineEvaluator:
    def __init__(self, loader, scores=None):
        self.loader, self.scores, self.calls = loader, scores, 0

    def evaluate(self, model):
        was = model.training
        model.eval()
        with torch.no_grad():
            error = model(Points(self.loader.x, self.loader.y, []))
        model.train(was)
        self.calls += 1
        score = -math.sqrt((error**2).mean()) if self.scores is None else self.scores[self.calls - 1]
        return Evaluation({"score": float(score)})


class LineExp(Exp):
    max_epoch = 4
    warmup_epochs = 1
    eval_interval = 2
    print_interval = 2
    batch_size = 6
    recipe_batch_size = 6
    basic_lr_per_img = 0.02 / 6
    best_metric = "score"
    dropout: float = 0.2
    scores: tuple[float, ...] | None = None  # what the evaluator says, call by call

    def get_model(self):
        return Line(self.dropout)

    def get_train_loader(self, workers=0, rank=0, world=1, data_seed=0):
        return PointLoader(self.batch_size, self.seed, rank, world, data_seed)

    def get_prefetcher(self, batches, device):
        return (b.to(device) for b in batches)

    def get_evaluator(self, split="val", **options):
        return LineEvaluator(PointLoader(self.batch_size, self.seed), self.scores)


def line_exp(tmp_path, name="line", kind=LineExp, **values):
    exp = kind()
    for key, value in {"output_dir": str(tmp_path), "exp_name": name, **values}.items():
        exp.set(key, value, "command line")
    return exp
