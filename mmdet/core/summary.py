"""The tables at the top of a log."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from rich import box
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmdet.core import run
from mmdet.core.launch import describe_device
from mmdet.exp.base import Exp

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

_PRECISION = {"off": "float32", "bf16": "bfloat16 (autocast)", "fp16": "float16 (autocast, scaled gradients)"}


def log_head(trainer: Trainer) -> None:
    """Command, versions and device."""
    facts = ", ".join(f"{name} {version}" for name, version in run.versions().items())
    commit = run.git_commit()
    logger.info(f"command: {trainer.options.command or '(called from Python)'}")
    logger.info(f"versions: {facts}{f', commit {commit}' if commit else ''}")
    device = describe_device(trainer.device)
    logger.info(f"device: {device}, {trainer.world} process(es); forward pass in {_PRECISION[trainer.amp]}")


def log_plan(trainer: Trainer) -> None:
    """Model, settings and learning rate, and warnings about settings that rarely work."""
    exp, steps = trainer.exp, trainer.loader.steps_per_epoch
    logger.info(model_line(trainer.model, exp))
    for text in (changed_table(exp), group_table(trainer.optimizer)):
        logger.info(f"\n{text}")
    logger.info(f"learning rate {exp.learning_rate:.6g} = {exp.basic_lr_per_img:.6g} per image x total batch {exp.batch_size}")
    if not 0.25 <= exp.batch_size / exp.recipe_batch_size <= 4:
        logger.warning(
            f"total batch {exp.batch_size} is far from the recipe's {exp.recipe_batch_size}: the learning rate follows it in "
            "proportion, which is not known to hold outside 0.25-4 times; watch the first epochs"
        )
    if exp.warmup_epochs >= exp.max_epoch:
        logger.warning(
            f"warmup_epochs={exp.warmup_epochs:g} is not shorter than max_epoch={exp.max_epoch}: the run ends inside the warm-up"
        )
    logger.info(f"{exp.max_epoch} epochs of {steps} steps")


def log_end(trainer: Trainer) -> None:
    best = trainer.best
    if trainer.guard.summary():
        logger.warning(trainer.guard.summary())
    if best["value"] is None:
        logger.info(f"training done; nothing was judged. Weights: {trainer.run_dir / 'weights.pth'}")
    else:
        file = trainer.run_dir / "best.pth"
        logger.info(f"training done, best {best['metric']} {best['value']:.4f} in epoch {best['epoch']}: {file}")


def render(table: Table) -> str:
    """A rich table as plain text."""
    from rich.console import Console

    console = Console(width=120, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def plain_table(title: str, columns: list[str], rows: list[list[Any]]) -> str:
    table = Table(show_edge=False, box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        numeric = all(_is_number(row[i]) for row in rows)
        table.add_column(column, overflow="fold", justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(str(cell).replace("[", "\\[") for cell in row))
    return f"{title}\n{render(table)}"  # rich would wrap a title to the width of the columns


def _is_number(cell: Any) -> bool:
    return str(cell).replace(",", "").replace(".", "", 1).replace("e-", "", 1).isdigit()


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters: total, and those that are trained now."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def count_gflops(model: nn.Module, forward: Callable[[nn.Module], Any]) -> float:
    """Billions of operations of ``forward(model)`` in evaluation: a multiplication and an addition are two.

    Counted on a copy on the meta device: no arithmetic is done, so ``forward`` must not look at values.
    """
    probe = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward(probe)
    return counter.get_total_flops() / 1e9


def model_line(model: nn.Module, exp: Exp) -> str:
    total, trained = count_parameters(model)
    line = f"model: {total:,} parameters, {trained:,} trained"
    example = exp.summary_input()
    if example is None:
        return line
    forward, size = example
    return f"{line}; {count_gflops(model, forward):.2f} GFLOPs at {size} (2 per multiply-add)"


def changed_table(exp: Exp) -> str:
    rows = [[name, _short(value), origin] for name, (value, origin) in exp.changed().items()]
    if not rows:
        return f"exp {exp.exp_name}: every value is the family's default"
    return plain_table(f"exp {exp.exp_name}: values that differ from the family's default", ["field", "value", "set by"], rows)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


def group_table(optimizer: torch.optim.Optimizer) -> str:
    rows = [
        [
            g.get("name", str(i)),
            len(g["params"]),
            f"{sum(p.numel() for p in g['params']):,}",
            f"{g['base_lr']:.6g}",
            f"{g['weight_decay']:.6g}",
        ]
        for i, g in enumerate(optimizer.param_groups)
    ]
    return plain_table("parameter groups", ["group", "tensors", "elements", "lr", "weight decay"], rows)
