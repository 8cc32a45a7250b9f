"""Drawing never fails on what a detector may give, and draws where the boxes are."""

import cv2
import numpy as np
import pytest
import torch

from mmdet.data.structures import Detections
from mmdet.evaluators.pictures import class_color, draw_comparison, draw_detections, save_image


def detections(boxes, scores, labels) -> Detections:
    return Detections(torch.tensor(boxes).float().reshape(-1, 4), torch.tensor(scores).float(), torch.tensor(labels).long())


def test_a_box_is_drawn_on_its_own_pixels_and_weak_ones_are_left_out():
    image = np.zeros((200, 300, 3), np.uint8)
    found = detections([[50, 60, 150, 160], [200, 60, 280, 160]], [0.9, 0.1], [1, 0])
    picture = draw_detections(image, found, ["a", "b"], min_score=0.3)
    assert not image.any() and picture.shape == image.shape and picture.dtype == np.uint8
    assert tuple(picture[110, 50]) == tuple(picture[159, 100]) == class_color(1)
    assert not picture[110, 100].any() and not picture[:, 200:].any()


@pytest.mark.parametrize("size", [(4, 5), (40, 30), (900, 1200)])
@pytest.mark.parametrize("name", ["Straße 猫", "🦊", "", "x" * 300])
def test_odd_boxes_names_and_sizes(size, name):
    image = np.full((*size, 3), 80, np.uint8)
    nan, inf = float("nan"), float("inf")
    boxes = [[-50, -50, 1e9, 1e9], [nan, 0, 1, 1], [0, 0, inf, 1], [3, 3, 3, 3], [10, 10, 2, 2]]
    found = detections(boxes, [0.9, 0.9, 0.9, nan, 0.5], [0, 0, 0, 0, 7])
    assert draw_detections(image, found, [name]).shape == image.shape
    sample = {"image": image, "detections": found, "truth": detections([], [], []), "ignore": [[0, 0, 2, 2]]}
    assert draw_comparison(sample, [name]).shape[2] == 3


def test_pictures_are_saved_under_any_name(tmp_path):
    image = np.zeros((6, 7, 3), np.uint8)
    image[..., 0] = 200
    save_image(tmp_path / "größe 猫.png", image)
    read = cv2.imdecode(np.fromfile(tmp_path / "größe 猫.png", np.uint8), cv2.IMREAD_COLOR)
    assert (read[..., ::-1] == image).all()
