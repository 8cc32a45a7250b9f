"""The deformable convolution equals the reference values, and a NaN cannot make it read foreign memory."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmdet.models.deform import deformable, offset_conv


@needs_shared
@pytest.mark.parametrize("stride", [1, 2])
def test_reference(stride, monkeypatch):
    """Shifts and masks as given: the convolution that would compute them is put aside."""
    given = np.load(SHARED / "golden/pure/dcnv2.miemie.npz")
    paddle = np.load(SHARED / "golden/pure/dcnv2.paddledet.npz")
    x, weight, shifts, mask = (torch.from_numpy(given[k]) for k in ("x", "w", f"offset_s{stride}", f"mask_s{stride}"))
    conv, wanted = nn.Conv2d(4, 5, 3, stride, 1, bias=False), offset_conv(4, 3, stride)
    conv.weight.data = weight
    logits = torch.cat([shifts, mask.double().logit().float()], 1)
    monkeypatch.setattr("mmdet.models.deform.F.conv2d", lambda *_: logits)
    out = deformable(x, conv, wanted).detach()
    for expected in (given, paddle):
        np.testing.assert_allclose(out, expected[f"out_s{stride}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_are_not_finite_stay_visible(value):
    """torchvision 0.29's kernel crashes the process where it is given a shift that is NaN."""
    conv, wanted = nn.Conv2d(4, 6, 3, padding=1), offset_conv(4)
    nn.init.normal_(wanted.weight)
    x = torch.randn(2, 4, 9, 7)
    x[0, 0, 4, 4] = value
    out = deformable(x, conv, wanted)
    out.sum().backward()
    assert out[1].isfinite().all()
    assert value == 1e30 or not out[0].isfinite().all()


def test_its_operations_are_counted():
    conv, wanted = nn.Conv2d(4, 6, 3, padding=1), offset_conv(4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        deformable(torch.rand(2, 4, 9, 7), conv, wanted)
    assert counter.get_total_flops() == 2 * 2 * 9 * 7 * 4 * 9 * (6 + 27)
