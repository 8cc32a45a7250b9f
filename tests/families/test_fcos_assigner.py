"""FCOS's targets against a point-by-point version, and their properties."""

import numpy as np
import pytest
import torch

from mmdet.data.structures import Targets
from mmdet.families.fcos.assigner import assign_points, centerness, level_ranges
from mmdet.models.points import make_points

STRIDES = (8, 16, 32)
BOUNDS = (24, 48)


def grid_of(height=64, width=96):
    grid = make_points([(height // s, width // s) for s in STRIDES], STRIDES)
    return grid.points, grid.strides, level_ranges(BOUNDS, grid.level_sizes, grid.points)


def random_targets(batch=3, most=7, seed=0, height=64, width=96):
    rng = np.random.default_rng(seed)
    boxes, labels = [], []
    for image in range(batch):
        corner = rng.uniform(0, 0.7, (image * most // max(batch - 1, 1), 2)) * [width, height]
        side = rng.uniform(4, 60, corner.shape)
        boxes.append(np.concatenate([corner, np.minimum(corner + side, [width, height])], 1))
        labels.append(rng.integers(0, 5, len(corner)))
    return Targets.from_lists(boxes, labels)


def one_by_one(boxes, points, strides, ranges, radius):
    """The rule of the paper in plain words: (row of the box or None, centre-ness) of every point of one image."""
    result = []
    for (x, y), (stride,), (low, high) in zip(points.tolist(), strides.tolist(), ranges.tolist()):
        best, best_area, best_ctn = None, float("inf"), 0.0
        for row, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
            sides = (x - x1, y - y1, x2 - x, y2 - y)
            near = radius <= 0 or max(abs(x - (x1 + x2) / 2), abs(y - (y1 + y2) / 2)) < radius * stride
            if min(sides) > 0 and near and low < max(sides) < high and (x2 - x1) * (y2 - y1) < best_area:
                left, top, right, bottom = sides
                best, best_area = row, (x2 - x1) * (y2 - y1)
                best_ctn = (min(left, right) / max(left, right) * min(top, bottom) / max(top, bottom)) ** 0.5
        result.append((best, best_ctn))
    return result


@pytest.mark.parametrize("radius", [0.0, 0.5, 1.5])
def test_it_is_the_papers_rule(radius):
    targets, (points, strides, ranges) = random_targets(), grid_of()
    assigned = assign_points(targets, points, strides, ranges, radius)
    for image in range(3):
        expected = one_by_one(targets.boxes[image][targets.valid[image]], points, strides, ranges, radius)
        positive = [row is not None for row, _ in expected]
        assert assigned.positive[image].tolist() == positive
        for i, (row, quality) in enumerate(expected):
            if row is not None:
                assert int(assigned.box_index[image, i]) == row
            assert float(assigned.scores[image, i]) == pytest.approx(quality, abs=1e-6)
    assert assigned.positive.any() and not assigned.positive[0].any()  # the first image has no boxes


@pytest.mark.parametrize("assign_bytes", [1, 500, 5_000, 20_000, 100_000])
def test_the_result_does_not_depend_on_the_chunks(assign_bytes):
    targets, (points, strides, ranges) = random_targets(5, 11), grid_of()
    whole = assign_points(targets, points, strides, ranges)
    parts = assign_points(targets, points, strides, ranges, assign_bytes=assign_bytes)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts))


def test_batched_equals_single_and_padding_is_no_box():
    targets, (points, strides, ranges) = random_targets(4, 9), grid_of()
    whole = assign_points(targets, points, strides, ranges)
    for i in range(4):
        valid = targets.valid[i]
        alone = Targets.from_lists([targets.boxes[i][valid]], [targets.labels[i][valid]])
        single = assign_points(alone, points, strides, ranges)
        assert torch.equal(single.positive[0], whole.positive[i]) and torch.equal(single.scores[0], whole.scores[i])


def test_the_smallest_box_wins_and_of_equal_ones_the_first():
    points, strides = torch.tensor([[20.0, 20.0]]), torch.tensor([[8.0]])
    ranges = torch.tensor([[-1.0, 64.0]])
    large, small = [0, 0, 40, 40], [10, 10, 30, 30]
    for boxes, expected in (([large, small], 1), ([small, large], 0), ([large, small, small], 1)):
        targets = Targets.from_lists([boxes], [list(range(len(boxes)))])
        assert int(assign_points(targets, points, strides, ranges).box_index) == expected


def test_borders_belong_to_no_level_and_no_box():
    """The farthest side exactly on a level's border: on neither side of it; a point on a box's edge is not inside."""
    points, strides = torch.tensor([[20.0, 20.0], [20.0, 20.0]]), torch.tensor([[8.0], [16.0]])
    ranges = level_ranges((32,), (1, 1), points)
    for far, expected in ((51.9, [True, False]), (52.0, [False, False]), (52.1, [False, True])):
        targets = Targets.from_lists([[[0, 0, far, 40]]], [[0]])
        assert assign_points(targets, points, strides, ranges, radius=0).positive[0].tolist() == expected
    edge = Targets.from_lists([[[20, 0, 40, 40]]], [[0]])
    assert not assign_points(edge, points, strides, ranges, radius=0).positive.any()


def test_a_box_between_the_points_has_none():
    targets = Targets.from_lists([[[5, 5, 9, 9], [4.5, 4.5, 11, 11]]], [[0, 0]])  # the points are at 4 and 12
    points, strides, ranges = grid_of()
    assert not assign_points(targets, points, strides, ranges).positive.any()


def test_targets_are_never_cast_down():
    """Case N03: the box keeps its half pixels and the label its value, whatever the type of the predictions."""
    targets = Targets.from_lists([[[600.0, 600.0, 639.3, 638.7]]], [[2049]])
    points, strides = torch.tensor([[620.0, 620.0]]), torch.tensor([[8.0]])
    assigned = assign_points(targets, points, strides, torch.tensor([[-1.0, 64.0]]))
    assert assigned.scores.dtype == torch.float32
    torch.testing.assert_close(assigned.scores[0, 0], torch.tensor((19.3 / 20 * 18.7 / 20) ** 0.5))
    assert targets.labels[0, assigned.box_index[0, 0]] == 2049


def test_no_boxes_at_all():
    points, strides, ranges = grid_of()
    assigned = assign_points(Targets.from_lists([[], []], [[], []]), points, strides, ranges)
    assert assigned.positive.shape == (2, len(points)) and not assigned.positive.any() and not assigned.scores.any()


def test_centerness():
    table = torch.tensor([[1.0, 1, 1, 1], [1, 2, 4, 2], [1, 1, 3, 4]])
    torch.testing.assert_close(centerness(table), torch.tensor([1.0, 0.5, (1 / 12) ** 0.5]))


def test_levels_and_borders_must_agree():
    with pytest.raises(ValueError, match="3 levels need 2 borders"):
        level_ranges((64,), (4, 2, 1), torch.zeros(1))
