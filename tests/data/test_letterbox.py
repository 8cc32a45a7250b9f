"""Letterbox against the reference values, and the way back (case E04)."""

import numpy as np
import torch
from shared import SHARED, needs_shared

from mmdet.data.collate import collate
from mmdet.data.letterbox import LetterboxTransform
from mmdet.data.structures import Detections, Sample


@needs_shared
def test_reference_values():
    given = np.load(SHARED / "golden/pure/preproc.yolox.npz")
    out = LetterboxTransform((64, 96))(Sample.from_arrays(given["img"]))
    assert out.image.dtype == np.uint8
    difference = np.abs(out.image.transpose(2, 0, 1) - given["out"])
    assert difference.max() <= 1 and difference.mean() < 0.05  # versions of OpenCV round differently
    assert out.transform[0, 0] == out.transform[1, 1] == 96 / 61


def test_e04_boxes_go_there_and_back():
    sample = Sample.from_arrays(np.zeros((960, 1280, 3), np.uint8), [[200, 100, 600, 400]], [0], [[0, 0, 1280, 960]])
    out = LetterboxTransform((640, 640))(sample)
    assert out.boxes.tolist() == [[100, 50, 300, 200]] and out.ignore.tolist() == [[0, 0, 640, 480]]
    assert (out.image[480:] == 114).all() and not out.image[:480].any()
    (meta,) = collate([out]).meta
    found = Detections(torch.tensor([[100.0, 50, 300, 200]]), torch.ones(1), torch.zeros(1, dtype=torch.int64))
    assert found.to_original(meta).boxes.tolist() == [[200, 100, 600, 400]]


def test_extreme_shapes():
    for size in ((1, 1000), (1000, 1), (3, 5)):
        assert LetterboxTransform((64, 96))(Sample.from_arrays(np.zeros((*size, 3), np.uint8))).image.shape == (64, 96, 3)
