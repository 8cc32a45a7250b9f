"""What all detectors share: data, sizes, classes and the COCO judge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from loguru import logger

from mmdet.core.checkpoint import LoadOptions, LoadReport, load_pretrained
from mmdet.data.coco import Categories, CocoDataset, find_coco
from mmdet.data.coco_names import COCO_ALIASES, COCO_NAMES
from mmdet.data.demo import make_demo
from mmdet.data.errors import DataError
from mmdet.data.loader import EvalLoader, TrainDataset, TrainLoader
from mmdet.data.structures import Batch, Detections, Sample, Targets
from mmdet.errors import UsageError
from mmdet.evaluators.coco import CocoEvaluator
from mmdet.evaluators.judge import metric_names
from mmdet.evaluators.pictures import draw_comparison, draw_detections
from mmdet.evaluators.report import format_per_class, format_summary
from mmdet.exp.base import ANNOTATIONS, Exp
from mmdet.exp.fields import Size
from mmdet.models.matrix_nms import MatrixNMS
from mmdet.models.postprocess import MulticlassNMS

DEMO = "demo"


class DetectionExp(Exp):
    """A detector on COCO-format data. A family adds the model, the training pipeline and its recipe's numbers."""

    num_classes: int = 80  # taken from the training annotations unless a person sets it
    class_names: tuple[str, ...] = COCO_NAMES  # in the order of the model's outputs; from the annotations as well
    data_dir: str = "data/coco"  # COCO layout: annotations/ and the images; "demo": generated data
    input_size: Size = (640, 640)  # (H, W) px of training images before multi-scale
    test_size: Size = (640, 640)  # (H, W) px of evaluation images
    multiscale: tuple[float, float] = (1.0, 1.0)  # range of the side in training, as factors of input_size
    multiscale_interval: int = 1  # steps between changes of the size
    size_divisor: int = 32  # px; sides are multiples of it
    score_threshold: float = 0.01  # detections below are dropped
    nms_threshold: float = 0.6  # IoU above which the weaker box of a class is dropped
    nms_top_k: int = 1000  # best boxes per class before suppression
    keep_top_k: int = 100  # detections kept per image
    nms_type: Literal["matrix", "multilabel", "argmax"] = "multilabel"  # Matrix NMS; greedy: every class of a box, or its best
    post_threshold: float = 0.01  # detections whose score Matrix NMS lowers below this are dropped
    clip_boxes: bool = True  # detections are cut at the image's border before they are judged
    max_dets: int = 100  # detections per image and class that the judge counts

    def validate(self) -> None:
        super().validate()
        self._expect("num_classes", self.num_classes >= 1, "at least 1")
        self._expect_sizes()
        self._expect("multiscale", 0 < self.multiscale[0] <= self.multiscale[1], "0 < smallest factor <= largest factor")
        self._expect("multiscale", len(self.train_sizes()) > 0, f"a range that holds a multiple of {self.size_divisor} px")
        self._expect("multiscale_interval", self.multiscale_interval >= 1, "at least 1")
        self._expect("score_threshold", 0 <= self.score_threshold < 1, "0 <= score_threshold < 1")
        self._expect("post_threshold", 0 <= self.post_threshold < 1, "0 <= post_threshold < 1")
        self._expect("nms_threshold", 0 < self.nms_threshold <= 1, "0 < nms_threshold <= 1")
        for name in ("keep_top_k", "max_dets"):
            self._expect(name, getattr(self, name) >= 1, "at least 1")

    def _expect_sizes(self) -> None:
        for name in ("input_size", "test_size"):
            size = getattr(self, name)
            right = all(s >= self.size_divisor and s % self.size_divisor == 0 for s in size)
            self._expect(name, right, f"multiples of {self.size_divisor}")

    def metric_names(self) -> Sequence[str]:
        return metric_names(self.max_dets)

    def get_postprocess(self) -> MatrixNMS | MulticlassNMS:
        """What turns decoded boxes and scores into detections."""
        if self.nms_type == "matrix":
            return MatrixNMS(self.score_threshold, self.post_threshold, self.nms_top_k, self.keep_top_k)
        multi_label = self.nms_type == "multilabel"
        return MulticlassNMS(self.score_threshold, self.nms_threshold, self.nms_top_k, self.keep_top_k, multi_label)

    # -- sizes ----------------------------------------------------------------------------------------------------------

    def train_sizes(self) -> list[tuple[int, int]]:
        """The (H, W) that training batches may have."""
        height, width = self.input_size
        step = self.size_divisor
        low, high = (round(height * factor / step, 6) for factor in self.multiscale)
        heights = [n * step for n in range(math.ceil(low), math.floor(high) + 1)]
        return [(h, max(round(width * h / height / step), 1) * step) for h in heights]

    def size_at(self, step: int) -> tuple[int, int]:
        """(H, W) of the batch of a step: a function of (seed, step), equal on all ranks."""
        sizes = self.train_sizes()
        draw = np.random.default_rng(np.random.SeedSequence([self.seed, step // self.multiscale_interval, len(sizes)]))
        return sizes[int(draw.integers(len(sizes)))]

    def largest_size(self, loader: TrainLoader) -> tuple[int, int]:
        """(H, W) px of the largest batch of training."""
        if loader.plan is None:
            return max(self.train_sizes(), key=math.prod)
        return max(loader.planned_sizes(epoch=0), key=math.prod)

    def most_boxes(self) -> int:
        """The most boxes that a training image can have."""
        data = self.dataset("train")
        return max((len(data.annotation(i).boxes) for i in range(len(data))), default=0)

    def largest_batch(self, loader: TrainLoader) -> Batch:
        """Black images of the largest size, each with the most boxes, of all sizes and classes."""
        images, boxes = loader.batch_size // loader.world, max(self.most_boxes(), 1)
        height, width = self.largest_size(loader)
        draw = np.random.default_rng(0)
        corners = draw.uniform(0, 0.8, (images, boxes, 2)) * (width, height)
        far = corners + draw.uniform(0.02, 0.2, (images, boxes, 2)) * (width, height)
        labels = draw.integers(self.num_classes, size=(images, boxes))
        targets = Targets.from_lists(boxes=list(np.concatenate([corners, far], 2)), labels=list(labels))
        return Batch(torch.zeros((images, 3, height, width), dtype=torch.uint8), targets)

    # -- data -----------------------------------------------------------------------------------------------------------

    def train_pipeline(self) -> Callable[..., Sample]:
        """``(source, key, rng) -> Sample`` of size ``key.size``."""
        raise NotImplementedError(f"{type(self).__name__} must say how training samples are made: def train_pipeline(self)")

    def eval_transform(self) -> Callable[[Sample], Sample]:
        """A sample as evaluation sees it, of ``test_size``."""
        raise NotImplementedError(f"{type(self).__name__} must say how evaluation samples are made: def eval_transform(self)")

    def dataset(self, split: str) -> CocoDataset:
        """The images of a split with the categories of its own file; read once."""
        cache = self.__dict__.setdefault("_datasets", {})
        key = (self.data_dir, split)
        if key not in cache:
            cache[key] = CocoDataset(*find_coco(self._data_root(), split))
        return cache[key]

    def _data_root(self) -> Path:
        if self.data_dir == DEMO:
            return make_demo(Path(self.output_dir) / "demo_data")
        root = Path(self.data_dir)
        if not self.data_dir or not root.is_dir():
            fault = "is a file" if root.is_file() else "does not exist"
            raise DataError(
                f"data directory {self.data_dir!r} (set by {self.origin('data_dir')}) {fault}: give the folder that holds "
                "'annotations' with --data DIR, or try --data demo"
            )
        return root

    def check_sources(self) -> None:
        super().check_sources()
        if self.data_dir != DEMO:
            for split in ("train", "val"):
                find_coco(self._data_root(), split)

    def prepare(self) -> None:
        """Reads the annotations, adopts their classes and checks that every image can be read and val agrees with train."""
        if self.data_dir != DEMO:  # so that a checkpoint or --rerun finds it from any folder
            self.set("data_dir", str(self._data_root().resolve()), self.origin("data_dir"))
        train, val = self.dataset("train"), self.dataset("val")
        train.categories.check_same(val.file_categories, train.annotation_file, val.annotation_file)
        self.adopt_classes(train.categories)
        for data in (train, val):
            logger.info(data.report())
            for doubt in data.doubts():
                logger.warning(doubt)
            data.check_files()
        if not len(train):
            raise DataError(f"{train.annotation_file}: there is no image to train on")
        logger.info(f"classes, from {train.annotation_file}:\n{train.categories.table()}")

    def adopt_classes(self, categories: Categories) -> None:
        """Takes number and names of the classes from the annotations, unless a person set others: then it stops."""
        listed = ", ".join(f"{i}: {name}" for i, name in zip(categories.ids, categories.names, strict=True))
        if self.is_users("num_classes") and self.num_classes != len(categories):
            raise UsageError(
                f"num_classes={self.num_classes} (set by {self.origin('num_classes')}), but the training annotations have "
                f"{len(categories)} categories ({listed}): leave num_classes out, or make them agree"
            )
        if self.is_users("class_names") and set(self.class_names) != set(categories.names):
            raise UsageError(
                f"class_names={self.class_names} (set by {self.origin('class_names')}) are not the categories of the training "
                f"annotations ({listed}): leave class_names out, or make them agree"
            )
        if self.class_names != categories.names or self.num_classes != len(categories):
            self.set("num_classes", len(categories), ANNOTATIONS)
            self.set("class_names", categories.names, ANNOTATIONS)

    def label_names(self) -> Sequence[str]:
        return self.class_names if len(self.class_names) == self.num_classes else ()

    def adopt_data(self, split: str) -> None:
        self.adopt_classes(self.dataset(split).categories)

    def get_train_loader(self, workers: int = 2, rank: int = 0, world: int = 1, data_seed: int = 0) -> TrainLoader:
        """Batches of ``batch_size`` / world images per rank."""
        data = TrainDataset(self.dataset("train"), self.train_pipeline(), self.seed, data_seed)
        return TrainLoader(data, self.batch_size, self.size_at, workers, rank, world, self.seed, data_seed)

    def get_eval_loader(
        self, split: str = "val", batch_size: int = 8, workers: int = 2, rank: int = 0, world: int = 1
    ) -> EvalLoader:
        return EvalLoader(self._judged_dataset(split), self.eval_transform(), batch_size, workers, rank, world)

    def _judged_dataset(self, split: str) -> CocoDataset:
        """The split with labels in the order of the model's classes, matched by name."""
        own = self.dataset(split)
        names = self.label_names() or own.categories.names
        of_file = [name if name in names else COCO_ALIASES.get(name, name) for name in own.file_categories.names]
        foreign = [name for name in of_file if name not in names]
        if foreign:
            raise DataError(
                f"{own.annotation_file} has categories that the model does not know: {', '.join(map(repr, foreign))}; "
                f"the model's classes are {', '.join(map(repr, names))}"
            )
        if tuple(names) == own.categories.names:
            return own
        id_of = dict(zip(of_file, own.file_categories.ids, strict=True))
        unused = (i for i in itertools.count(1) if i not in own.file_categories.ids)
        order = tuple(id_of[name] if name in id_of else next(unused) for name in names)
        file_names = dict(zip(own.file_categories.ids, own.file_categories.names, strict=True))
        labels = tuple(file_names.get(i, name) for i, name in zip(order, names, strict=True))
        return CocoDataset(own.annotation_file, own.image_dir, Categories(order, labels))

    def get_evaluator(
        self,
        split: str = "val",
        batch_size: int = 8,
        workers: int = 2,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        amp: str = "off",
    ) -> CocoEvaluator | None:
        """The COCO judge on a split, or None (said in the log) when the split has no images."""
        loader = self.get_eval_loader(split, batch_size, workers, rank, world)
        if not len(loader.source):
            logger.warning(f"{loader.source.annotation_file} has no images: evaluation is skipped")
            return None
        options = {"device": device, "max_dets": self.max_dets, "amp": amp, "clip": self.clip_boxes}
        return CocoEvaluator(loader, loader.source.categories, **options)

    def evaluation_lines(self, evaluation: Any) -> list[str]:
        return [f"\n{format_per_class(evaluation)}", f"\n{format_summary(evaluation)}"]

    def name_images(self, image_ids: Sequence[Any]) -> list[str]:
        data = self.dataset("train")
        index = {image_id: i for i, image_id in enumerate(data.image_ids)}
        return [str(data.path(index[i])) if i in index else str(i) for i in image_ids]

    def training_pictures(self, batch: Batch) -> list[np.ndarray]:
        """Up to 16 augmented images of a batch with their boxes, four in a row."""
        images = batch.images[:16].permute(0, 2, 3, 1).cpu().numpy()
        if images.dtype != np.uint8:
            return []
        drawn = [
            draw_detections(image, truth, self.label_names(), 0.0, show_scores=False, ignore=ignore)
            for image, truth, ignore in zip(images, *_truth_of(batch.targets), strict=False)
        ]
        blank = np.full_like(drawn[0], 255)
        drawn += [blank] * (-len(drawn) % min(4, len(drawn)))
        return [np.concatenate(drawn[i : i + 4], axis=1) for i in range(0, len(drawn), 4)]

    def evaluation_pictures(self, evaluation: Any) -> list[np.ndarray]:
        return [draw_comparison(sample, self.label_names()) for sample in evaluation.samples]

    # -- the rest -------------------------------------------------------------------------------------------------------

    def load_pretrained(self, model: torch.nn.Module, source: Any, options: LoadOptions | None = None) -> LoadReport:
        """Class rows are matched by name; a published file with COCO's number of rows and no names counts as COCO's."""
        names = self.label_names() or None
        return load_pretrained(model, source, options=options, class_names=names, default_names=COCO_NAMES)

    def data_facts(self) -> dict[str, str]:
        return {split: self.dataset(split).fingerprint() for split in ("train", "val")}

    def summary_size(self) -> tuple[int, int]:
        """(H, W) px of the frame on which operations are counted."""
        return self.test_size

    def summary_input(self) -> tuple[Callable[[torch.nn.Module], Any], str]:
        height, width = self.summary_size()
        images = torch.zeros((1, 3, height, width), dtype=torch.uint8, device="meta")
        return lambda model: model.predict(images), f"{height}x{width}"


def _truth_of(targets: Targets) -> tuple[list[Detections], list[np.ndarray]]:
    """The targets of each image as detections of score 1, and its ignore regions."""
    targets = targets.map(lambda t: t.cpu())
    rows = zip(targets.boxes, targets.labels, targets.valid, strict=True)
    truth = [Detections(boxes[valid], torch.ones(int(valid.sum())), labels[valid]) for boxes, labels, valid in rows]
    return truth, [i[i.any(1)].numpy() for i in targets.ignore]
