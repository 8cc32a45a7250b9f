"""Padding, splitting and moving of the batch, and boxes back in the file's pixels."""

import numpy as np
import pytest
import torch

from mmdet.data.structures import Batch, Detections, ImageMeta, LossOutput, Sample, Targets


def test_targets_pad_to_the_fullest_image():
    targets = Targets.from_lists(
        boxes=[np.array([[0, 0, 5, 5], [1, 1, 2, 2]]), []],
        labels=[[3, 4], []],
        weights=[[0.5, 1.0], []],
        ignore=[[], [[1, 2, 3, 4]]],
    )
    assert targets.boxes.shape == (2, 2, 4) and targets.boxes.dtype == torch.float32
    assert targets.labels.tolist() == [[3, 4], [0, 0]] and targets.labels.dtype == torch.int64
    assert targets.valid.tolist() == [[True, True], [False, False]]
    assert targets.weights.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert targets.ignore.tolist() == [[[0, 0, 0, 0]], [[1, 2, 3, 4]]]


def test_targets_without_any_box_and_with_many():
    none = Targets.from_lists([[], []], [[], []])
    assert none.boxes.shape == (2, 0, 4) and none.valid.shape == (2, 0) and none.ignore.shape == (2, 0, 4)
    many = Targets.from_lists([np.zeros((600, 4))], [np.zeros(600)])
    assert many.boxes.shape == (1, 600, 4) and bool(many.valid.all())


def test_targets_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="1 boxes, 2 labels"):
        Targets.from_lists([[[0, 0, 1, 1]]], [[1, 2]])
    with pytest.raises(ValueError, match="boxes of 1 images but labels of 0"):
        Targets.from_lists([[]], [])


def test_sample_dtypes():
    sample = Sample.from_arrays(np.zeros((4, 6, 3), np.uint8), [[0, 0, 2, 2]], [1], image_id="a")
    assert (sample.boxes.dtype, sample.labels.dtype, sample.weights.dtype) == (np.float32, np.int64, np.float32)
    assert sample.original_size == (4, 6) and sample.ignore.shape == (0, 4)
    with pytest.raises(ValueError, match="'a': 1 boxes but 0 labels"):
        Sample.from_arrays(sample.image, [[0, 0, 2, 2]], image_id="a")


def test_batch_split_keeps_order_and_parts():
    images = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 3, 2, 2)
    targets = Targets.from_lists([[[i, 0, 9, 9]] for i in range(4)], [[i] for i in range(4)])
    parts = Batch(images, targets, epoch=3, step=7).split(2)
    assert [p.image_ids for p in parts] == [[0, 1], [2, 3]]
    assert [p.targets.labels.flatten().tolist() for p in parts] == [[0, 1], [2, 3]]
    assert (parts[1].epoch, parts[1].step) == (3, 7)
    with pytest.raises(ValueError, match="4 images cannot be split into 3"):
        Batch(images).split(3)


def test_batch_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"\(B, 3, H, W\)"):
        Batch(torch.zeros(1, 4, 4, 3))


def test_detections_go_back_to_the_file():
    meta = ImageMeta((320, 640), (960, 1280), 1, ((0.5, 0, 0), (0, 1 / 3, 0), (0, 0, 1)))
    found = Detections(torch.tensor([[100.0, 50, 300, 200], [-5, -5, 700, 400]]), torch.tensor([0.9, 0.1]), torch.tensor([0, 1]))
    moved = found.to_original(meta)
    torch.testing.assert_close(moved.boxes, torch.tensor([[200.0, 150, 600, 600], [0, 0, 1280, 960]]))
    assert len(moved) == 2 and moved.scores is found.scores
    assert found.to_original(meta, clip=False).boxes[1].tolist() == [-10, -15, 1400, 1200]


def test_detections_of_a_mirrored_frame_stay_ordered():
    meta = ImageMeta((100, 100), (100, 100), 1, ((-1.0, 0, 100), (0, 1, 0), (0, 0, 1)))
    moved = Detections(torch.tensor([[10.0, 20, 30, 40]]), torch.ones(1), torch.zeros(1)).to_original(meta)
    assert moved.boxes.tolist() == [[70, 20, 90, 40]]
    assert Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0)).to_original(meta).boxes.shape == (0, 4)


def test_total_is_the_float32_sum_of_the_losses_only():
    out = LossOutput({"a": torch.tensor(1.5, dtype=torch.bfloat16), "b": torch.tensor(2.0)}, {"c": torch.tensor(100.0)})
    assert out.total.item() == 3.5 and out.total.dtype == torch.float32
