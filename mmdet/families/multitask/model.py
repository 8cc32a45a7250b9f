"""The model of a multi-task experiment: components by share id, and the way of each task through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmdet.core.load_rules import Layout, LoadRules
from mmdet.core.normalizers import local_normalizers
from mmdet.core.optim import is_norm
from mmdet.data.structures import Batch, LossOutput
from mmdet.errors import UsageError
from mmdet.families.multitask.batches import LabelledBatch, TaskBatch
from mmdet.families.multitask.groups import matches
from mmdet.families.multitask.heads import DEFAULT_CRITERIA
from mmdet.families.multitask.task import TaskSpec, check_specs, component_key, task_weights
from mmdet.models.postprocess import MulticlassNMS

_BACKBONE_OF_ONE_TASK = {"backbone": "backbones.0", "neck": "necks.0"}


def _is_single_task(keys) -> bool:
    return any(k.startswith("backbone.") for k in keys) and not any(k.startswith("backbones.") for k in keys)


def _from_single_task(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of a detector's file: its backbone and neck are those of share id 0; whose head it is only the user can say."""
    renamed = {}
    for name, value in tensors.items():
        first, _, rest = name.partition(".")
        renamed[f"{_BACKBONE_OF_ONE_TASK.get(first, first)}.{rest}" if rest else name] = value
    return renamed


SINGLE_TASK = Layout("a model of one task", _is_single_task, _from_single_task)


