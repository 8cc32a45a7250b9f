"""The whole model: documented shapes, start values, memory formats, precision, deployment."""

import math

import pytest
import torch

from mmdet.data.structures import Batch, Targets
from mmdet.families.ppyoloe.backbone import CSPRepResNet, scaled
from mmdet.models.repvgg import RepVGGBlock, deploy

SIZE = (64, 96)
POINTS = 2 * 3 + 4 * 6 + 8 * 12


def batch(epoch=0):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, *SIZE), dtype=torch.uint8, generator=generator)
    return Batch(images, Targets.from_lists([[[5.0, 5, 60, 50]], [[20, 10, 90, 60], [1, 1, 30, 30]]], [[0], [1, 2]]), epoch=epoch)


@pytest.mark.parametrize("plus", [False, True])
def test_documented_shapes(plus, ppyoloe_exp):
    model = ppyoloe_exp("s", plus, num_classes=3).get_model()
    images = model.normalize(batch().images)
    maps = model.backbone(images)
    assert [tuple(m.shape) for m in maps] == [(2, 128, 8, 12), (2, 256, 4, 6), (2, 512, 2, 3)]
    assert model.backbone.out_channels == (128, 256, 512)
    features = model.neck(maps)
    assert [tuple(f.shape) for f in features] == [(2, 384, 2, 3), (2, 192, 4, 6), (2, 96, 8, 12)]
    assert model.neck.out_channels == (384, 192, 96)
    out = model.head(features)
    assert out.class_logits.shape == (2, POINTS, 3)
    assert out.box_logits.shape == (2, POINTS, 4, 17)
    assert out.points.shape == (POINTS, 2)
    assert out.strides.shape == (POINTS, 1)
    assert out.level_sizes == (6, 24, 96)
    boxes, scores = model.eval().decode(batch().images)
    assert boxes.shape == (2, POINTS, 4)
    assert scores.shape == (2, POINTS, 3)
    found = model(batch())
    assert len(found) == 2
    assert found[0].boxes.shape[1] == 4


def test_alphas_of_plus(ppyoloe_exp):
    def alphas(size, plus):
        with torch.device("meta"):
            return sum(name.endswith("alpha") for name, _ in ppyoloe_exp(size, plus).get_model().named_parameters())

    assert [alphas(size, True) for size in "smlx"] == [6, 12, 18, 24]
    assert alphas("s", False) == 0


def test_rounding_of_channels_is_half_even():
    assert scaled((1, 5, 7), 0.5) == (1, 2, 4)
    assert scaled((3, 6, 6, 3), 0.33) == (1, 2, 2, 1)


def test_fresh_scores_and_boxes(ppyoloe_exp):
    model = ppyoloe_exp(num_classes=5).get_model().eval()
    with torch.no_grad():
        boxes, scores = model.decode(batch().images)
        predictions = model.predict(batch().images)
    torch.testing.assert_close(scores, torch.full_like(scores, 0.01))
    sides = boxes[0, :, 2:] - boxes[0, :, :2]
    torch.testing.assert_close(sides, (16 * predictions.strides).expand(-1, 2))  # flat over 0..16: 8 strides each way
    assert model.head.pred_cls[0].bias.mean().item() == pytest.approx(-math.log(99), rel=1e-5)
    assert model.head.stem_cls[0].fc.weight.std().item() == pytest.approx(0.001, rel=0.1)


def test_every_norm_has_the_recipes_numbers(ppyoloe_exp):
    norms = [m for m in ppyoloe_exp().get_model().modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 78
    assert {(m.eps, m.momentum) for m in norms} == {(1e-5, 0.1)}


def test_constants_are_in_no_checkpoint(ppyoloe_exp):
    assert not [n for n in ppyoloe_exp().get_model().state_dict() if n.endswith(("proj", "bins", "gain", "shift", "points"))]


def test_input_size_must_be_a_multiple_of_the_largest_stride(ppyoloe_exp):
    with pytest.raises(ValueError, match="multiple of 32 px on both sides, got 64 x 80"):
        CSPRepResNet(0.33, 0.25)(torch.zeros(1, 3, 64, 80))


@pytest.mark.parametrize("epoch", [0, 1000])
def test_channels_last_changes_no_value(epoch, ppyoloe_exp):
    torch.manual_seed(0)
    model = ppyoloe_exp(num_classes=3).get_model()
    plain = model(batch(epoch)).total
    other = ppyoloe_exp(num_classes=3).get_model()
    other.load_state_dict(model.state_dict())
    other = other.to(memory_format=torch.channels_last)
    last = other(batch(epoch)).total
    last.backward()
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-4)
    assert other.backbone(torch.rand(2, 3, 64, 64))[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("epoch", [0, 1000])
def test_half_precision(epoch, ppyoloe_exp):
    model = ppyoloe_exp(num_classes=3).get_model()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch(epoch))
        out.total.backward()
        boxes, scores = model.eval().decode(batch().images)
    assert out.total.dtype == boxes.dtype == scores.dtype == torch.float32
    assert all(v.isfinite() for v in (*out.losses.values(), *out.stats.values()))
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("plus", [False, True])
def test_deployed_model_finds_the_same(plus, ppyoloe_exp):
    torch.manual_seed(0)
    model = ppyoloe_exp("s", plus, num_classes=3).get_model()
    for name, parameter in model.named_parameters():
        if name.endswith("alpha"):
            torch.nn.init.uniform_(parameter, 0.0, 0.5)
    with torch.no_grad():
        model(batch())
    images = batch().images
    model.eval()
    deployed = deploy(model)
    with torch.no_grad():
        maps, deployed_maps = model.backbone(model.normalize(images)), deployed.backbone(model.normalize(images))
        boxes, scores = model.decode(images)
        deployed_boxes, deployed_scores = deployed.decode(images)
    for a, b in zip(maps, deployed_maps, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * a.abs().max().item())
    torch.testing.assert_close(deployed_boxes, boxes, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(deployed_scores, scores, rtol=1e-5, atol=1e-5)
    assert all(m.fused is not None for m in deployed.modules() if isinstance(m, RepVGGBlock))
    assert sum(p.numel() for p in deployed.parameters()) < sum(p.numel() for p in model.parameters())
