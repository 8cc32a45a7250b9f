"""Shared layers: documented shapes, and the pooling cascade against separate windows."""

import pytest
import torch
import torch.nn.functional as F

from mmdet.models.layers import SPP, ConvBNAct, EffectiveSE, init_he


def test_shapes():
    x = torch.rand(2, 8, 9, 12)
    assert ConvBNAct(8, 5, 3, stride=2)(x).shape == (2, 5, 5, 6)
    assert ConvBNAct(8, 6, 3, groups=2, act=None)(x).shape == (2, 6, 9, 12)
    assert EffectiveSE(8)(x).shape == x.shape
    assert SPP(8, 5)(x).shape == (2, 5, 9, 12)


def test_spp_pools_each_window():
    x = torch.randn(2, 4, 15, 11)
    spp = SPP(4, 3).eval()
    separate = torch.cat([x, *(F.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1)
    torch.testing.assert_close(spp(x), spp.conv(separate), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(4, 9), (9, 5)])
def test_spp_refuses_windows_it_cannot_cascade(sizes):
    with pytest.raises(ValueError, match=r"odd ascending kernel sizes, got \("):
        SPP(4, 4, sizes)


def test_init_he():
    layer = torch.nn.Conv2d(64, 256, 3)
    init_he(layer)
    assert layer.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert not layer.bias.any()
