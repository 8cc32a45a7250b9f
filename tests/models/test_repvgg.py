"""RepVGG: the deployed convolution equals the two branches."""

import pytest
import torch
from torch import nn

from mmdet.models.layers import ConvBNAct
from mmdet.models.repvgg import RepVGGBlock, deploy


def lived_in(module: nn.Module) -> nn.Module:
    """The module with norms as they are after training."""
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor, low in ((layer.weight, 0.5), (layer.bias, -0.5), (layer.running_mean, -0.5), (layer.running_var, 0.5)):
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + low)
    return module


@pytest.mark.parametrize("alpha", [None, 1.0, 0.0, -0.7])
def test_deployed_equals_branches(alpha):
    model = lived_in(nn.Sequential(ConvBNAct(3, 8, 3, stride=2), RepVGGBlock(8, 8, alpha is not None), RepVGGBlock(8, 6)))
    if alpha is not None:
        nn.init.constant_(model[1].alpha, alpha)
    x = torch.randn(2, 3, 20, 16)
    names = list(model.state_dict())
    model.eval()
    deployed = deploy(model)
    torch.testing.assert_close(deployed(x), model(x), rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert model[1].fused is None
    assert not any(isinstance(m, nn.BatchNorm2d) for m in deployed.modules())
    assert isinstance(deployed[1].fused, nn.Conv2d)


def test_alpha_multiplies_the_pointwise_branch_whatever_its_value():
    block = lived_in(RepVGGBlock(4, 4, use_alpha=True)).eval()
    x = torch.randn(1, 4, 6, 6)
    nn.init.zeros_(block.alpha)
    torch.testing.assert_close(block(x), block.act(block.conv1(x)))
    block(x).sum().backward()
    assert block.alpha.grad.abs() > 0


def test_fuse_keeps_type_and_does_nothing_twice():
    block = lived_in(RepVGGBlock(4, 4)).double().eval()
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    before = block(x)
    block.fuse()
    block.fuse()
    assert block.fused.weight.dtype == torch.float64
    torch.testing.assert_close(block(x), before, rtol=1e-12, atol=1e-12)
