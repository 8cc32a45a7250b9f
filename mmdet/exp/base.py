"""The experiment: typed fields that say what to train, and builders that make the parts from them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np
import torch
from torch import nn

from mmdet.core.checkpoint import LoadOptions, LoadReport, load_backbone, load_pretrained
from mmdet.core.ema import EMA
from mmdet.core.hooks import Hook
from mmdet.core.optim import ParamRule, build_param_groups, group_parameters
from mmdet.core.parallel import Parallel
from mmdet.errors import UsageError
from mmdet.exp import fields

DEFAULT, COMMAND_LINE = "default", "command line"
DERIVED = EXP_FILE, ANNOTATIONS = "exp file", "training annotations"  # origins of values that nobody set by hand


class Exp:
    """What any task shares. A field is an annotated class attribute; a subclass overrides it by plain assignment, and a new
    public attribute must be annotated, so a misspelt one is an error when the class is made.

    Values can be set on an instance only through :meth:`set`, which checks name and type and remembers where they came from.
    """

    max_epoch: int = 300  # epochs in a whole run
    warmup_epochs: float = 5  # epochs of learning-rate warm-up
    no_aug_epochs: int = 0  # last epochs with weak augmentation
    eval_interval: int = 10  # epochs between evaluations
    print_interval: int = 10  # steps between log lines
    save_interval_steps: int = 0  # steps between saves of last.pth inside an epoch; 0: at epoch ends only
    keep_checkpoints: int = 1  # earlier epochs whose full checkpoint is kept beside last.pth
    seed: int = 0  # everything random follows from it
    batch_size: int = 64  # images per optimizer step, over all devices
    recipe_batch_size: int = 64  # total batch for which the recipe's learning rate was published
    basic_lr_per_img: float = 0.01 / 64  # learning rate per image of the total batch
    weight_decay: float = 5e-4  # L2
    momentum: float = 0.9
    ema: bool = True  # average the weights, and judge the average
    ema_decay: float = 0.9998  # per step, reached after the ramp of ema_decay_type
    ema_decay_type: Literal["threshold", "exponential", "normal"] = "threshold"
    ema_cycle_epochs: int = 0  # start the average again every n epochs; 0: never
    clip_norm: float = 0.0  # largest gradient norm; 0: no clipping
    clip_scope: Literal["global", "group"] = "global"  # norm over all parameters, or per parameter group
    max_loss: float = 0.0  # a total loss above it counts as not finite, and the step is left out; 0: any finite loss is good
    snapshot_interval: int = 100  # steps between copies of the state in memory, to go back to when training fails
    max_failed_saves: int = 3  # saves in a row that may fail (a full disk) before the run stops
    warmup_pass: Literal["auto", "on", "off"] = "auto"  # try the largest batch before training; auto: on CUDA
    grad_accum: int = 1  # micro-batches per optimizer step; the total batch stays batch_size
    amp: Literal["off", "bf16", "fp16"] = "off"  # precision of the forward pass in training
    channels_last: bool = False  # memory format of model and images
    compile: bool = False  # torch.compile the network
    sync_bn: bool = True  # synchronised batch norm where there are several CUDA devices
    deterministic: bool = False  # deterministic kernels, at some cost
    pretrained_backbone: str = ""  # file with backbone weights to start from
    output_dir: str = "outputs"  # run folders are made in <output_dir>/<exp name>/
    best_metric: str = "AP"  # the metric that decides which weights are kept

    exp_name: str = ""  # stem of the exp file
    exp_file: str = ""  # path of the exp file

    _types: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        inherited = set().union(*(base._types for base in cls.__mro__[1:] if hasattr(base, "_types")))
        own = set(inspect.get_annotations(cls))
        for name, value in vars(cls).items():
            if name.startswith("_") or name in own or name in inherited:
                continue
            if not (callable(value) or isinstance(value, property | staticmethod | classmethod)):
                where = getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__
                raise UsageError(
                    f"{where}, class {cls.__name__}: '{name}' is no known field."
                    f"{fields.nearest(name, inherited)} A new field needs a type: `{name}: {type(value).__name__} = ...`"
                )
        cls._types = _field_types(cls)
        for name in vars(cls).keys() & cls._types.keys():
            setattr(cls, name, fields.check(f"{cls.__name__}.{name}", vars(cls)[name], cls._types[name]))

    def __init__(self) -> None:
        self._origins: dict[str, str] = {}
        self._override_words: list[str] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__}.{name} is a field: give its value in the class body (`{name} = ...`), not in __init__; "
                f"from outside use exp.set({name!r}, value, origin), which checks the type and remembers the origin"
            )
        super().__setattr__(name, value)

    # -- fields ---------------------------------------------------------------------------------------------------------

    @classmethod
    def field_names(cls) -> list[str]:
        return list(cls._types)

    @classmethod
    def field_type(cls, name: str) -> Any:
        """The annotation of a field."""
        return cls._types[name]

    def values(self) -> dict[str, Any]:
        """Every field with its value: plain data."""
        return {name: getattr(self, name) for name in self._types}

    def set(self, name: str, value: Any, origin: str) -> None:
        """Sets a field; ``value`` may be a word of the command line where the field is not text."""
        self._require(name)
        self.__dict__[name] = fields.check(name, value, self._types[name])
        self._origins[name] = origin

    def override(self, words: Sequence[str], origin: str = COMMAND_LINE) -> None:
        """Applies ``key=value`` words (or the pairs ``key value``)."""
        for name, text in fields.split_overrides(words):
            self._require(name)
            self.set(name, fields.parse(name, text, self._types[name]), origin)
            self._override_words.append(f"{name}={text}")

    @property
    def override_words(self) -> list[str]:
        """The overrides as they were given, for the records."""
        return list(self._override_words)

    def _require(self, name: str) -> None:
        if name not in self._types:
            raise UsageError(f"unknown field '{name}' of {type(self).__name__}.{fields.nearest(name, self._types)}")

    def origin(self, name: str) -> str:
        """Where the value of a field was set: ``default`` (this package), an exp file, or what :meth:`set` was told."""
        if name in self._origins:
            return self._origins[name]
        owner = next(c for c in type(self).__mro__ if name in vars(c))
        return DEFAULT if _in_package(owner) else (self.exp_file or owner.__module__)

    def given(self) -> dict[str, str]:
        """Fields that were set for this run (on the command line, by --demo, by a rerun), and by what; not those that follow
        from the exp file or the data."""
        return {name: origin for name, origin in self._origins.items() if origin not in DERIVED}

    def is_users(self, name: str) -> bool:
        """Whether a person chose this value: on the command line, or in an exp file that is not one of the shipped ones."""
        from mmdet.exp.load import is_shipped  # load.py imports this module

        origin = self.origin(name)
        return origin == COMMAND_LINE or (origin == self.exp_file != "" and not is_shipped(origin))

    def changed(self) -> dict[str, tuple[Any, str]]:
        """Fields that differ from the family's default: name -> (value, where it was set)."""
        hidden = {"exp_name", "exp_file"}
        return {n: (v, self.origin(n)) for n, v in self.values().items() if n not in hidden and v != self._default(n)}

    def _default(self, name: str) -> Any:
        """The family's value; of a field that only an exp file knows, the value that it was introduced with."""
        owners = [c for c in type(self).__mro__ if name in vars(c)]
        return vars(next((c for c in owners if _in_package(c)), owners[-1]))[name]

    def validate(self) -> None:
        """Stops before anything is built when a value cannot work."""
        for name in (
            "max_epoch",
            "eval_interval",
            "print_interval",
            "batch_size",
            "grad_accum",
            "snapshot_interval",
            "max_failed_saves",
        ):
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "warmup_epochs",
            "no_aug_epochs",
            "save_interval_steps",
            "keep_checkpoints",
            "clip_norm",
            "max_loss",
            "weight_decay",
            "seed",
        ):
            self._expect(name, getattr(self, name) >= 0, "0 or more")
        self._expect("basic_lr_per_img", 0 < self.basic_lr_per_img < float("inf"), "a positive number")
        self._expect("momentum", 0 <= self.momentum < 1, "0 <= momentum < 1")
        self._expect("ema_decay", 0 <= self.ema_decay < 1, "0 <= ema_decay < 1")
        self._expect("batch_size", self.batch_size % self.grad_accum == 0, f"a multiple of grad_accum={self.grad_accum}")
        metrics = self.metric_names()
        self._expect("best_metric", not metrics or self.best_metric in metrics, f"one of {', '.join(metrics)}")

    def check_world(self, world: int) -> None:
        """Stops when the batch cannot be spread over ``world`` processes."""
        if self.batch_size % (world * self.grad_accum):
            raise UsageError(
                f"batch_size={self.batch_size}: expected a multiple of {world} processes x grad_accum={self.grad_accum} "
                "(it is the total over all devices)"
            )

    def may_change(self) -> frozenset[str]:
        """Names of further fields that a resumed run may have with another value: a person changed them on purpose."""
        return frozenset()

    def _expect(self, name: str, right: bool, expectation: str) -> None:
        if not right:
            raise UsageError(f"{name}={getattr(self, name)!r} (set by {self.origin(name)}): expected {expectation}")

    def metric_names(self) -> Sequence[str]:
        """What the evaluator will report, so that a wrong ``best_metric`` stops before training; empty: not known."""
        return ()

    # -- what depends on time -------------------------------------------------------------------------------------------

    def eval_interval_at(self, epoch: int) -> int:
        """Epochs between evaluations, as of ``epoch`` (counted from 0)."""
        return self.eval_interval

    def frozen(self, epoch: int) -> Sequence[str]:
        """Regular expressions of the parameter names that are not trained in ``epoch``; their norms stay in eval mode."""
        return ()

    # -- builders -------------------------------------------------------------------------------------------------------

    def get_model(self) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} must say how its model is made: def get_model(self)")

    def get_train_loader(self, workers: int = 2, rank: int = 0, world: int = 1, data_seed: int = 0) -> Any:
        """An object with ``steps_per_epoch`` and ``batches(start_step)``, an endless iterator of this rank's batches."""
        raise NotImplementedError(f"{type(self).__name__} must say where its batches come from: def get_train_loader(self, ...)")

    def get_prefetcher(self, batches: Iterator, device: torch.device) -> Iterator:
        from mmdet.data.prefetcher import Prefetcher

        return Prefetcher(batches, device)

    @property
    def learning_rate(self) -> float:
        """``basic_lr_per_img`` x total batch."""
        return self.basic_lr_per_img * self.batch_size

    def param_rules(self) -> Sequence[ParamRule]:
        """Which parameters get another learning rate or weight decay; the first match counts."""
        return (ParamRule("norm", norm=True, decay_factor=0.0),)

    def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = build_param_groups(model, self.param_rules(), self.learning_rate, self.weight_decay)
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)

    def get_lr_schedule(self, steps_per_epoch: int) -> Callable[[int], float]:
        """Step, counted from 0 -> factor of every group's learning rate."""
        return lambda step: 1.0

    def get_ema(self) -> EMA | None:
        if not self.ema:
            return None
        return EMA.of_type(self.ema_decay_type, self.ema_decay, self.ema_cycle_epochs or None)

    def get_evaluator(self, split: str = "val", **options) -> Any:
        """An object with ``evaluate(model) -> Evaluation``, or None when there is nothing to judge with."""
        return None

    def get_hooks(self) -> Iterable[Hook]:
        return ()

    def get_parallel(self) -> Parallel:
        by_rule = partial(group_parameters, rules=self.param_rules())
        groups = by_rule if self.clip_scope == "group" else None
        return Parallel(grad_accum=self.grad_accum, clip_norm=self.clip_norm, clip_groups=groups)

    def load_pretrained(self, model: nn.Module, source: Any, options: LoadOptions | None = None) -> LoadReport:
        """Fine-tuning's start: the file's tensors that fit, and a report of every one."""
        return load_pretrained(model, source, options=options, class_names=self.label_names() or None)

    def load_backbone(self, model: nn.Module, source: Any, options: LoadOptions | None = None) -> LoadReport:
        """The start that ``pretrained_backbone`` asks for: a file of the backbone alone."""
        return load_backbone(model, source, options=options)

    def data_facts(self) -> dict[str, str]:
        """What a resume must find again, by name: one line for each data set. Empty where there is nothing to compare."""
        return {}

    def label_names(self) -> Sequence[str]:
        """Names of the classes in the order of the model's outputs; empty where there are none."""
        return ()

    def adopt_data(self, split: str) -> None:
        """Takes over what a data set says of itself (its classes), to judge a model that no checkpoint describes."""

    def judged(self, evaluator: Any) -> tuple[str, dict[str, Any]]:
        """What an evaluator judges on: a report for people, and for the records ``annotations`` and how much there is of what."""
        source = evaluator.loader.source
        return source.report(), {"annotations": str(source.annotation_file), "images": len(source)}

    def evaluation_lines(self, evaluation: Any) -> list[str]:
        """An evaluation as text for the log."""
        return [", ".join(f"{name} {value:.4f}" for name, value in evaluation.metrics.items())]

    def name_images(self, image_ids: Sequence[Any]) -> list[str]:
        """What a person would look for: the files of a batch's images, where there are any."""
        return [str(image_id) for image_id in image_ids]

    def training_pictures(self, batch: Any) -> list[np.ndarray]:
        """What the network is about to be trained on, for a person to look at: (H, W, 3) uint8 RGB."""
        return []

    def evaluation_pictures(self, evaluation: Any) -> list[np.ndarray]:
        """Predictions beside truth, for a person to look at: (H, W, 3) uint8 RGB."""
        return []

    def check_sources(self) -> None:
        """Called first of all, before anything is logged: stops when what the fields point to is not there."""
        if self.pretrained_backbone and not Path(self.pretrained_backbone).is_file():
            raise UsageError(
                f"pretrained_backbone={self.pretrained_backbone!r} (set by {self.origin('pretrained_backbone')}): no such file"
            )

    def prepare(self) -> None:
        """Called once, before anything is built: the place to look at the data and adopt its classes."""

    def demo_settings(self) -> dict[str, Any]:
        """What ``--demo`` sets: a schedule that ends in minutes on two cores."""
        return {}

    def largest_batch(self, loader: Any) -> Any:
        """A rank's share of the largest batch that training can meet, with the most boxes, to warm up with; None: unknown."""
        return None

    def summary_input(self) -> tuple[Callable[[nn.Module], Any], str] | None:
        """What operations are counted on: a forward pass of a model on the meta device, and its size in words; or None."""
        return None


def _field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {n: t for n, t in hints.items() if not n.startswith("_") and hasattr(cls, n)}


def _in_package(cls: type) -> bool:
    module = inspect.getmodule(cls)
    name = module.__name__ if module else cls.__module__
    return name.startswith("mmdet.") and not name.startswith("mmdet.exps")


Exp._types = _field_types(Exp)
