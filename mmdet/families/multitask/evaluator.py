"""Judging the tasks of a model, one after another, and what they come to together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mmdet.core.failure import gather_from_ranks
from mmdet.evaluators.coco import CocoEvaluator
from mmdet.evaluators.evaluator import Evaluation, evaluation_mode
from mmdet.evaluators.judge import metric_names
from mmdet.families.multitask.loader import LabelledEvalLoader
from mmdet.families.multitask.model import MultiTaskModel, TaskView
from mmdet.families.multitask.task import TaskSpec


def metrics_of(specs: Sequence[TaskSpec], max_dets: int, weighted: bool) -> list[str]:
    """The names of all metrics of an evaluation."""
    names = [f"{s.name}/{m}" for s in specs for m in (metric_names(max_dets) if s.is_detection else ("top1",))]
    names += ["AP_mean"] if any(s.is_detection for s in specs) else []
    names += ["top1"] if any(not s.is_detection for s in specs) else []
    return names + (["weighted"] if weighted else [])


class LabelEvaluator:
    """Top-1 of a task with labels: percentage of images (or pairs) that are right, of single labels the arg-max, of several
    labels each decision. ``per_class``: of single labels the percentage among the images of a class.

    ``loader`` has this rank's share; ranks' answers are put together by index, so that nothing counts twice.
    """

    def __init__(self, loader: LabelledEvalLoader, kind: str, device: torch.device | str = "cpu", amp: str | None = None) -> None:
        self.loader, self.kind, self.device, self.amp = loader, kind, torch.device(device), amp

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Runs ``model``, a TaskView, over the data; every rank calls it."""
        found: dict[int, np.ndarray] = {}
        for share in gather_from_ranks(lambda: self._run(model)):
            found |= share
        source = self.loader.source
        right = np.array([np.mean(found[i]) for i in range(len(source))])
        per_class = {}
        if self.kind == "classification":
            for label, name in enumerate(source.class_names):
                rows = right[source.labels == label]
                per_class[name] = {"top1": 100.0 * float(rows.mean()) if len(rows) else math.nan, "objects": len(rows)}
        return Evaluation({"top1": 100.0 * float(right.mean())}, per_class)

    def _run(self, model: nn.Module) -> dict[int, np.ndarray]:
        """Index -> which of its decisions are right, bool."""
        answers: dict[int, np.ndarray] = {}
        with evaluation_mode(model, self.device, self.amp):
            for batch in self.loader:
                logits = model(batch.map(lambda t: t.to(self.device))).float().cpu()
                labels = batch.labels[: len(logits)]
                if self.kind == "classification":
                    right = (logits.argmax(1) == labels).unsqueeze(1)
                else:
                    right = ((logits > 0) == (labels > 0.5)).reshape(len(logits), -1)
                answers |= dict(zip(batch.indices[: len(right)], right.numpy(), strict=True))  # pairs name theirs twice
        return answers


class TaskEvaluator:
    """One task of a model, judged as if it were alone: metrics have their plain names."""

    def __init__(self, task: int, judge: CocoEvaluator | LabelEvaluator) -> None:
        self.task, self.judge, self.loader = task, judge, judge.loader

    @property
    def results(self) -> Any:
        """Of a detection task: its detections with the ids of the data set."""
        return self.judge.results

    def evaluate(self, model: MultiTaskModel) -> Evaluation:
        return self.judge.evaluate(TaskView(model, self.task))


class _AllSources:
    """The data sets of all tasks, for what is said about them."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self._sources = dict(sources)
        self.annotation_file = ", ".join(str(s.annotation_file) for s in sources.values())

    def __len__(self) -> int:
        return sum(map(len, self._sources.values()))

    def report(self) -> str:
        return "\n".join(f"{name}: {source.report()}" for name, source in self._sources.items())


class _AllLoaders:
    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.source = _AllSources(sources)


class MultiTaskEvaluator:
    """Judges every task, and all together.

    Metrics: ``<task>/<metric>`` of each; ``AP_mean`` over detection tasks; ``top1`` over the others, percent; with ``weights``
    (metric -> factor) ``weighted``, their weighted mean. An undefined part makes the whole undefined.
    """

    def __init__(self, specs: Sequence[TaskSpec], judges: Mapping[str, TaskEvaluator], weights: Mapping[str, float]) -> None:
        self.specs, self.judges, self.weights = list(specs), dict(judges), dict(weights)
        self.loader = _AllLoaders({name: judge.loader.source for name, judge in judges.items()})

    def evaluate(self, model: MultiTaskModel) -> Evaluation:
        metrics: dict[str, float] = {}
        per_class: dict[str, dict[str, float]] = {}
        samples: list[dict[str, Any]] = []
        for name, judge in self.judges.items():
            evaluation = judge.evaluate(model)
            metrics |= {f"{name}/{metric}": value for metric, value in evaluation.metrics.items()}
            per_class |= {f"{name}/{label}": row for label, row in evaluation.per_class.items()}
            samples += [{**sample, "task": name} for sample in evaluation.samples]
        return Evaluation(metrics | self._together(metrics), per_class, samples)

    def _together(self, metrics: Mapping[str, float]) -> dict[str, float]:
        judged = [spec for spec in self.specs if spec.name in self.judges]
        together = {}
        for name, of_task, rows in (
            ("AP_mean", "AP", [s for s in judged if s.is_detection]),
            ("top1", "top1", [s for s in judged if not s.is_detection]),
        ):
            if rows:
                together[name] = sum(metrics[f"{s.name}/{of_task}"] for s in rows) / len(rows)
        if self.weights:
            known = metrics | together
            total = sum(self.weights.values())
            together["weighted"] = sum(factor * known[name] for name, factor in self.weights.items()) / total
        return together
