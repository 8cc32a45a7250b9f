"""The whole model and its layers: documented shapes, grids, DropBlock, decoding, memory formats, precision, deployment."""

import pytest
import torch

from mmdet.core.ema import EMA
from mmdet.data.structures import Batch, Targets
from mmdet.exp import get_exp
from mmdet.families.ppyolo.anchors import Anchors
from mmdet.families.ppyolo.head import PPYOLOHead, Predictions
from mmdet.families.ppyolo.layers import CoordConv, DropBlock, LeakyReLU
from mmdet.models.repvgg import deploy

SIZE = (64, 96)
SMALL = ("num_classes=3", "iou_aware=True")


def model_of(name="ppyolo_r18vd", *words):
    torch.manual_seed(0)
    return get_exp(name, [*SMALL, *words]).get_model()


def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, *SIZE), dtype=torch.uint8, generator=generator)
    return Batch(images, Targets.from_lists([[[5.0, 5, 60, 50]], [[20, 10, 90, 60], [1, 1, 30, 30]]], [[0], [1, 2]]))


@pytest.mark.parametrize("name", ["ppyolo_r18vd", "ppyolo_r50vd", "ppyolov2_r50vd"])
def test_documented_shapes(name):
    model = model_of(name).eval()
    strides = model.head.anchors.strides
    with torch.no_grad():
        maps = model.backbone(model.normalize(batch().images))
        features = model.neck(maps)
        raw = model.head(features)
        boxes, scores = model.decode(batch().images)
    for i, stride in enumerate(strides):
        height, width = SIZE[0] // stride, SIZE[1] // stride
        assert features[i].shape == (2, model.neck.out_channels[i], height, width)
        assert maps[-1 - i].shape == (2, model.backbone.out_channels[-1 - i], height, width)
        assert raw.maps[i].shape == (2, 3 * (5 + 3 + 1), height, width)
    points = 3 * sum(SIZE[0] * SIZE[1] // s**2 for s in strides)
    assert boxes.shape == (2, points, 4)
    assert scores.shape == (2, points, 3)
    assert (boxes >= 0).all()
    assert (boxes[..., 0::2] <= SIZE[1]).all()
    assert (boxes[..., 1::2] <= SIZE[0]).all()


def test_every_norm_has_the_recipes_numbers():
    norms = [m for m in model_of("ppyolo_r50vd").modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 76
    assert {(m.eps, m.momentum) for m in norms} == {(1e-5, 0.1)}


def test_constants_are_in_no_checkpoint_and_move_with_the_model():
    model = model_of()
    assert not [n for n in model.state_dict() if "anchors" in n or n.endswith(("gain", "shift"))]
    assert model.head.anchors.sizes.dtype == torch.float32
    ema = EMA.of_type("threshold", 0.9998)
    ema.attach(model)
    assert torch.equal(ema.module(model).criterion.anchors.sizes, model.criterion.anchors.sizes)


# -- layers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "last"), [("full", 1.0), ("half", -0.5)])
def test_coord_conv_sees_column_then_row(grid, last):
    layer = CoordConv(2, 4, 1, LeakyReLU, grid).eval()
    torch.nn.init.dirac_(layer.conv.conv.weight)
    layer.conv.act = torch.nn.Identity()
    x = torch.rand(1, 2, 5, 3)
    out = layer(x) * (1 + 1e-5) ** 0.5
    torch.testing.assert_close(out[:, :2], x)
    for row in range(5):
        torch.testing.assert_close(out[0, 2, row], torch.linspace(-1, last, 3))
    for column in range(3):
        torch.testing.assert_close(out[0, 3, :, column], torch.linspace(-1, last, 5))
    assert layer(torch.rand(1, 2, 1, 1)).isfinite().all()
    with pytest.raises(ValueError, match="'full' or 'half', got 'whole'"):
        CoordConv(2, 4, 1, LeakyReLU, "whole")


def test_drop_block_is_off_in_evaluation_and_with_probability_1():
    x = torch.rand(2, 3, 8, 8)
    assert DropBlock().eval()(x) is x
    assert DropBlock(keep_prob=1.0).train()(x) is x


def test_drop_block_zeroes_blocks_and_keeps_the_sum():
    torch.manual_seed(0)
    x = torch.ones(8, 32, 20, 20)
    out = DropBlock(3, 0.9).train()(x)
    share = (out > 0).float().mean().item()
    assert share == pytest.approx(0.9, abs=0.02)
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=1e-4, atol=0)
    assert len(out.unique()) == 2
    dropped = (out[0, :, 1:-1, 1:-1] == 0).float().unsqueeze(1)
    inside = torch.nn.functional.conv2d((out[0] == 0).float().unsqueeze(1), torch.ones(1, 1, 3, 3))
    centers = torch.nn.functional.max_pool2d((inside == 9).float(), 3, 1, 1)
    assert (centers[..., 2:-2, 2:-2] >= dropped[..., 2:-2, 2:-2]).all()  # each zero belongs to a whole block of zeros


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 3, 2, 5), (1, 1, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drop_block_of_small_maps_and_half_types(shape, dtype):
    layer = DropBlock(3, 0.1).train()
    for seed in range(20):
        torch.manual_seed(seed)
        out = layer(torch.ones(shape, dtype=dtype))
        assert out.dtype == dtype
        assert out.isfinite().all()


def test_drop_block_sizes_are_odd():
    with pytest.raises(ValueError, match="odd, got 4"):
        DropBlock(4)


# -- decoding ---------------------------------------------------------------------------------------------------------------


def two_level_head(**options):
    anchors = Anchors([(10, 20), (30, 40), (50, 60), (70, 80)], [(2, 3), (0, 1)], (32, 16))
    return PPYOLOHead([4, 4], 2, anchors, **options)


def test_anchors_that_do_not_fit_are_named():
    for masks, strides in (
        ([(0, 1), (1, 2)], (32, 16)),
        ([(0, 1)], (32,)),
        ([(0, 1, 2), (3,)], (32, 16)),
        ([(0, 1, 2, 3)], (32, 16)),
    ):
        with pytest.raises(ValueError, match="anchor masks"):
            Anchors([(10, 20), (30, 40), (50, 60), (70, 80)], masks, strides)


def test_decoding_by_hand():
    head = two_level_head(iou_aware=True, iou_aware_factor=0.4, scale_x_y=1.05, clip=False)
    maps = [torch.zeros(1, 2 * 8, 2, 3), torch.zeros(1, 2 * 8, 4, 6)]
    with torch.no_grad():
        maps[1][0, 1, 3, 5] = 2.0  # the IoU branch of the second anchor
        maps[1][0, 2 + 7 + 0 : 2 + 7 + 7, 3, 5] = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.3, 0.7, -0.2])
        boxes, scores = head.decode(Predictions(tuple(maps)))
    assert boxes.shape == (1, 2 * 6 + 2 * 24, 4)
    x, y = (5 + 1.05 * 0.7310586 - 0.025) * 16, (3 + 1.05 * 0.2689414 - 0.025) * 16
    w, h = 30 * 1.6487213, 40 * 0.6065307
    expected = torch.tensor([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
    torch.testing.assert_close(boxes[0, -1], expected, rtol=1e-5, atol=1e-4)  # last level, anchor, row and column
    sigmoid = torch.tensor([0.3, 2.0, 0.7, -0.2]).sigmoid()
    torch.testing.assert_close(scores[0, -1], sigmoid[0] ** 0.6 * sigmoid[1] ** 0.4 * sigmoid[2:])
    torch.testing.assert_close(boxes[0, 0], torch.tensor([16.0 - 25, 16 - 30, 16 + 25, 16 + 30]))
    torch.testing.assert_close(boxes[0, 6], torch.tensor([16.0 - 35, 16 - 40, 16 + 35, 16 + 40]))


def test_extreme_logits_stay_inside_the_image():
    head = two_level_head(iou_aware=True)
    maps = tuple(torch.full((1, 16, 2 * f, 3 * f), value) for f, value in ((1, 500.0), (2, -500.0)))
    boxes, scores = head.decode(Predictions(maps))
    assert boxes.isfinite().all()
    assert boxes.amax((0, 1)).tolist() == [96, 64, 96, 64] or boxes[..., 2].max() == 96
    assert (boxes >= 0).all()
    assert scores.min() >= 0
    assert scores.max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_decoding_is_done_in_float32_or_better(dtype):
    head = two_level_head(iou_aware=False)
    maps = tuple(torch.zeros(1, 14, 2 * f, 3 * f, dtype=dtype) for f in (1, 2))
    boxes, scores = head.decode(Predictions(maps))
    assert boxes.dtype == scores.dtype == torch.promote_types(dtype, torch.float32)


# -- the whole --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppyolo_r18vd", "ppyolo_r50vd"])
def test_channels_last_changes_no_value(name):
    words = ("keep_prob=1", "depth=18", "neck_pairs=2", "deform_stages=()")
    model, other = model_of(name, *words), model_of(name, *words)
    other = other.to(memory_format=torch.channels_last)
    plain, last = model(batch()).total, other(batch()).total
    last.backward()
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-4)
    assert other.neck(other.backbone(torch.rand(2, 3, 64, 64)))[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["ppyolo_r18vd", "ppyolo_r50vd"])
def test_half_precision(name):
    model = model_of(name)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch())
        out.total.backward()
        boxes, scores = model.eval().decode(batch().images)
    assert out.total.dtype == boxes.dtype == scores.dtype == torch.float32
    assert all(v.isfinite() for v in (*out.losses.values(), *out.stats.values()))
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_random_layers_repeat_with_the_seed():
    model = model_of()
    totals = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        totals.append(model(batch()).total.item())
    assert totals[0] == totals[1] != totals[2]


def test_deployed_model_finds_the_same():
    model = model_of()
    with torch.no_grad():
        model(batch())
        model.eval()
        boxes, scores = model.decode(batch().images)
        deployed_boxes, deployed_scores = deploy(model).decode(batch().images)
    torch.testing.assert_close(deployed_boxes, boxes, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(deployed_scores, scores, rtol=1e-4, atol=1e-4)
