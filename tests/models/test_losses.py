"""Losses against the reference values, gradients included."""

import json

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.models.losses import distribution_focal_loss, focal_loss, giou_loss, varifocal_loss
from mmdet.models.points import distances_to_boxes

PEERS = ("miemie", "paddledet")


def pure(peer):
    path = SHARED / f"golden/pure/losses.{peer}"
    return np.load(path.with_suffix(f".{peer}.npz")), json.loads(path.with_suffix(f".{peer}.json").read_text())["scalars"]


@pytest.fixture
def inputs():
    given, _ = pure("miemie")
    return {name: torch.from_numpy(given[name]) for name in ("pred_score", "gt_score", "one_hot", "dfl_pred", "dfl_target")}


@needs_shared
@pytest.mark.parametrize("peer", PEERS)
def test_varifocal(peer, inputs):
    arrays, scalars = pure(peer)
    score = inputs["pred_score"].requires_grad_(True)
    loss = varifocal_loss(score.logit(), inputs["gt_score"], inputs["one_hot"].bool())
    assert loss.shape == score.shape
    loss.sum().backward()
    assert loss.sum().item() == pytest.approx(scalars["varifocal_sum(alpha .75,gamma 2)"], rel=1e-5)
    np.testing.assert_allclose(score.grad, arrays["varifocal_grad"], rtol=2e-4, atol=1e-4)


@needs_shared
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("alpha", [0.25, -1])
def test_focal(peer, alpha, inputs):
    arrays, scalars = pure(peer)
    score = inputs["pred_score"].requires_grad_(True)
    loss = focal_loss(score.logit(), inputs["gt_score"], alpha=alpha)
    loss.sum().backward()
    assert loss.sum().item() == pytest.approx(scalars[f"focal_sum_alpha{alpha}"], rel=1e-5)
    np.testing.assert_allclose(score.grad, arrays[f"focal_grad_alpha{alpha}"], rtol=2e-4, atol=1e-4)


@needs_shared
@pytest.mark.parametrize("peer", PEERS)
def test_distribution_focal(peer, inputs):
    arrays, _ = pure(peer)
    logits = inputs["dfl_pred"].requires_grad_(True)
    loss = distribution_focal_loss(logits, inputs["dfl_target"])
    assert loss.shape == (12,)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), arrays["dfl"].ravel(), rtol=1e-5)
    np.testing.assert_allclose(logits.grad, arrays["dfl_grad"], atol=1e-6)


@needs_shared
def test_distances_to_boxes():
    given, _ = pure("miemie")
    boxes = distances_to_boxes(torch.from_numpy(given["points"]), torch.from_numpy(given["dist"]))
    np.testing.assert_allclose(boxes, given["batch_distance2bbox"], atol=1e-5)


def test_varifocal_by_hand():
    logits = torch.tensor([0.0, 0.0])  # score 0.5
    loss = varifocal_loss(logits, torch.tensor([0.0, 0.8]), torch.tensor([False, True]))
    expected = [0.75 * 0.25 * np.log(2), 0.8 * np.log(2)]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_distribution_focal_by_hand():
    loss = distribution_focal_loss(torch.zeros(1, 4, 5), torch.tensor([[0.0, 1.5, 2.25, 3.99]]))
    assert loss.item() == pytest.approx(np.log(5), rel=1e-6)


def test_losses_leave_autocast_and_survive_extreme_logits():
    logits = torch.tensor([-100.0, 100.0, 0.0], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for loss in (
            varifocal_loss(logits, torch.zeros(3), torch.zeros(3, dtype=torch.bool)),
            varifocal_loss(logits, torch.full((3,), 0.5), torch.ones(3, dtype=torch.bool)),
            focal_loss(logits, torch.tensor([1.0, 0.0, 1.0])),
            giou_loss(torch.rand(3, 4, dtype=torch.bfloat16), torch.rand(3, 4)),
            distribution_focal_loss(logits.bfloat16().reshape(1, 1, 3).expand(2, 4, 3), torch.full((2, 4), 1.5)),
        ):
            assert loss.dtype == torch.float32
            assert loss.isfinite().all()
    varifocal_loss(logits, torch.zeros(3), torch.zeros(3, dtype=torch.bool)).sum().backward()
    assert logits.grad.isfinite().all()


def test_no_boxes_give_a_zero_that_has_a_gradient():
    logits = torch.zeros(2, 4, 5, requires_grad=True)
    distribution_focal_loss(logits[:0], torch.zeros(0, 4)).sum().backward()
    assert logits.grad.abs().sum() == 0
