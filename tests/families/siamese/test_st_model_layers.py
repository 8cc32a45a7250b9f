"""ST-03 and ST-04: correlations against loops, the template's attention, the head's distances, the points."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmdet.families.siamese.exp import SiameseExp
from mmdet.families.siamese.head import MAX_DISTANCE, LTRBHead
from mmdet.families.siamese.layers import DepthwiseCorr, PixelCorr, TemplateBranch
from mmdet.models.points import make_points


def test_pixel_correlation_equals_three_loops():
    torch.manual_seed(0)
    search, template = torch.randn(2, 5, 4, 6), torch.randn(2, 5, 3, 2)
    expected = torch.zeros(2, 6, 4, 6)
    for i in range(2):
        for z in range(6):
            for y in range(4):
                for x in range(6):
                    expected[i, z, y, x] = (search[i, :, y, x] * template[i, :, z // 2, z % 2]).sum() / math.sqrt(5)
    found = PixelCorr()(search, template)
    assert (found - expected).abs().max() <= 1e-5 and PixelCorr().out_channels(5, 6) == found.shape[1]


@pytest.mark.parametrize("side", [4, 6, 16])
def test_depthwise_correlation_equals_a_loop_over_pairs_and_channels(side):
    torch.manual_seed(0)
    search, template = torch.randn(2, 3, 8, 9), torch.randn(2, 3, side, side)
    found = DepthwiseCorr()(search, template)
    kernel = template[:, :, side // 4 : side - side // 4, side // 4 : side - side // 4]
    n = kernel.shape[-1]
    padded = F.pad(search, (n // 2, n - 1 - n // 2, n // 2, n - 1 - n // 2))
    for i in range(2):
        for c in range(3):
            expected = F.conv2d(padded[i : i + 1, c : c + 1], kernel[i : i + 1, c : c + 1])[0, 0] / n**2
            assert (found[i, c] - expected).abs().max() <= 1e-5
    assert found.shape == search.shape and DepthwiseCorr().out_channels(3, side**2) == 3


def test_the_template_branch_averages_over_positions():
    """Its output lies in the convex hull of the stack's output: no position is above the largest value of its channel."""
    torch.manual_seed(0)
    branch = TemplateBranch(6, 4, 2).eval()
    x = torch.randn(2, 6, 5, 5)
    plain, averaged = branch.stack(x), branch(x)
    assert averaged.shape == (2, 4, 5, 5)
    assert (averaged <= plain.amax((2, 3), keepdim=True) + 1e-6).all()
    assert (averaged >= plain.amin((2, 3), keepdim=True) - 1e-6).all()
    tokens = plain[0].reshape(4, 25)
    by_hand = torch.stack([(tokens.T @ tokens[:, i] / 2).softmax(0) @ tokens.T for i in range(25)], 1).reshape(4, 5, 5)
    torch.testing.assert_close(averaged[0], by_hand)


def test_a_fresh_head_predicts_the_prior_distance():
    torch.manual_seed(0)
    head = LTRBHead(8, 8, prior_distance=16.0, num_blocks=1, tower_blocks=1)
    predictions = head(torch.randn(2, 8, 6, 6))
    assert (predictions.ltrb.log() - math.log(16)).abs().max() < 0.5
    assert (predictions.scores() - 0.5).abs().max() < 0.2


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_distances_and_their_gradients_stay_finite(bias):
    head = LTRBHead(4, 4, 16.0, 1, 1)
    nn.init.constant_(head.reg_pred.bias, bias)
    predictions = head(torch.randn(1, 4, 6, 6))
    assert predictions.ltrb.max() <= MAX_DISTANCE * (1 + 1e-5)
    predictions.ltrb.sum().backward()
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)


def test_points():
    """ST-04: 4 ... 252 in steps of 8, row by row; the tracker's grid is the same less half the search crop."""
    points = make_points([(32, 32)], [8]).points
    assert points[:, 0].reshape(32, 32)[0].tolist() == list(range(4, 253, 8)) == points[:, 1].reshape(32, 32)[:, 0].tolist()
    assert torch.equal(points[:32, 1], torch.full((32,), 4.0))
    assert (points - 128).min() == -124 and (points - 128).max() == 124


@pytest.mark.parametrize("correlation", ["pixel", "depthwise"])
def test_both_correlations_make_a_network(correlation):
    exp = SiameseExp()
    for name, value in {**exp.demo_settings(), "correlation": correlation}.items():
        exp.set(name, value, "test")
    torch.manual_seed(0)
    model = exp.get_model().eval()
    with torch.no_grad():
        state = model.encode_template(torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8))
        score, ltrb = model.search(state, torch.randint(0, 256, (3, 3, 128, 128), dtype=torch.uint8))
    assert state.shape == (1, 48, 8, 8) and score.shape == (3, 16, 16) and ltrb.shape == (3, 4, 16, 16)
    assert score.dtype == ltrb.dtype == torch.float32 and 0 <= score.min() <= score.max() <= 1 and ltrb.min() > 0


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_crops_that_are_only_transposed_views_are_safe(memory):
    """A first block's strided 1x1 convolution would crash on them, and on channels_last weights, in backward (torch 2.13
    and 2.14 on the CPU)."""
    exp = SiameseExp()
    for name, value in exp.demo_settings().items():
        exp.set(name, value, "test")
    model = exp.get_model().to(memory_format=memory)
    seen = []
    model.backbone.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    for images in (torch.zeros(2, 64, 64, 3, dtype=torch.uint8), torch.zeros(2, 64, 64, 3)):
        model.encode_template(images.permute(0, 3, 1, 2)).sum().backward()
    assert seen == [True, True]
