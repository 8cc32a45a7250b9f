"""Anchor points: positions, order, the cache, and which points a box holds."""

import copy

import torch

from mmdet.models.points import PointCache, boxes_to_distances, distances_to_boxes, inside_boxes, make_points


def test_points_are_cell_centres_level_after_level_row_major():
    grid = make_points([(1, 2), (2, 4)], (32, 16))
    assert grid.level_sizes == (2, 8)
    assert grid.points.tolist()[:4] == [[16, 16], [48, 16], [8, 8], [24, 8]]
    assert grid.points.tolist()[-1] == [56, 24]
    assert grid.strides.flatten().tolist() == [32] * 2 + [16] * 8


def test_cache_serves_training_after_evaluation_and_is_not_copied():
    cache = PointCache((8,))
    with torch.inference_mode():
        first = cache([torch.zeros(1, 3, 2, 2)])
    parameter = torch.ones(1, requires_grad=True)
    (cache([torch.zeros(4, 3, 2, 2)]).points * parameter).sum().backward()
    assert cache([torch.zeros(1, 3, 2, 2)]).points is first.points
    assert not copy.deepcopy(cache)._grids


def test_cache_is_bounded_and_works_in_float32_at_least():
    cache = PointCache((8,), capacity=3)
    for size in range(1, 9):
        assert cache([torch.zeros(1, 1, size, size, dtype=torch.bfloat16)]).points.dtype == torch.float32
    assert len(cache._grids) == 3
    assert cache([torch.zeros(1, 1, 2, 2, dtype=torch.float64)]).points.dtype == torch.float64


def test_inside_is_strict_and_an_empty_box_holds_nothing():
    points = torch.tensor([[0.0, 0], [5, 5], [10, 5], [9.99, 9.99]])
    boxes = torch.tensor([[[0.0, 0, 10, 10], [5, 5, 5, 5], [0, 0, 0, 0]]])
    assert inside_boxes(points, boxes.unsqueeze(2)).tolist() == [[[False, True, False, True], [False] * 4, [False] * 4]]


def test_distances_and_boxes_are_inverse():
    points, distances = torch.rand(6, 2), torch.rand(6, 4)
    torch.testing.assert_close(boxes_to_distances(points, distances_to_boxes(points, distances)), distances)
    assert distances_to_boxes(torch.tensor([[10.0, 20]]), torch.tensor([[1.0, 2, 3, 4]])).tolist() == [[9, 18, 13, 24]]
