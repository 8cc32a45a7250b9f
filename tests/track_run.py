"""The smallest tracker trained on a few generated clips, for tests."""

from pathlib import Path

import torch

from mmdet.core import Trainer
from mmdet.core.distributed import get_rank, get_world_size
from mmdet.core.hooks import Hook
from mmdet.core.run import RunOptions
from mmdet.families.siamese.exp import STAGES, SiameseExp
from mmdet.families.siamese.shapes import make_shapes

STEPS = 2  # of an epoch
SMALL = {
    "variant": "tiny",
    "num_blocks": (1, 1, 1, 1),
    "channels": 8,
    "branch_blocks": 1,
    "tower_blocks": 1,
    "exemplar_size": 32,
    "search_size": 64,
    "batch_size": 4,
    "recipe_batch_size": 4,
    "basic_lr_per_img": 1e-3 / 4,
    "pairs_per_epoch": 4 * STEPS,
    "max_epoch": 4,
    "self_epoch": 2,
    "warmup_epochs": 1.0,
    "freeze_epochs": 0,
    "train_stages": STAGES,
    "backbone_lr": 1.0,
    "lr_curve": "cos",
    "eval_interval": 99,
    "eval_videos": 1,
    "print_interval": 1,
}


def clips(folder) -> Path:
    """Six videos of six frames to learn from, two of four frames to be judged on."""
    return make_shapes(Path(folder), (6, 6), (2, 4))


class BadExp(SiameseExp):
    """Boxes are no numbers in some steps, named by their number counted from 1, on one rank."""

    bad_steps: tuple[int, ...] = ()
    bad_rank: int = 0

    def get_prefetcher(self, batches, device):
        for batch in batches:
            if batch.step + 1 in self.bad_steps and get_rank() == self.bad_rank:
                batch.boxes[0] = torch.nan
            yield batch.to(device)


def exp_of(data, output, name="track", **values):
    exp = BadExp()
    for key, value in {**SMALL, "data_dir": str(data), "output_dir": str(output), "exp_name": name, **values}.items():
        exp.set(key, value, "command line")
    exp.validate()
    return exp


def trainer_of(exp, workers=0, **options) -> Trainer:
    return Trainer(exp, RunOptions(device="cpu", workers=workers, progress=False, **{"experiment_name": "a", **options}))


class StopAt(Hook):
    """Ends the run at the end of a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.at:
            raise KeyboardInterrupt


class States(Hook):
    """The model's state after every step, from step 0 on."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_start(self, trainer) -> None:
        self.on_step_end(trainer)

    def on_step_end(self, trainer) -> None:
        self.after[trainer.step] = {k: v.clone() for k, v in trainer.model.state_dict().items()}


def same(a: dict, b: dict, part: str = "") -> bool:
    """Whether two states agree bit for bit in the tensors whose name starts with ``part``."""
    names = [n for n in a if n.startswith(part)]
    return bool(names) and all(torch.equal(a[n], b[n]) for n in names)


def train_rank(data, output, values) -> dict:
    """A run on one of several ranks: the state after each step, and what the guard counted."""
    trainer = trainer_of(exp_of(data, output, **values))
    states = States()
    trainer.hooks.append(states)
    trainer.train()
    return {"after": states.after, "guard": trainer.guard.state_dict()}


def gradients_of(data, values, starts) -> list[dict]:
    """Gradients of the batches of some steps with norms in evaluation mode, after the exchange between ranks."""
    exp = exp_of(data, "unused", **values)
    exp.prepare()
    torch.manual_seed(0)
    model = exp.get_model().train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
            module.eval()
    loader = exp.get_train_loader(0, get_rank(), get_world_size())
    parallel = exp.get_parallel()
    network = parallel.wrap(model)
    results = []
    for start in starts:
        model.zero_grad()
        network(next(loader.batches(start))).total.backward()
        parallel.reduce_gradients(model)
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return results
