"""Overlaps against hand-computed tables, brute force and the reference values."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.models.boxes import giou_aligned, giou_pairwise, iou_aligned, iou_pairwise

# a, b, IoU, GIoU by hand
TABLE = [
    ((0, 0, 10, 10), (0, 0, 10, 10), 1.0, 1.0),
    ((0, 0, 10, 10), (5, 0, 15, 10), 1 / 3, 1 / 3),
    ((0, 0, 10, 10), (2, 2, 4, 4), 0.04, 0.04),
    ((0, 0, 10, 10), (10, 10, 20, 20), 0.0, -0.5),
    ((0, 0, 10, 10), (20, 0, 30, 10), 0.0, -1 / 3),
    ((5, 5, 5, 5), (0, 0, 10, 10), 0.0, 0.0),
]


def test_hand_computed_overlaps():
    a, b = (torch.tensor([row[i] for row in TABLE], dtype=torch.float32) for i in (0, 1))
    torch.testing.assert_close(iou_aligned(a, b), torch.tensor([row[2] for row in TABLE]))
    torch.testing.assert_close(giou_aligned(a, b), torch.tensor([row[3] for row in TABLE]))


def test_two_boxes_without_area_are_no_nan():
    empty = torch.tensor([[3.0, 3, 3, 3]], requires_grad=True)
    value = giou_aligned(empty, torch.tensor([[3.0, 3, 3, 3]]))
    value.sum().backward()
    assert value.isfinite().all()
    assert empty.grad.isfinite().all()


@pytest.mark.parametrize(("pairwise", "aligned"), [(iou_pairwise, iou_aligned), (giou_pairwise, giou_aligned)])
def test_pairwise_equals_aligned_and_takes_batches(pairwise, aligned):
    corners = torch.rand(2, 7, 4, generator=torch.Generator().manual_seed(0)) * 50
    boxes = torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)
    others = boxes[:, :5] + 3
    table = pairwise(boxes, others)
    assert table.shape == (2, 7, 5)
    for i in range(7):
        for j in range(5):
            torch.testing.assert_close(table[:, i, j], aligned(boxes[:, i], others[:, j]))


def test_half_types_are_computed_in_float32_and_float64_stays():
    box = torch.tensor([[0.0, 0, 639.3, 10]])
    assert iou_aligned(box.bfloat16(), box.bfloat16()).dtype == torch.float32
    assert iou_aligned(box.double(), box.double()).dtype == torch.float64
    assert iou_pairwise(box.half(), box.half()).dtype == torch.float32


@needs_shared
def test_reference_values():
    given = np.load(SHARED / "golden/pure/iou.miemie.npz")
    paddle = np.load(SHARED / "golden/pure/iou.paddledet.npz")
    a, b = torch.from_numpy(given["a"]), torch.from_numpy(given["b"])
    for reference in (given, paddle):
        np.testing.assert_allclose(iou_aligned(a, b), reference["bbox_iou_iou"], atol=1e-6)
        np.testing.assert_allclose(giou_aligned(a, b), 1 - reference["GIoULoss"].ravel(), atol=1e-6)
        table = iou_pairwise(torch.from_numpy(given["px"]), torch.from_numpy(given["py"]))
        np.testing.assert_allclose(table, reference["iou_similarity"], atol=1e-6)
    a.requires_grad_(True)
    (1 - giou_aligned(a, b)).sum().backward()
    rows = [i for i in range(len(a)) if i != 2]  # row 2 touches exactly: a sub-gradient of choice
    np.testing.assert_allclose(a.grad[rows], given["GIoULoss_grad_a"][rows], atol=1e-5)
