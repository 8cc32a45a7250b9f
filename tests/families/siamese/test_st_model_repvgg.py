"""ST-01 and ST-02: RepVGG's published sizes, and the deployed form against the trained one."""

import pytest
import torch
from torch import nn

from mmdet.core.checkpoint import load_backbone
from mmdet.families.siamese.compat import LOAD_RULES
from mmdet.families.siamese.exp import OUT_STAGES, STRIDES, SiameseExp
from mmdet.models.layers import ConvBNAct
from mmdet.models.repvgg import REPVGG_SIZES, RepVGG, RepVGGBlock, deploy, reparameterize

BLOCKS = (2, 4, 8, 1)


def count(module):
    return sum(p.numel() for p in module.parameters())


def lived_in(module, dtype=torch.float32):
    """The module with norms as they are after training."""
    generator = torch.Generator().manual_seed(3)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor, low in ((layer.weight, 0.5), (layer.bias, -0.5), (layer.running_mean, -0.5), (layer.running_var, 0.5)):
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + low)
    return module.to(dtype).eval()


@pytest.mark.parametrize(("variant", "train", "deployed"), [("A0", 3_146_496, 2_823_456), ("A2", 12_528_064, 11_258_560)])
def test_parameter_counts_of_stages_0_to_3(variant, train, deployed):
    backbone = RepVGG(variant, STRIDES, BLOCKS, OUT_STAGES)
    assert count(backbone) == train and count(deploy(backbone)) == deployed


def test_the_last_stage_is_built_only_if_it_is_used():
    """2,462,720 parameters that the reference builds and never runs."""
    whole, used = (RepVGG("A0", STRIDES, BLOCKS, stages) for stages in ((2, 3, 4), (2, 3)))
    assert count(whole) - count(used) == 2_462_720
    assert count(deploy(whole)) - count(deploy(used)) == 2_213_120
    assert not hasattr(used, "stage4")


def test_parameter_counts_of_the_whole_network():
    model = SiameseExp().get_model()
    assert count(model) == 15_145_222 and count(deploy(model)) == 13_605_926
    assert count(model.template_branch) == 2_052_096
    assert count(model.search_branch) + count(model.head) == 9_946_630


@pytest.mark.parametrize(("variant", "widths"), [("A0", (96, 192)), ("A1", (128, 256)), ("A2", (192, 384)), ("tiny", (32, 48))])
def test_feature_shapes(variant, widths):
    backbone = RepVGG(variant, STRIDES, BLOCKS, OUT_STAGES).eval()
    assert backbone.out_channels == list(widths) and backbone.strides == [8, 8]
    with torch.device("meta"):
        copy = RepVGG(variant, STRIDES, BLOCKS, OUT_STAGES)
        for size in (128, 256):
            shapes = [tuple(f.shape) for f in copy(torch.zeros(1, 3, size, size))]
            assert shapes == [(1, width, size // 8, size // 8) for width in widths]


@pytest.mark.parametrize(("variant", "last"), [("A0", 1280), ("A1", 1280), ("A2", 1408), ("B0", 1280), ("B1", 2048)])
def test_published_widths(variant, last):
    """Channels before the classifier, arXiv 2101.03697, table 2."""
    assert REPVGG_SIZES[variant].widths[4] == last
    assert RepVGG("tiny").strides == [32]


@pytest.mark.parametrize("wrong", [{"variant": "A9"}, {"out_stages": ()}, {"out_stages": (3, 2)}, {"out_stages": (5,)}])
def test_what_does_not_exist_is_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        RepVGG(**wrong)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize(
    "block",
    [
        {"in_channels": 8, "out_channels": 8, "identity": True},
        {"in_channels": 8, "out_channels": 8, "identity": True, "groups": 4},
        {"in_channels": 8, "out_channels": 8, "identity": True, "stride": 2},
        {"in_channels": 3, "out_channels": 6, "identity": True, "stride": 2},
        {"in_channels": 8, "out_channels": 8, "identity": True, "use_alpha": True},
    ],
)
def test_a_deployed_block_equals_its_branches(block, dtype, bound):
    torch.manual_seed(0)
    model = lived_in(RepVGGBlock(**block, act=nn.Identity), dtype)
    assert (model.identity is not None) == (block["in_channels"] == block["out_channels"] and block.get("stride", 1) == 1)
    x = torch.randn(2, block["in_channels"], 9, 12, dtype=dtype)
    expected = model(x)
    found = reparameterize(model)(x)
    assert found.dtype == dtype and (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_a_deployed_network_equals_the_trained_one(dtype, bound):
    torch.manual_seed(0)
    model = lived_in(small().get_model(), dtype)
    template, search = (torch.randn(1, 3, n, n, dtype=dtype) for n in (64, 128))
    names, states = list(model.state_dict()), [t.clone() for t in model.state_dict().values()]
    deployed = reparameterize(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in deployed.modules())
    assert list(model.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(states, model.state_dict().values(), strict=True))
    pairs = zip([*model.backbone(search)], [*deployed.backbone(search)], strict=True)
    pairs = [*pairs, (model.encode_template(template), deployed.encode_template(template))]
    pairs += zip(model.search(pairs[-1][0], search), deployed.search(pairs[-1][1], search), strict=True)
    for expected, found in pairs:
        assert found.dtype == dtype and (found - expected).abs().max() <= bound * expected.abs().max()


def test_in_place_it_is_the_same_module_and_flags_stay():
    model = nn.Sequential(RepVGGBlock(4, 4, identity=True), ConvBNAct(4, 4))
    model[0].requires_grad_(False)
    changed = reparameterize(model, inplace=True)
    assert changed is model and not model.training and not model[0].fused.training
    assert not model[0].fused.weight.requires_grad and model[1].conv.weight.requires_grad
    assert [k.split(".")[1] for k in model.state_dict()] == ["fused", "fused", "conv", "conv"]
    assert reparameterize(model, inplace=True) is model


def test_the_published_layout_loads():
    """Names of the authors' files; a deeper third stage and the classifier find no place."""
    torch.manual_seed(1)
    published = {}
    for name, value in RepVGG("tiny", STRIDES, (1, 2, 5, 1), (2, 3, 4)).state_dict().items():
        for ours, theirs in (("conv1", "rbr_dense"), ("conv2", "rbr_1x1"), ("identity", "rbr_identity")):
            name = name.replace(f".{ours}.", f".{theirs}.")
        published[name.replace("stage0.0.", "stage0.")] = torch.rand_like(value.float()) if value.is_floating_point() else value
    published["linear.weight"] = torch.zeros(10, 64)
    assert "stage0.rbr_dense.conv.weight" in published and "stage1.0.rbr_1x1.bn.running_mean" in published
    model = small().get_model()
    assert model.load_rules is LOAD_RULES
    report = load_backbone(model, published)
    assert not report.missing and not report.reinitialized and "linear.weight" in " ".join(report.unexpected)
    assert torch.equal(model.backbone.stage0[0].conv1.conv.weight, published["stage0.rbr_dense.conv.weight"])
    assert torch.equal(model.backbone.stage3[2].identity.weight, published["stage3.2.rbr_identity.weight"])


def small(**fields):
    """The smallest tracker."""
    exp = SiameseExp()
    values = {**exp.demo_settings(), **fields}
    for name, value in values.items():
        exp.set(name, value, "test")
    return exp
