"""ResNet and its parts: shapes, strides, names, variants against torchvision and hand-made blocks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d
from torchvision.models import resnet18, resnet50

from mmdet.models.deform import deformable, offset_conv
from mmdet.models.norms import FrozenBatchNorm2d
from mmdet.models.resnet import ResNet


@pytest.mark.parametrize("variant", ["a", "b", "d"])
@pytest.mark.parametrize("depth", [18, 50])
def test_maps_have_the_promised_shapes(depth, variant):
    model = ResNet(depth, variant, (2, 3, 4, 5)).eval()
    with torch.no_grad():
        maps = model(torch.rand(2, 3, 64, 96))
    expected = [(2, c, 64 // s, 96 // s) for c, s in zip(model.out_channels, model.strides)]
    assert [tuple(m.shape) for m in maps] == expected and model.strides == (4, 8, 16, 32)


def test_only_the_stages_that_are_needed_are_built():
    model = ResNet(18, "b", (3,))
    assert hasattr(model, "res3") and not hasattr(model, "res4")
    assert model.out_channels == (128,) and len(model(torch.rand(1, 3, 64, 64))) == 1


def test_long_stages_have_the_published_names():
    with torch.device("meta"):
        names = ResNet(101, "d").res4._modules
    assert list(names)[:2] == ["res4a", "res4b1"] and list(names)[-1] == "res4b22"


@pytest.mark.parametrize(("depth", "make"), [(18, resnet18), (50, resnet50)])
def test_variant_b_is_torchvisions_network(depth, make):
    """The same parameters in the same order of construction, except that a block's shortcut stands last there."""
    theirs, ours = make(weights=None).eval(), ResNet(depth, "b", (5,)).eval()
    with torch.no_grad():
        for stage in (2, 3, 4, 5):
            for mine, other in zip(getattr(ours, f"res{stage}"), getattr(theirs, f"layer{stage - 1}")):
                for i, name in enumerate(["branch2a", "branch2b", "branch2c"][: 2 if depth == 18 else 3], 1):
                    getattr(mine, name).conv.load_state_dict(getattr(other, f"conv{i}").state_dict())
                    getattr(mine, name).norm.load_state_dict(getattr(other, f"bn{i}").state_dict())
                if other.downsample is not None:
                    mine.short.conv.load_state_dict(other.downsample[0].state_dict())
                    mine.short.norm.load_state_dict(other.downsample[1].state_dict())
        ours.conv1.conv1.conv.load_state_dict(theirs.conv1.state_dict())
        x = torch.rand(1, 3, 64, 64)
        expected = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(x))))
        for layer in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4):
            if depth == 18 and layer is theirs.layer1:
                # torchvision adds the input itself where widths agree; the published files have a projection there.
                short = ours.res2.res2a.short
                nn.init.dirac_(short.conv.weight)
            expected = layer(expected)
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-4)


def test_variants_differ_in_where_the_stride_is():
    first, second = (ResNet(50, v).res3.res3a for v in "ab")
    assert (first.branch2a.conv.stride, first.branch2b.conv.stride) == ((2, 2), (1, 1))
    assert (second.branch2a.conv.stride, second.branch2b.conv.stride) == ((1, 1), (2, 2))
    pooled = ResNet(50, "d")
    assert pooled.res3.res3a.short.conv.conv.stride == (1, 1) and not hasattr(pooled.res2.res2a.short, "pool")


def test_a_fresh_deformable_convolution_is_half_the_plain_one():
    conv = nn.Conv2d(4, 6, 3, padding=1, bias=False)
    x = torch.randn(2, 4, 9, 7)
    torch.testing.assert_close(deformable(x, conv, offset_conv(4)), conv(x) / 2)


def test_shifts_are_y_then_x_for_each_tap():
    """All taps one cell down and two to the right, masks open: the convolution of the moved map."""
    conv, shifts = nn.Conv2d(3, 5, 3, padding=1), offset_conv(3)
    with torch.no_grad():
        shifts.bias[:18:2], shifts.bias[1:18:2], shifts.bias[18:] = 1.0, 2.0, 50.0
    x = torch.randn(1, 3, 8, 8)
    moved = conv2d(x[..., 1:, 2:], conv.weight, conv.bias)  # without the border
    torch.testing.assert_close(deformable(x, conv, shifts)[..., 1:6, 1:5], moved)


def test_deformable_stages_learn_and_keep_the_type_of_mixed_precision():
    model = ResNet(18, "d", (5,), deform_stages=(5,))
    assert [n for n, m in model.named_modules() if n.endswith("conv_offset")] == [
        "res5.res5a.branch2b.conv_offset",
        "res5.res5b.branch2b.conv_offset",
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.rand(2, 3, 64, 64))[0]
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert model.res5.res5b.branch2b.conv_offset.weight.dtype == torch.float32


def test_frozen_norm_keeps_its_statistics_and_the_names_of_batch_norm():
    norm, plain = FrozenBatchNorm2d(4), nn.BatchNorm2d(4)
    assert list(norm.state_dict()) == list(plain.state_dict())
    assert not any(p.requires_grad for p in norm.parameters())
    plain.running_mean.normal_()
    plain.running_var.uniform_(0.5, 2)
    nn.init.normal_(plain.weight)
    norm.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, 5, 5)
    expected = plain.eval()(x)
    torch.testing.assert_close(norm.train()(x), expected)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    assert not isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm))[0], nn.SyncBatchNorm)
    assert all(p.requires_grad for p in FrozenBatchNorm2d(4, affine_trained=True).parameters())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"depth": 77}, "depth must be one of .*got 77"),
        ({"variant": "c"}, "variant must be"),
        ({"return_stages": (4, 3)}, "ascending"),
        ({"return_stages": (1, 2)}, "ascending"),
    ],
)
def test_wrong_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        ResNet(**options)
