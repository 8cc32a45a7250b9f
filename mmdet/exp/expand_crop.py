"""The augmentation that several recipes share: distortion of colours, expansion, constrained crops, mirroring, random sizes."""

from __future__ import annotations

from collections.abc import Callable

from mmdet.data.structures import Sample
from mmdet.data.transforms import ColourDistortion, DetectionTrainPipeline, RandomCrop, ResizeTransform, load_sample
from mmdet.exp.detection import DetectionExp


class ExpandCropExp(DetectionExp):
    """A detector trained on images that are stretched to the batch's size (the PP-YOLO lineage; design/recipes.md, 3.2)."""

    pixel_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # of RGB in [0, 1]
    pixel_std: tuple[float, float, float] = (0.229, 0.224, 0.225)  # of RGB in [0, 1]
    expand_prob: float = 0.5  # probability of placing the image on a larger canvas
    expand_ratio: float = 4.0  # largest side of that canvas, as a factor
    expand_fill: tuple[int, int, int] = (123, 116, 103)  # its colour, RGB
    random_crop: bool = True  # crops whose overlap with the boxes is constrained
    distort_prob: float = 0.5  # probability of each of hue, saturation, contrast, brightness
    flip_prob: float = 0.5  # probability of mirroring

    def validate(self) -> None:
        super().validate()
        self._expect("pixel_std", min(self.pixel_std) > 0, "positive numbers")
        for name in ("expand_prob", "distort_prob", "flip_prob"):
            self._expect(name, 0 <= getattr(self, name) <= 1, "a probability, 0 to 1")
        self._expect("expand_ratio", self.expand_ratio >= 1, "at least 1")

    def load_step(self) -> Callable[..., Sample]:
        """``(source, key, rng) -> Sample``: where the pipeline's sample comes from; a recipe may mix two images here."""
        return load_sample

    def train_pipeline(self) -> Callable[..., Sample]:
        return DetectionTrainPipeline(
            expand_prob=self.expand_prob,
            expand_ratio=self.expand_ratio,
            fill=self.expand_fill,
            crop=RandomCrop() if self.random_crop else None,
            distort=ColourDistortion(prob=self.distort_prob) if self.distort_prob else None,
            flip_prob=self.flip_prob,
            load=self.load_step(),
        )

    def eval_transform(self) -> Callable[[Sample], Sample]:
        return ResizeTransform(self.test_size)