class MultiTaskModel(nn.Module):
    """``normalize -> backbone -> (neck) -> head`` for every task, with the components that tasks share made once.

    Parameter names: ``backbones.<share id>``, ``necks.<share id>``, ``heads.<task>``, ``criteria.<task>``, and
    ``own.<task>.<number>`` for what ``own_parameters`` carves out of shared components.

    Args:
        specs: the tasks.
        normalize: images -> the networks' input, the same for all tasks.
        get_backbone: makes a backbone with ``out_channels``, where a task names none.
        get_neck: channels of the backbone -> a neck with ``out_channels``.
        frozen_norms: components ("backbone", "neck", "head") whose batch norms keep their statistics.
        normalize_weights: task weights add up to 1.
        get_postprocess: makes what turns boxes and scores into detections, where a detection task names nothing.
    """

    def __init__(
        self,
        specs: Sequence[TaskSpec],
        normalize: nn.Module,
        get_backbone: Callable[[], nn.Module],
        get_neck: Callable[[Sequence[int]], nn.Module],
        frozen_norms: Sequence[str] = (),
        normalize_weights: bool = True,
        get_postprocess: Callable[[], Any] = MulticlassNMS,
    ) -> None:
        super().__init__()
        check_specs(specs)
        self.specs, self.names = tuple(specs), [spec.name for spec in specs]
        self.weights = task_weights(specs, normalize_weights)
        self.frozen_norms = tuple(frozen_norms)
        self.load_rules = LoadRules(layouts=(SINGLE_TASK,))
        self.normalize = normalize
        self.backbones, self.necks, self.heads = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.criteria = nn.ModuleDict()
        self.postprocess: dict[str, Any] = {}
        for task, spec in enumerate(specs):
            self._add(task, spec, spec.backbone or get_backbone, spec.neck or get_neck)
            if spec.is_detection:
                self.postprocess[spec.name] = spec.postprocess or get_postprocess()
        self.own = nn.ModuleDict()
        self._own_names: dict[str, dict[str, list[str]]] = {}
        for task, spec in enumerate(specs):
            if spec.own_parameters:
                self._carve_out(task, spec)

    def _add(self, task: int, spec: TaskSpec, backbone: Callable, neck: Callable) -> None:
        key = self._key(task, "backbone")
        if key not in self.backbones:
            self.backbones[key] = backbone()
        channels = self.backbones[key].out_channels
        key = self._key(task, "neck")
        if key is not None:
            if key not in self.necks:
                self.necks[key] = neck(channels)
            channels = self.necks[key].out_channels
        if spec.levels is not None:
            if max(spec.levels) >= len(channels):
                raise UsageError(f"task {spec.name!r}: levels={spec.levels}: there are {len(channels)} maps, 0 the first")
            channels = [channels[i] for i in spec.levels]
        key = self._key(task, "head")
        if key not in self.heads:
            self.heads[key] = spec.head(list(channels))
        self.criteria[spec.name] = (spec.criterion or DEFAULT_CRITERIA[spec.kind])()

    def _key(self, task: int, component: str) -> str | None:
        """Key of a task's component in its dictionary of modules; None where the task has none."""
        key = component_key(self.specs, task, component)
        return None if key is None else key.split("/", 1)[1]

    def head(self, task: int) -> nn.Module:
        return self.heads[self._key(task, "head")]

    def _carve_out(self, task: int, spec: TaskSpec) -> None:
        """Copies of the parameters of shared components that the task wants to itself."""
        names: dict[str, list[str]] = {}
        parameters = nn.ParameterList()
        for component, modules in (("backbone", self.backbones), ("neck", self.necks)):
            key = self._key(task, component)
            for name, value in modules[key].named_parameters() if key is not None else ():
                if matches(f"{component}.{name}", spec.own_parameters):
                    names.setdefault(component, []).append(name)
                    parameters.append(nn.Parameter(value.detach().clone()))
        if not len(parameters):
            raise UsageError(
                f"task {spec.name!r}: own_parameters={spec.own_parameters} match nothing; names are backbone.* and neck.*"
            )
        self.own[spec.name] = parameters
        self._own_names[spec.name] = names

    # -- the way of a task ------------------------------------------------------------------------------------------------

    def predict_task(self, task: int, images: Tensor, meta: Sequence | None = None) -> Any:
        """What the task's head says of images (B, 3, H, W), uint8 or already normalised."""
        maps = self._through(task, "backbone", self.backbones, self.normalize(images.contiguous(), meta))
        if self._key(task, "neck") is not None:
            maps = self._through(task, "neck", self.necks, maps)
        if self.training and self.specs[task].is_detection:
            self._check_levels(task, images, maps)
        return self._head(task, maps)

    def _head(self, task: int, maps: Sequence[Tensor]) -> Any:
        return self.head(task)(self._levels(task, maps))

    def _levels(self, task: int, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = self.specs[task].levels
        return list(maps) if levels is None else [maps[i] for i in levels]

    def _check_levels(self, task: int, images: Tensor, maps: Sequence[Tensor]) -> None:
        """Stops where the maps that a head gets have other strides than it takes them for: it would learn nothing of use."""
        head = self.head(task)
        wanted = getattr(head, "strides", None) or getattr(getattr(head, "anchors", None), "strides", None)
        got = tuple(round(images.shape[-1] / m.shape[-1]) for m in self._levels(task, maps))
        sizes = [m.shape[-1] for m in self._levels(task, maps)]
        if wanted is not None and sizes != [-(-images.shape[-1] // stride) for stride in wanted]:
            raise UsageError(
                f"task {self.names[task]!r}: the head expects maps of strides {tuple(wanted)}, it gets {got}: "
                f"say with levels=... which maps it gets, and in what order (now {self.specs[task].levels or 'all of them'})"
            )

    def _through(self, task: int, component: str, modules: nn.ModuleDict, x: Any) -> Any:
        module, name = modules[self._key(task, component)], self.names[task]
        own = self._own_names.get(name, {})
        if component not in own:
            return module(x)
        first = len(own["backbone"]) if component == "neck" and "backbone" in own else 0
        mine = [self.own[name][first + i] for i in range(len(own[component]))]
        return functional_call(module, dict(zip(own[component], mine, strict=True)), (x,))

    def predict(self, images: Tensor, meta: Sequence | None = None) -> dict[str, Any]:
        """What every task says of the same images, each shared component run once (where a task has nothing to itself)."""
        maps: dict[str, Any] = {}
        found = {}
        x = self.normalize(images.contiguous(), meta)
        for task, name in enumerate(self.names):
            features = x
            for component, modules in (("backbone", self.backbones), ("neck", self.necks)):
                key = component_key(self.specs, task, component)
                if key is not None:
                    key = f"{key}/{name}" if self.specs[task].own_parameters else key
                    maps[key] = features = maps[key] if key in maps else self._through(task, component, modules, features)
            found[name] = self._head(task, features)
        return found

    def decode_task(self, task: int, images: Tensor, meta: Sequence | None = None) -> tuple[Tensor, Tensor]:
        """Of a detection task, before suppression: boxes (B, A, 4) xyxy px, scores (B, A, C) in [0, 1]; at least float32."""
        predictions = self.predict_task(task, images, meta)
        with torch.autocast(images.device.type, enabled=False):
            return self.head(task).decode(predictions)

    # -- training ---------------------------------------------------------------------------------------------------------

    def forward(self, part: TaskBatch) -> LossOutput:
        """The losses of one batch of one task, named ``<task>/<term>`` and multiplied by the task's weight.

        Statistics: ``loss/<task>`` (the sum of the terms, unweighted), ``top1/<task>`` where there is one, ``<task>/<others>``.
        Normalisers stay inside the batch.
        """
        name, weight = self.names[part.task], self.weights[part.task]
        with local_normalizers():
            out = self.criteria[name](self.predict_task(part.task, part.data.images, part.data.meta), part.data)
        losses = {f"{name}/{term}": value * weight for term, value in out.losses.items()}
        named = {f"top1/{name}" if k == "top1" else f"{name}/{k}": v for k, v in out.stats.items()}
        fault = f"task {name}: {out.nonfinite}" if out.nonfinite else ""
        return LossOutput(losses, {f"loss/{name}": out.total.detach(), **named}, fault)

    def train(self, mode: bool = True) -> MultiTaskModel:
        super().train(mode)
        for component in self.frozen_norms:
            for module in getattr(self, f"{component}s").modules():
                if is_norm(module):
                    module.eval()
        return self

    def components(self) -> dict[str, nn.Module]:
        """Component name as in ``TaskGroups`` -> module."""
        found = {f"backbone/{k}": m for k, m in self.backbones.items()}
        found |= {f"neck/{k}": m for k, m in self.necks.items()} | {f"head/{k}": m for k, m in self.heads.items()}
        return found | {f"task/{name}": self._of_task(name) for name in self.names}

    def _of_task(self, name: str) -> nn.Module:
        parts = [self.criteria[name], *([self.own[name]] if name in self.own else [])]
        return nn.ModuleList(parts)


class TaskView(nn.Module):
    """One task of a model as its evaluator wants it: a batch -> list of Detections, logits (B, C), or for pairs, of first and
    second images one after the other, logits (B / 2,)."""

    def __init__(self, model: MultiTaskModel, task: int) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.spec = model.specs[task]

    def forward(self, batch: Batch | LabelledBatch) -> Any:
        if not self.spec.is_detection:
            predictions = self.model.predict_task(self.task, batch.images, batch.meta)
            return self.model.criteria[self.spec.name].logits(predictions) if self.spec.kind == "pairwise" else predictions
        boxes, scores = self.model.decode_task(self.task, batch.images, batch.meta)
        return self.model.postprocess[self.spec.name](boxes, scores, batch.meta)

    def decode(self, images: Tensor, meta: Sequence | None = None) -> tuple[Tensor, Tensor]:
        """As a detector's: before suppression, boxes (B, A, 4) xyxy px and scores (B, A, C)."""
        return self.model.decode_task(self.task, images, meta)


class ExportPart(NamedTuple):
    """A network that can be written to a file of its own."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]  # examples, by name
    outputs: tuple[str, ...]


class TaskNetwork(nn.Module):
    """One task from pixels to numbers: images (B, 3, H, W) uint8 RGB -> boxes (B, A, 4) xyxy px and scores (B, A, C), before
    suppression; or the head's logits or embeddings."""

    def __init__(self, model: MultiTaskModel, task: int) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.outputs = ("boxes", "scores") if model.specs[task].is_detection else ("values",)

    def forward(self, images: Tensor) -> Any:
        if self.model.specs[self.task].is_detection:
            return self.model.decode_task(self.task, images)
        return self.model.predict_task(self.task, images)
