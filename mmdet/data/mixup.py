"""Mix-up of two samples (arXiv 1710.09412; for detection arXiv 1902.04103, section 3.1)."""

from __future__ import annotations

import cv2
import numpy as np

from mmdet.data.structures import Sample, SampleKey


def mix(first: Sample, second: Sample, factor: float) -> Sample:
    """``factor`` of ``first`` and the rest of ``second``, laid over each other at the top left.

    The image is as large as both together and black where neither reaches; its values round half-even. Boxes of both keep their
    places, and their weights are multiplied with the share of their image. Everything else is that of ``first``.
    """
    size = np.maximum(first.image.shape[:2], second.image.shape[:2])
    image = cv2.addWeighted(_enlarged(first.image, size), factor, _enlarged(second.image, size), 1 - factor, 0)
    weights = [first.weights * np.float32(factor), second.weights * np.float32(1 - factor)]
    joined = {name: np.concatenate([getattr(s, name) for s in (first, second)]) for name in ("boxes", "labels", "ignore")}
    return first.replace(image=image, weights=np.concatenate(weights), **joined)


def _enlarged(image: np.ndarray, size: np.ndarray) -> np.ndarray:
    """``image`` (h, w, 3) with black to the right and below, up to ``size`` (H, W)."""
    height, width = image.shape[:2]
    if (height, width) == tuple(size):
        return image
    return cv2.copyMakeBorder(image, 0, int(size[0]) - height, 0, int(size[1]) - width, cv2.BORDER_CONSTANT, value=0)


class MixUp:
    """Loads the sample of a key mixed with another one of the whole training set.

    The factor comes from beta(``alpha``, ``beta``). In epochs from ``last_epochs_from`` on (counted from 0; None: never) the
    sample is left as it is, and so it is in a set of one image. Factor and partner are drawn first, whatever the epoch.
    """

    def __init__(self, alpha: float = 1.5, beta: float = 1.5, last_epochs_from: int | None = None) -> None:
        if alpha <= 0 or beta <= 0:
            raise ValueError(f"mix-up needs a positive alpha and beta, got {alpha} and {beta}")
        self.alpha, self.beta, self.last_epochs_from = alpha, beta, last_epochs_from

    def __call__(self, source, key: SampleKey, rng: np.random.Generator) -> Sample:
        """``source.load(index)`` decodes, ``len(source)`` counts."""
        factor = float(rng.beta(self.alpha, self.beta))
        partner = (key.index + int(rng.integers(1, max(len(source), 2)))) % len(source)
        sample = source.load(key.index)
        over = self.last_epochs_from is not None and key.epoch >= self.last_epochs_from
        if over or partner == key.index or not 0 < factor < 1:
            return sample
        return mix(sample, source.load(partner), factor)
