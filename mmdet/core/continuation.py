"""Whether a resume would be the same run: everything that the next step depends on is compared, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from torch import Tensor

from mmdet.core import run
from mmdet.core.files import checksum
from mmdet.errors import CheckpointError, UsageError
from mmdet.exp import fields
from mmdet.exp.base import Exp

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

# Fields of this machine, or of the start of a run; a resume does not look at them. The exp's name is compared earlier.
LOCAL = frozenset({"exp_name", "exp_file", "output_dir", "pretrained_backbone"})
# Fields that a person may change on purpose and still call it the same run. (Another data_dir must hold the same data.)
CHANGEABLE = frozenset(
    {
        "max_epoch",
        "basic_lr_per_img",
        "eval_interval",
        "print_interval",
        "save_interval_steps",
        "keep_checkpoints",
        "snapshot_interval",
        "max_failed_saves",
        "warmup_pass",
        "data_dir",
    }
)
_RATES = ("lr", "base_lr", "initial_lr")


def check_continuation(trainer: Trainer, saved: Mapping[str, Any], where: str) -> None:
    """Logs what was changed on purpose and what is merely worth knowing.

    Raises:
        CheckpointError: names everything else that differs, with both values.
    """
    changed, refused = compare_fields(trainer.exp, saved["exp"]["values"], where)
    refused += _conditions(trainer, saved)
    refused += _tensors("model", saved["model"], trainer.model.state_dict())
    refused += _ema(trainer, saved["ema"])
    refused += _optimizer(saved["optimizer"], trainer.optimizer)
    if refused:
        shown = refused[:8] + ([f"… and {len(refused) - 8} more"] if len(refused) > 8 else [])
        raise CheckpointError(
            f"{where}: this would not be the same run. " + "; ".join(shown) + ". Take back the change, or start a new run from "
            f"these weights with -c {where.removeprefix('--resume ')}"
        )
    if changed:
        logger.info(f"changed on purpose: {', '.join(changed)}")
    for notice in _notices(trainer, saved):
        logger.warning(notice)
    if saved["step"] > trainer.total_steps:
        done = saved["step"] // trainer.loader.steps_per_epoch
        raise CheckpointError(f"{where}: {done} epochs are done already, more than max_epoch={trainer.exp.max_epoch}")


def compare_fields(exp: Exp, saved: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Fields that differ: those that may, as ``name old -> new``, and those that may not, as a sentence each."""
    changed, refused = [], []
    for name, value in saved.items():
        if name in LOCAL:
            continue
        if name not in exp.field_names():
            refused.append(f"{name}: the checkpoint has {value!r}, this exp has no such field")
            continue
        try:
            old = fields.check(name, value, exp.field_type(name))
        except UsageError as error:
            raise CheckpointError(f"{where}: the exp in the file has {error}") from error
        new = getattr(exp, name)
        if old != new and name in CHANGEABLE | exp.may_change():
            changed.append(f"{name} {old} -> {new} (set by {exp.origin(name)})")
        elif old != new:
            refused.append(differs(f"{name} (set by {exp.origin(name)})", old, new))
    return changed, refused


def differs(what: str, old: Any, new: Any) -> str:
    return f"{what}: the checkpoint has {_short(old)}, this run has {_short(new)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _conditions(trainer: Trainer, saved: Mapping[str, Any]) -> Iterator[str]:
    before, now = saved["conditions"], trainer.conditions
    for split in sorted({*before["data"], *now["data"]}):
        if before["data"].get(split) != now["data"].get(split):
            yield differs(f"{split} data", before["data"].get(split), now["data"].get(split))
    names = {"steps_per_epoch": "steps per epoch", "precision": "precision of the forward pass", "optimizer": "optimizer"}
    for key, name in names.items():
        if before[key] != now[key]:
            yield differs(name, before[key], now[key])
    if "class_names" not in trainer.exp.field_names() and list(saved["class_names"]) != list(trainer.exp.label_names()):
        yield differs("class names", list(saved["class_names"]), list(trainer.exp.label_names()))
    position = divmod(saved["step"], trainer.loader.steps_per_epoch)
    if position != (saved["epoch"], saved["position"]):
        yield differs(f"(epoch, position) of step {saved['step']}", (saved["epoch"], saved["position"]), position)


def _tensors(what: str, old: Mapping[str, Any], new: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        shapes = [(tuple(side[name].shape), str(side[name].dtype)) if name in side else None for side in (old, new)]
        if shapes[0] != shapes[1]:
            yield differs(f"{what} {name}", *(s or "no such tensor" for s in shapes))


def _ema(trainer: Trainer, old: Mapping[str, Any] | None) -> Iterator[str]:
    if (old is None) != (trainer.ema is None):
        yield differs("ema", old is not None, trainer.ema is not None)
    if old is None or trainer.ema is None:
        return
    new = trainer.ema.state_dict(trainer.model)
    for part in ("model", "running"):
        yield from _tensors(f"ema {part}", old.get(part) or {}, new[part] or {})


def _optimizer(old: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    new = optimizer.state_dict()
    layouts = [[(g.get("name"), len(g["params"])) for g in side["param_groups"]] for side in (old, new)]
    if layouts[0] != layouts[1]:
        yield differs("parameter groups (name, tensors)", *layouts)
        return
    for before, now in zip(old["param_groups"], new["param_groups"]):
        for key in sorted({*before, *now} - {"params", *_RATES}):
            if key in before and key in now and not _same(before[key], now[key]):
                yield differs(f"{key} of parameter group {now.get('name')!r}", before[key], now[key])
    yield from _buffers(old, optimizer)


def _same(old: Any, new: Any) -> bool:
    """By the checksum, since a value of a file can be anything, and comparing some things is an error."""
    return checksum({"value": old}) == checksum({"value": new})


def _buffers(old: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Buffers of the file that do not fit their parameter; the optimizer itself would take anything."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for index, buffers in old["state"].items():
        for name, value in buffers.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if index not in parameters or (isinstance(value, Tensor) and value.dim() and shape != tuple(parameters[index].shape)):
                wanted = tuple(parameters[index].shape) if index in parameters else "no such parameter"
                yield differs(f"optimizer buffer {name} of parameter {index}", shape, wanted)
            elif not isinstance(value, Tensor | int | float | None):
                yield f"optimizer buffer {name} of parameter {index} is a {type(value).__name__}"


def _notices(trainer: Trainer, saved: Mapping[str, Any]) -> Iterator[str]:
    before, now = saved["conditions"], trainer.conditions
    if before["device"] != now["device"]:
        yield f"the device was {before['device']} and is {now['device']}: the run goes on, with another rounding"
    if before["world"] != now["world"]:
        yield (
            f"the number of processes was {before['world']} and is {now['world']}: the same samples come in the same order, and "
            "sums over processes are equal up to rounding; layers that look at a process's own images (batch norm that is "
            "trained and not synchronised, dropout) see other ones"
        )
    if before["exp_file"] != now["exp_file"]:
        yield f"the exp file {trainer.exp.exp_file} was edited since this checkpoint was saved; its values agree"
    versions = run.versions()
    other = [f"{k} {v} -> {versions[k]}" for k, v in saved["versions"].items() if k in versions and versions[k] != v]
    if other:
        yield f"other versions than the checkpoint's: {', '.join(other)}; results may differ in the last digits"
    unknown = sorted(set(trainer.exp.field_names()) - set(saved["exp"]["values"]))
    if unknown:
        yield f"fields that the checkpoint does not know have today's values: {', '.join(unknown)}"
