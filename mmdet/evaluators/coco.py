"""A detector's average precision on a COCO data set: runs the model over it, gathers over ranks, asks the judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from loguru import logger
from rich.progress import Progress
from torch import nn

from mmdet.core.distributed import get_world_size, is_main
from mmdet.core.failure import compute_on_main, gather_from_ranks
from mmdet.core.logger import console
from mmdet.data.structures import Batch, Detections, ImageMeta
from mmdet.evaluators.evaluator import Evaluation, evaluation_mode
from mmdet.evaluators.found import Found, merge_found
from mmdet.evaluators.judge import judge
from mmdet.evaluators.results import Results, id_array

if TYPE_CHECKING:
    from mmdet.data.coco import Categories, CocoDataset
    from mmdet.data.loader import EvalLoader

__all__ = ["CocoEvaluator", "judge", "judge_results"]


class CocoEvaluator:
    """Judges a detector on the images of an ``EvalLoader``.

    After :meth:`evaluate`, ``results`` (flat arrays) and ``detections`` (COCO's dictionaries) hold what was found, on every
    rank, with the original image and category ids, images in the order of the data set.
    """

    def __init__(
        self,
        loader: EvalLoader,
        categories: Categories,
        device: torch.device | str = "cpu",
        max_dets: int = 100,
        amp: str | None = None,
        progress: bool = True,
        num_samples: int = 4,
        clip: bool = True,
    ):
        """
        Args:
            loader: batches of this rank's share of ``loader.source``.
            categories: turns the model's class indices into category ids.
            device: where the model is.
            max_dets: detections per image and class that count (see :func:`judge`).
            amp: None or "off" (float32), "bf16", "fp16".
            progress: a bar while it runs, on terminals only.
            num_samples: images handed back for pictures, spread evenly over the data set.
            clip: detections are cut at the image's border before they are judged.
        """
        self.loader = loader
        self.categories = categories
        self.device = torch.device(device)
        self.max_dets = max_dets
        self.amp = amp
        self.progress = progress
        self.clip = clip
        self.num_samples = num_samples
        self.results: Results | None = None

    @property
    def detections(self) -> list[dict]:
        """``{"image_id", "category_id", "bbox", "score"}`` of the last run."""
        if self.results is None:
            raise RuntimeError("nothing was evaluated yet: call evaluate(model) first")
        return self.results.to_coco()

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Runs ``model`` over the data and judges it. Every rank must call it; all return the same metrics and fail together.

        ``samples`` (rank 0 only): dictionaries of ``image`` (H, W, 3) uint8 RGB, ``detections`` and ``truth``
        (``Detections`` in px of that image, labels are class indices), ``ignore`` (I, 4) and ``image_id``.
        """
        self.results = None
        shards = gather_from_ranks(lambda: self._run(model))
        found, repeats = merge_found(shards, len(self.loader.source))  # equal on all ranks, so it also fails on all
        samples: list[dict[str, Any]] = []

        def conclude() -> Evaluation:
            started = time.perf_counter()
            evaluation = self._judge(found)
            self._log(found, repeats, time.perf_counter() - started)
            samples.extend(self._samples(found))
            return evaluation

        evaluation = compute_on_main(conclude)
        self.results = self._as_results(found)
        return Evaluation(evaluation.metrics, evaluation.per_class, samples)

    # -- one rank's share -------------------------------------------------------------------------------------------------

    def _run(self, model: nn.Module) -> Found:
        images: list[tuple[int, Detections]] = []
        dropped, model_seconds, data_seconds = 0, 0.0, 0.0
        with self._progress() as advance, evaluation_mode(model, self.device, self.amp):
            waiting_since = time.perf_counter()
            for batch in self.loader:
                started = time.perf_counter()
                detections = self._detect(model, batch)
                model_seconds += time.perf_counter() - started
                data_seconds += started - waiting_since
                for meta, found in zip(batch.meta, detections):
                    usable = self._usable(found, meta)
                    dropped += len(found) - len(usable)
                    images.append((self._position_of[meta.image_id], usable.to_original(meta, self.clip)))
                advance(len(batch))
                waiting_since = time.perf_counter()
        return Found.from_images(images, dropped=dropped, model_seconds=model_seconds, data_seconds=data_seconds)

    def _detect(self, model: nn.Module, batch: Batch) -> list[Detections]:
        """Per image of the batch, on the CPU, float32, in px of the network's frame."""
        detections = [found.cpu() for found in model(batch.to(self.device))]
        if len(detections) != len(batch):
            raise ValueError(f"the model returned detections for {len(detections)} images of a batch of {len(batch)}")
        return [Detections(found.boxes.float(), found.scores.float(), found.labels.long()) for found in detections]

    def _usable(self, found: Detections, meta: ImageMeta) -> Detections:
        """The finite ones; asked in the network's frame, because clipping to the image hides an infinity."""
        if len(found) and int(found.labels.max()) >= len(self.categories.ids):
            raise ValueError(
                f"image {meta.image_id!r}: the model found class index {int(found.labels.max())}, but there are only "
                f"{len(self.categories.ids)} categories: the model was made for other classes than this data set's"
            )
        finite = torch.isfinite(found.boxes).all(1) & torch.isfinite(found.scores)
        return found.map(lambda t: t[finite])

    @cached_property
    def _position_of(self) -> dict[int | str, int]:
        return {image_id: n for n, image_id in enumerate(self.loader.source.image_ids)}

    def _progress(self) -> AbstractContextManager[Callable[[int], None]]:
        """A context that gives a function to be called with the number of images done."""
        if not (self.progress and is_main() and console.is_terminal):
            return nullcontext(lambda images: None)
        return _ProgressBar(-(-len(self.loader.source) // get_world_size()))

    # -- rank 0 -----------------------------------------------------------------------------------------------------------

    def _as_results(self, found: Found) -> Results:
        """``found`` with the file's image and category ids."""
        categories = np.asarray(self.categories.ids, dtype=np.int64)
        image_ids = id_array(self.loader.source.image_ids)[found.positions]
        return Results(image_ids, categories[found.labels], found.boxes_xywh, found.scores)

    @cached_property
    def _ground_truth(self) -> dict:
        return self.loader.source.ground_truth()

    def _judge(self, found: Found) -> Evaluation:
        return judge(self._ground_truth, with_judge_ids(self._as_results(found), self.loader.source), self.max_dets)

    def _log(self, found: Found, repeats: int, judge_seconds: float) -> None:
        if repeats:
            logger.warning(f"{repeats} images came up on more than one rank; each counts once")
        if found.dropped:
            logger.warning(f"{found.dropped} detections with a NaN or infinite box or score were dropped")
        images = len(found.visited)
        logger.info(
            f"{len(found)} detections in {images} images; network and postprocessing {found.model_seconds:.1f} s "
            f"({1000 * found.model_seconds * get_world_size() / max(images, 1):.1f} ms per image), "
            f"waiting for data {found.data_seconds:.1f} s, judge {judge_seconds:.1f} s"
        )

    def _samples(self, found: Found) -> list[dict[str, Any]]:
        source = self.loader.source
        count = min(self.num_samples, len(source))
        samples = []
        for position in np.linspace(0, len(source) - 1, count).round().astype(int).tolist():
            sample = source.load(position)
            truth = Detections(torch.tensor(sample.boxes), torch.ones(len(sample.boxes)), torch.tensor(sample.labels))
            parts = {"image": sample.image, "detections": found.of_image(position), "truth": truth}
            samples.append({**parts, "ignore": sample.ignore, "image_id": sample.image_id})
        return samples


def judge_results(source: CocoDataset, results: Results, max_dets: int = 100) -> Evaluation:
    """Judges detections that carry the ids of the data set's own files, such as a saved results file.

    Raises:
        DataError: a detection belongs to an image that the data set does not have.
    """
    return judge(source.ground_truth(), with_judge_ids(results, source), max_dets)


def with_judge_ids(results: Results, source: CocoDataset) -> Results:
    """The same with the image ids of ``source.ground_truth()``, where a file's string ids are numbered. An id that the data
    set does not have becomes text, so that the judge names it instead of taking it for another image's number."""
    numbers = {image_id: source.judge_image_id(image_id) for image_id in source.image_ids}
    if all(image_id == number for image_id, number in numbers.items()):
        return results
    image_ids = id_array([numbers.get(value, str(value)) for value in results.image_ids.tolist()])
    return replace(results, image_ids=image_ids)


class _ProgressBar:
    """A bar on the terminal that leaves nothing behind."""

    def __init__(self, images: int):
        self._progress = Progress(console=console, transient=True)
        self._task = self._progress.add_task("evaluating", total=images)

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        return lambda images: self._progress.advance(self._task, images)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
