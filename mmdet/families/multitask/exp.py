"""The experiment of several tasks: fields, the tasks as an exp file lists them, and how everything is made from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import nn

from mmdet.core import schedules
from mmdet.core.checkpoint import LoadOptions, LoadReport, load_backbone
from mmdet.core.distributed import get_world_size
from mmdet.core.hooks import Hook
from mmdet.core.optim import ParamRule, build_param_groups
from mmdet.core.summary import plain_table
from mmdet.data.errors import DataError
from mmdet.data.loader import EvalLoader
from mmdet.data.transforms import DetectionTrainPipeline, ResizeTransform
from mmdet.errors import UsageError
from mmdet.evaluators.coco import CocoEvaluator
from mmdet.evaluators.pictures import draw_comparison
from mmdet.evaluators.report import format_per_class, format_summary
from mmdet.families.multitask.batches import IterationBatch
from mmdet.families.multitask.demo import make_task_demo
from mmdet.families.multitask.evaluator import LabelEvaluator, MultiTaskEvaluator, TaskEvaluator
from mmdet.families.multitask.groups import build_task_groups, effective_shards
from mmdet.families.multitask.hooks import Alert, KeepIterations
from mmdet.families.multitask.largest import largest_batch
from mmdet.families.multitask.loader import ImagePipeline, LabelledEvalLoader, TaskData, TaskLoader
from mmdet.families.multitask.model import ExportPart, MultiTaskModel, TaskNetwork
from mmdet.families.multitask.parallel import MultiTaskParallel
from mmdet.families.multitask.pictures import draw_iteration, with_title
from mmdet.families.multitask.settings import MultiTaskSettings
from mmdet.families.multitask.task import COMPONENTS, TaskSpec
from mmdet.models.detector import Normalize
from mmdet.models.postprocess import MulticlassNMS

DEMO = "demo"


class MultiTaskExp(MultiTaskSettings):
    """Several tasks on shared components, trained by iterations.

    An exp file lists ``tasks = [TaskSpec(...), ...]``, or, where they depend on fields, says ``def get_tasks(self)``; and how
    the backbone and the neck are made. The Trainer's epoch is the ``eval_interval`` iterations between two evaluations.
    """

    # -- the model --------------------------------------------------------------------------------------------------------

    def get_backbone(self) -> nn.Module:
        """Images (B, 3, H, W) -> maps, with ``out_channels``; made once per share id."""
        raise NotImplementedError(f"{type(self).__name__} must say how its backbone is made: def get_backbone(self)")

    def get_neck(self, channels: Sequence[int]) -> nn.Module:
        """Maps -> maps, with ``out_channels``; made once per share id."""
        raise NotImplementedError(f"{type(self).__name__} must say how its neck is made: def get_neck(self, channels)")

    def get_normalize(self) -> nn.Module:
        return Normalize(self.pixel_mean, self.pixel_std)

    def get_postprocess(self) -> MulticlassNMS:
        return MulticlassNMS(self.score_threshold, self.nms_threshold, keep_top_k=self.keep_top_k)

    def get_model(self) -> MultiTaskModel:
        frozen = [component for component, mode in self.norms.items() if mode == "frozen"]
        parts = self.get_normalize(), self.get_backbone, self.get_neck, frozen, self.normalize_weights, self.get_postprocess
        model = MultiTaskModel(self.tasks, *parts)
        check_classes(model)
        return model

    def load_backbone(self, model: nn.Module, source: Any, options: LoadOptions | None = None) -> LoadReport:
        """A file of the backbone alone, into the one of share id 0."""
        return load_backbone(model, source, options=options, part="backbones.0")

    def frozen(self, epoch: int) -> Sequence[str]:
        if epoch * self.round_length >= self.freeze_iters:
            return ()
        return [rf"{component}s\." for component in self.frozen_components]

    # -- optimizer and schedule ---------------------------------------------------------------------------------------------

    def param_rules(self) -> Sequence[ParamRule]:
        """Backbone, neck, heads, and heads with a learning rate of their own, each with and without weight decay: norms and
        biases have none."""
        rows = [(f"head_{s.name}", rf"^heads\.{s.name}\.", s.lr_mult, s.decay_mult) for s in self.tasks if _has_own_rate(s)]
        rows += [(c, rf"^{c}s\.", 1.0, 1.0) for c in COMPONENTS] + [("task", r"^(criteria|own)\.", 1.0, 1.0)]
        rules = []
        for name, pattern, rate, decay in rows:
            rate *= self.lr_mult.get(name.split("_")[0], 1.0)
            rules.append(ParamRule(f"{name}_no_decay", pattern, norm=True, lr_factor=rate, decay_factor=0.0))
            rules.append(ParamRule(f"{name}_no_decay", rf"{pattern}.*bias$", lr_factor=rate, decay_factor=0.0))
            rules.append(ParamRule(name, pattern, lr_factor=rate, decay_factor=decay))
        return rules

    def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = build_param_groups(model, self.param_rules(), self.learning_rate, self.weight_decay)
        check_groups(model, groups)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=self.learning_rate)
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)

    def get_lr_schedule(self, steps_per_epoch: int) -> Callable[[int], float]:
        """Iteration -> factor of the peak learning rate."""
        warm, last = self.warmup_iters, self.max_iter
        start = self.warmup_start if warm else 1.0
        curves = {
            "step": lambda: schedules.step_lr(start, 1.0, warm, self.lr_steps, self.lr_mults),
            "cosine": lambda: schedules.cosine_lr(start, 1.0, warm, last, self.lr_end),
            "linear": lambda: schedules.linear_lr(start, 1.0, warm, last, self.lr_end),
            "hold_cosine": lambda: schedules.hold_then_cosine_lr(start, 1.0, warm, last, self.freeze_iters, self.lr_end),
            "dual_cosine": lambda: schedules.hold_then_cosine_lr(
                start, 1.0, warm, last, self.freeze_iters, self.lr_end, first="cosine"
            ),
            "warmup_cosine": lambda: schedules.warmup_times_cosine_lr(1.0, last, warm, self.warmup_start),
            "warmup_poly": lambda: schedules.warmup_times_poly_lr(1.0, last, self.poly_power, warm, self.warmup_start),
        }
        curve = curves[self.lr_schedule]()
        return lambda it: curve(min(it, last))

    def get_parallel(self) -> MultiTaskParallel:
        return MultiTaskParallel(
            self.tasks,
            clip=self.clip,
            clip_norm=self.clip_norm,
            clip_mode=self.clip_mode,
            norms=self.norms,
            seed=self.seed,
            scaled=self.amp == "fp16",
            settings=self.settings(),
            group_timeout=self.group_timeout,
        )

    def settings(self) -> list[str]:
        """What all processes must agree on, a line each."""
        local = {"exp_file", "output_dir", "data_dir"}
        return [f"{k}={v!r}" for k, v in self.values().items() if k not in local] + [_describe(s) for s in self.tasks]

    # -- data -------------------------------------------------------------------------------------------------------------

    def data_root(self) -> Path:
        """The folder in which the tasks' folders lie."""
        if self.data_dir == DEMO:
            return make_task_demo(Path(self.output_dir) / "demo_tasks")
        root = Path(self.data_dir)
        if not root.is_dir():
            raise DataError(
                f"data directory {self.data_dir!r} (set by {self.origin('data_dir')}) does not exist: give the folder that holds "
                "the tasks' folders with --data DIR, or try --data demo"
            )
        return root

    def task_dataset(self, task: int, split: str) -> Any:
        """The data set of a task; read once."""
        cache = self.__dict__.setdefault("_datasets", {})
        key = (self.data_dir, self.tasks[task].name, split)
        if key not in cache:
            try:
                cache[key] = self.tasks[task].data.open(self.data_root(), split)
            except DataError as error:
                raise DataError(f"task {self.tasks[task].name}: {error}") from error
        return cache[key]

    def check_sources(self) -> None:
        super().check_sources()
        if self.data_dir != DEMO:
            self.data_root()

    def prepare(self) -> None:
        """Reads the annotations of every task and checks that its images can be read and that val agrees with train."""
        if self.data_dir != DEMO:  # so that a checkpoint or --rerun finds it from any folder
            self.set("data_dir", str(self.data_root().resolve()), self.origin("data_dir"))
        for task, spec in enumerate(self.tasks):
            train, val = (self.task_dataset(task, split) for split in ("train", "val"))
            if tuple(train.class_names) != tuple(val.class_names):
                raise DataError(
                    f"task {spec.name}: {train.annotation_file} has the classes {', '.join(train.class_names)}, "
                    f"{val.annotation_file} has {', '.join(val.class_names)}: expected the same, in the same order"
                )
            for data in (train, val):
                logger.info(f"{spec.name}: {data.report()}")
                for doubt in data.doubts():
                    logger.warning(doubt)
                data.check_files()
            if not len(train):
                raise DataError(f"task {spec.name}: {train.annotation_file}: there is no image to train on")
        rows = build_task_groups(self.tasks, get_world_size()).describe(self.tasks)
        logger.info("\n" + plain_table("tasks", ["task", "shards", "samples", "ranks", "root"], rows))

    def data_facts(self) -> dict[str, str]:
        shards = effective_shards([s.shards for s in self.tasks], get_world_size())
        facts = {"shards": ", ".join(f"{s.name} {n} x {s.batch_size}" for s, n in zip(self.tasks, shards, strict=True))}
        for task, spec in enumerate(self.tasks):
            facts |= {f"{spec.name} {split}": self.task_dataset(task, split).fingerprint() for split in ("train", "val")}
        return facts

    def train_sizes(self) -> list[tuple[int, int]]:
        """The (H, W) that training batches of detection tasks may have."""
        return self._scaled(self.input_size)

    def _scaled(self, size: tuple[int, int]) -> list[tuple[int, int]]:
        step, (low, high) = self.size_divisor, self.multiscale
        heights = range(-(-round(size[0] * low) // step), round(size[0] * high) // step + 1)
        return [(n * step, max(round(n * size[1] / size[0]), 1) * step) for n in heights if n > 0]

    def task_data(self, task: int, data_seed: int = 0) -> TaskData:
        """What the loader must know about a task."""
        spec = self.tasks[task]
        size = spec.input_size or self.input_size
        sizes = self._scaled(size) if spec.is_detection else [size]
        default = partial(DetectionTrainPipeline, expand_prob=0.0, crop=None) if spec.is_detection else ImagePipeline
        return TaskData(
            spec.name,
            spec.kind,
            self.task_dataset(task, "train"),
            (spec.pipeline or default)(),
            spec.batch_size,
            sizes,
            [self.seed, data_seed, task, spec.seed],
            spec.sampling,
            spec.images_per_class,
        )

    def check_world(self, world: int) -> None:
        build_task_groups(self.tasks, world)

    def may_change(self) -> frozenset[str]:
        return frozenset({"max_iter", "save_interval", "task", "alert_url", "alert_command", "group_timeout"})

    def get_train_loader(self, workers: int = 2, rank: int = 0, world: int = 1, data_seed: int = 0) -> TaskLoader:
        if self.task:
            raise UsageError(f"task={self.task!r} judges one task of a trained model; train_tasks=... trains some of them")
        groups = build_task_groups(self.tasks, world)
        tasks = [self.task_data(task, data_seed) for task in range(len(self.tasks))]
        counts = self.round_length, self.max_iter, self.seed, data_seed
        return TaskLoader(tasks, groups.shards, groups.placement[rank], *counts, workers, rank, world)

    def largest_batch(self, loader: TaskLoader) -> IterationBatch:
        return largest_batch(loader)

    # -- evaluation -------------------------------------------------------------------------------------------------------

    def get_evaluator(
        self,
        split: str = "val",
        batch_size: int = 8,
        workers: int = 2,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        amp: str = "off",
    ) -> MultiTaskEvaluator | TaskEvaluator:
        """The judge of all tasks, or of ``task`` alone."""
        shared = split, batch_size, workers, rank, world, device, amp
        if self.task:
            return self.task_evaluator(self.task_number(self.task), *shared)
        judges = {spec.name: self.task_evaluator(task, *shared) for task, spec in enumerate(self.tasks)}
        return MultiTaskEvaluator(self.tasks, judges, self.metric_weights)

    def task_evaluator(
        self, task: int, split: str, batch_size: int, workers: int, rank: int, world: int, device: Any, amp: str
    ) -> TaskEvaluator:
        spec, source = self.tasks[task], self.task_dataset(task, split)
        transform = (spec.eval_transform or ResizeTransform)(spec.test_size or self.test_size)
        loading = batch_size, workers, rank, world
        if not spec.is_detection:
            return TaskEvaluator(task, LabelEvaluator(LabelledEvalLoader(source, transform, *loading), spec.kind, device, amp))
        loader = EvalLoader(source, transform, *loading)
        options = {"device": device, "max_dets": self.max_dets, "amp": amp}
        return TaskEvaluator(task, CocoEvaluator(loader, source.categories, **options))

    def evaluation_lines(self, evaluation: Any) -> list[str]:
        return [f"\n{format_per_class(evaluation)}", f"\n{format_summary(evaluation)}"]

    def evaluation_pictures(self, evaluation: Any) -> list[np.ndarray]:
        rows = []
        for sample in evaluation.samples:
            task = sample.get("task", self.task)
            names = self.task_dataset(self.task_number(task), "val").class_names
            rows.append(with_title(draw_comparison(sample, names), f"task {task}"))
        return rows

    def training_pictures(self, batch: IterationBatch) -> list[np.ndarray]:
        """Some images of each task whose batches this process has."""
        names = {spec.name: self.task_dataset(task, "train").class_names for task, spec in enumerate(self.tasks)}
        return draw_iteration(batch, names, [spec.name for spec in self.tasks if spec.kind == "pairwise"])

    # -- the rest ---------------------------------------------------------------------------------------------------------

    def get_hooks(self) -> Iterable[Hook]:
        hooks: list[Hook] = [KeepIterations(self.save_interval)]
        return [*hooks, Alert(self.alert_url, self.alert_command)] if self.alert_url or self.alert_command else hooks

    def export_parts(self, model: MultiTaskModel) -> list[ExportPart]:
        """The network of every task, or of ``task`` alone, each whole from pixels to its outputs."""
        parts = []
        for task, spec in enumerate(self.tasks):
            if self.task in ("", spec.name):
                height, width = spec.test_size or self.test_size
                images = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)
                network = TaskNetwork(model, task).eval()
                parts.append(ExportPart(spec.name, network, {"images": images}, network.outputs))
        return parts

    def name_images(self, image_ids: Sequence[Any]) -> list[str]:
        """``<task>: <file>`` of ids that begin with their task's name."""
        names = []
        for task, _, image_id in (str(i).partition("/") for i in image_ids):
            data = self.task_dataset(self.task_number(task), "train")
            known = [str(i) for i in data.image_ids] if hasattr(data, "image_ids") else None
            index = int(image_id) if known is None else known.index(image_id)
            names.append(f"{task}: {data.path(index)}")
        return names

    def summary_input(self) -> tuple[Callable[[nn.Module], Any], str]:
        height, width = self.test_size
        images = torch.zeros((1, 3, height, width), dtype=torch.uint8, device="meta")
        return lambda model: model.predict(images), f"{height}x{width}, all tasks"


def _has_own_rate(spec: TaskSpec) -> bool:
    return (spec.lr_mult, spec.decay_mult) != (1.0, 1.0)


def _describe(spec: TaskSpec) -> str:
    plain = {k: v for k, v in vars(spec).items() if isinstance(v, str | int | float | tuple | None) or k == "share"}
    plain["data"] = repr(spec.data)
    return f"task {spec.name}: " + hashlib.blake2b(repr(sorted(plain.items(), key=str)).encode(), digest_size=8).hexdigest()


def check_classes(model: MultiTaskModel) -> None:
    """Stops unless heads and criteria are made for as many classes as their task's data has.

    Raises:
        UsageError: with task, part and both numbers.
    """
    for task, spec in enumerate(model.specs):
        wanted = getattr(spec.data, "classes", None)
        for part, module in (("head", model.head(task)), ("criterion", model.criteria[spec.name])):
            number = getattr(module, "num_classes", wanted)
            if spec.kind != "pairwise" and wanted is not None and number != wanted:
                raise UsageError(
                    f"task {spec.name!r}: the {part} is made for {number} classes, the data says classes={wanted}: "
                    "make them agree"
                )


def check_groups(model: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
    """Stops unless every parameter is in exactly one group.

    Raises:
        UsageError: with the name of the first that is in none or in several.
    """
    counts: dict[int, int] = {}
    for group in groups:
        for p in group["params"]:
            counts[id(p)] = counts.get(id(p), 0) + 1
    for name, p in model.named_parameters():
        if counts.get(id(p), 0) != 1:
            raise UsageError(f"parameter {name!r} is in {counts.get(id(p), 0)} parameter groups: expected exactly one")
