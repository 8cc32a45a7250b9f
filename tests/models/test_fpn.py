"""The feature pyramid: shapes, against torchvision's, and with maps whose sides are no multiples."""

import pytest
import torch
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from mmdet.models.fpn import FPN


def maps(height=32, width=48, channels=(8, 12, 16)):
    torch.manual_seed(0)
    return [torch.randn(2, c, -(-height // 2**i), -(-width // 2**i)) for i, c in enumerate(channels)]


@pytest.mark.parametrize("num_extra", [0, 1, 2])
def test_levels_have_the_promised_shapes(num_extra):
    levels = FPN((8, 12, 16), 10, num_extra)(maps())
    assert [tuple(x.shape) for x in levels] == [(2, 10, 32 // 2**i, 48 // 2**i) for i in range(3 + num_extra)]


def test_it_is_torchvisions_pyramid():
    theirs = FeaturePyramidNetwork([8, 12, 16], 10, LastLevelP6P7(10, 10))
    ours = FPN((8, 12, 16), 10)
    for i in range(3):
        ours.lateral[i].load_state_dict(theirs.inner_blocks[i][0].state_dict())
        ours.output[i].load_state_dict(theirs.layer_blocks[i][0].state_dict())
    for mine, name in zip(ours.extra, ("p6", "p7")):
        mine.load_state_dict(getattr(theirs.extra_blocks, name).state_dict())
    for expected, got in zip(theirs({str(i): x for i, x in enumerate(maps())}).values(), ours(maps())):
        torch.testing.assert_close(got, expected)


def test_the_relu_before_further_levels_can_be_left_out():
    with_relu = FPN((8, 12, 16), 10)
    without = FPN((8, 12, 16), 10, extra_relu=False)
    without.load_state_dict(with_relu.state_dict())
    *same, last = with_relu(maps())
    *others, expected = without(maps())
    torch.testing.assert_close(same, others)
    assert not torch.allclose(last, expected)
    torch.testing.assert_close(without.extra[1](others[-1]), expected)


def test_sides_need_not_be_multiples():
    levels = FPN((8, 12, 16), 10)(maps(25, 37))
    assert [tuple(x.shape[-2:]) for x in levels] == [(25, 37), (13, 19), (7, 10), (4, 5), (2, 3)]
