"""Pairs of a template and a search crop. A third of them are negative: the search crop does not show the template's target.

One number decides on the kind of a pair, in this order (probabilities in ``PairSettings``):
 another video's template · a search window where the target is not · the target covered by background · by another object ·
 positive, of which some have their target pasted on another image or elsewhere on its own; beside some, others are pasted.
What cannot be made of the frames at hand stays a plain positive pair. Source: design/siamese.md, B5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from loguru import logger

from mmdet.data.errors import DataError
from mmdet.data.structures import SampleKey
from mmdet.families.siamese import paste
from mmdet.families.siamese.augment import SearchAugment, map_target
from mmdet.families.siamese.crop import CropDraw, Window, context_side, cut, map_box, mean_color
from mmdet.families.siamese.paste import Scene
from mmdet.families.siamese.sampler import PairFrames, PairSource
from mmdet.families.siamese.structures import PairBatch, PairSample, collate_pairs

_RETRIES = 10  # videos that are tried when a file cannot be read
_AWAY = (0.8, 1.1)  # side of a window away from the target, as a multiple of the usual one
_AWAY_TRIES = 5
_MIN_OTHER = 225 / 256**2  # of the search crop's area: smaller objects are no distractors
_MAX_OTHER = 9.0  # of the target's area


@dataclass(frozen=True)
class PairSettings:
    """Sizes in px and probabilities."""

    exemplar_size: int = 128
    search_size: int = 256
    context: float = 0.5
    negatives: tuple[float, float, float, float] = (0.04, 0.14, 0.06, 0.06)  # other video, window, background, object
    pastes: tuple[float, float] = (0.12, 0.12)  # of positives: on another image, elsewhere on the same
    distractor_prob: float = 0.32  # of positives
    template: CropDraw = field(default_factory=CropDraw.for_template)
    search: CropDraw = field(default_factory=CropDraw.for_search)
    augment: SearchAugment | None = field(default_factory=SearchAugment)

    def for_validation(self) -> PairSettings:
        """The same sizes; fewer negatives, nothing pasted on positives, no augmentation, milder scales."""
        return PairSettings(
            self.exemplar_size,
            self.search_size,
            self.context,
            negatives=(0.03, 0.09, 0.02, 0.02),
            pastes=(0.0, 0.0),
            distractor_prob=0.0,
            template=CropDraw(keep_scale=1.0, scale=(0.999, 1.001), keep_center=1.0, shrink=0.0),
            search=CropDraw.for_validation(),
            augment=None,
        )


class PairPipeline:
    """``(source, key, rng) -> PairSample``: a pure function of its arguments."""

    def __init__(self, settings: PairSettings) -> None:
        self.settings = settings
        self._warned: set[str] = set()

    def __call__(self, source: PairSource, key: SampleKey, rng: np.random.Generator) -> PairSample:
        """The pair of video ``key.index`` at ``key.position`` of the epoch.

        Raises:
            DataError: ten videos in turn could not be read.
        """
        index = key.index
        for attempt in range(_RETRIES):
            try:
                return self._make(source, source.draw_frames(rng, index), key, rng)
            except DataError as error:
                if attempt == _RETRIES - 1:
                    raise DataError(f"{_RETRIES} videos in turn could not be read; the last: {error}") from error
                if str(error) not in self._warned:
                    self._warned.add(str(error))
                    logger.warning(f"{error}; another video takes its place in the pair")
                index = int(rng.integers(source.num_videos))
        raise AssertionError("unreachable")

    def _make(self, source: PairSource, frames: PairFrames, key: SampleKey, rng: np.random.Generator) -> PairSample:
        kind, kinds = rng.random(), np.cumsum(self.settings.negatives)
        template, search = self._scene(source, frames.video, frames.template), self._scene(source, frames.video, frames.search)
        window, positive = None, True
        if kind < kinds[0]:
            other = self._other_scene(source, frames.video, rng)
            positive, template = other is None, other or template
        elif kind < kinds[1]:
            window = self._window_away(rng, search)
            positive = window is None
        elif kind < kinds[3]:
            covered = self._covered(source, frames.video, search, rng, with_object=kind >= kinds[2])
            positive, search = covered is None, covered or search
        else:
            search = self._varied(source, frames.video, search, rng)
        template_crop = self._template_crop(rng, template)
        crop, box, distractors = self._search_crop(rng, search, window, positive, key.epoch)
        name = source.name(frames)
        return PairSample(template_crop, crop, box.astype(np.float32), positive, distractors, name, key.position)

    # -- scenes ---------------------------------------------------------------------------------------------------------

    def _scene(self, source: PairSource, video: int, frame: int) -> Scene:
        own, record = source.video(video)
        return Scene(own.load(record.index, frame), record.boxes[frame], own.others(record.index, frame))

    def _other_scene(self, source: PairSource, video: int, rng: np.random.Generator) -> Scene | None:
        drawn = source.draw_other(rng, video)
        return None if drawn is None else self._scene(source, *drawn)

    def _covered(self, source: PairSource, video: int, scene: Scene, rng: np.random.Generator, with_object: bool) -> Scene | None:
        if not with_object:
            return paste.cover_with_background(rng, scene)
        other = self._other_scene(source, video, rng)
        return None if other is None else paste.cover_with_object(rng, scene, paste.pixels_of(other))

    def _varied(self, source: PairSource, video: int, scene: Scene, rng: np.random.Generator) -> Scene:
        """A positive pair's search scene, perhaps with the target elsewhere and neighbours."""
        kind, (elsewhere, moved) = rng.random(), self.settings.pastes
        changed = None
        if kind < elsewhere:
            other = self._other_scene(source, video, rng)
            changed = None if other is None else paste.move_target_to(rng, scene, other)
        elif kind < elsewhere + moved:
            changed = paste.move_target(rng, scene)
        scene = changed or scene
        if rng.random() < self.settings.distractor_prob:
            for _ in range(int(rng.integers(1, 3))):
                other = self._other_scene(source, video, rng)
                scene = (other and paste.add_neighbour(rng, scene, paste.pixels_of(other))) or scene
        return scene

    # -- crops ----------------------------------------------------------------------------------------------------------

    def _factor(self) -> float:
        """Side of a search crop as a multiple of a template crop's, so that a target has the same size in both."""
        return self.settings.search_size / self.settings.exemplar_size

    def _template_crop(self, rng: np.random.Generator, scene: Scene) -> np.ndarray:
        window = self.settings.template.draw(rng, scene.box, 1.0, self.settings.context)
        return cut(scene.image, window, self.settings.exemplar_size, mean_color(scene.image))

    def _window_away(self, rng: np.random.Generator, scene: Scene) -> Window | None:
        """A search window in the image that shows nothing of the target."""
        height, width = scene.image.shape[:2]
        usual = self._factor() * context_side(*(scene.box[2:] - scene.box[:2]), self.settings.context)
        for _ in range(_AWAY_TRIES):
            side = usual * rng.uniform(*_AWAY)
            centers = rng.uniform(0, 1, (500, 2)) * (width, height)
            overlap = np.minimum(centers + side / 2, scene.box[2:]) - np.maximum(centers - side / 2, scene.box[:2])
            free = (overlap <= 0).any(1)
            if free.any():
                x, y = centers[np.argmax(free)]
                return Window(float(x), float(y), side, side)
        return None

    def _search_crop(
        self, rng: np.random.Generator, scene: Scene, window: Window | None, positive: bool, epoch: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The crop (n, n, 3) uint8, the target's box (4,) in it (in a window away from it: where a target of its size would be
        expected), and the distractors (N, 4) float32."""
        settings, size, box = self.settings, self.settings.search_size, scene.box
        if window is None:
            window = settings.search.draw(rng, box, self._factor(), settings.context, epoch)
        else:
            box = Window(window.x, window.y, *(box[2:] - box[:2])).box
        augment = settings.augment if positive else None
        extra = None if augment is None else augment.draw_map(rng, size)
        transform = window.transform(size) if extra is None else extra @ window.transform(size)
        crop = cut(scene.image, window, size, mean_color(scene.image), extra)
        target = map_target(box, transform)
        if augment is not None:
            crop = augment.change_pixels(rng, crop, target)
        return crop, target, _distractors(map_box(scene.others, transform), target, size)


def _distractors(boxes: np.ndarray, target: np.ndarray, size: int) -> np.ndarray:
    """Of ``boxes`` (N, 4) xyxy px of the crop those that lie in it, as far as they do, neither tiny nor huge."""
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    boxes_in = np.clip(boxes, 0, size)
    area, target_area = (boxes_in[:, 2:] - boxes_in[:, :2]).prod(1), (target[2:] - target[:2]).prod()
    inside = ((centers >= 0) & (centers < size)).all(1)
    return boxes_in[inside & (area > _MIN_OTHER * size**2) & (area < _MAX_OTHER * target_area)].astype(np.float32)


class FixedPairs:
    """The same validation pairs at every pass: video i % V and chance from (seed, i), whatever the epoch, rank or resume.

    ``len()`` pairs; ``batches`` gives each rank its own, all together every pair once.
    """

    SEED = 10000  # design/siamese.md, B12

    def __init__(self, source: PairSource, settings: PairSettings, count: int) -> None:
        self.source, self.count = source, count if source.num_videos else 0
        self._pipeline = PairPipeline(settings.for_validation())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> PairSample:
        side = self._pipeline.settings.search_size
        key = SampleKey(number % self.source.num_videos, 0, number, (side, side))
        return self._pipeline(self.source, key, np.random.default_rng(np.random.SeedSequence([self.SEED, number])))

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[PairBatch]:
        numbers = range(rank, self.count, world)
        for start in range(0, len(numbers), batch_size):
            yield collate_pairs([self[n] for n in numbers[start : start + batch_size]], step=start // batch_size)
