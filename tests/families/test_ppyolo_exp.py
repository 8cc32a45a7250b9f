"""The four shipped experiments and what their fields do."""

import json
from pathlib import Path

import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.core.optim import group_parameters
from mmdet.data.mixup import MixUp
from mmdet.data.transforms import load_sample
from mmdet.errors import UsageError
from mmdet.exp import get_exp
from mmdet.families.ppyolo.layers import CoordConv, DropBlock
from mmdet.models.matrix_nms import MatrixNMS
from mmdet.models.postprocess import MulticlassNMS

EXPS = Path(__file__).parents[2] / "exps"
# design/recipes.md, 3.3: epochs, milestones, learning rate, total batch, smallest and largest training side, test side
RECIPES = {
    "ppyolo_r18vd": (270, (162, 216), 0.004, 128, 320, 608, 512),
    "ppyolo_r50vd": (811, (649, 730), 0.01, 192, 320, 608, 608),
    "ppyolov2_r50vd": (365, (243,), 0.005, 96, 320, 768, 640),
    "ppyolov2_r101vd": (365, (243,), 0.005, 96, 320, 768, 640),
}
NAMES = pytest.mark.parametrize("name", RECIPES)


def built(name, *words):
    with torch.device("meta"):
        return get_exp(name, list(words)).get_model()


@NAMES
def test_shipped_files(name):
    exp = get_exp(EXPS / f"{name}.py")
    epochs, milestones, rate, batch, low, high, side = RECIPES[name]
    assert (exp.max_epoch, exp.milestones, exp.batch_size) == (epochs, milestones, batch)
    assert exp.learning_rate == pytest.approx(rate)
    sizes = exp.train_sizes()
    assert (sizes[0], sizes[-1], len(sizes)) == ((low, low), (high, high), (high - low) // 32 + 1)
    assert exp.test_size == (side, side)
    assert (exp.ema_decay, exp.ema_decay_type, exp.weight_decay, exp.momentum) == (0.9998, "threshold", 5e-4, 0.9)
    text = (EXPS / f"{name}.py").read_text()
    assert 5 <= text.count("\n") <= 25
    assert f"-f exps/{name}.py" in text
    assert "configs/ppyolo/" in text
    assert "AP to expect" in text


@NAMES
def test_networks(name):
    model = built(name)
    light, v2 = name.endswith("r18vd"), "v2" in name
    assert model.backbone.out_channels == ((256, 512) if light else (512, 1024, 2048))
    assert model.neck.out_channels == ((512, 256) if light else (1024, 512, 256))
    assert [o.out_channels for o in model.head.outputs] == ([255] * 2 if light else [258] * 3)
    assert model.head.anchors.strides == ((32, 16) if light else (32, 16, 8))
    assert model.head.iou_aware is model.criterion.iou_aware is not light
    assert model.head.iou_aware_factor == (0.5 if v2 else 0.4)
    drops = [m for m in model.neck.modules() if isinstance(m, DropBlock)]
    assert len(drops) == (2 if light else 5 if v2 else 3)
    assert {(m.block_size, m.keep_prob) for m in drops} == {(3, 0.9)}
    coords = sum(isinstance(m, CoordConv) for m in model.modules())
    assert coords == (12 if name == "ppyolo_r50vd" else 0)
    offsets = [n for n, _ in model.named_parameters() if n.endswith("conv_offset.weight")]
    assert offsets == ([] if light else [f"backbone.res5.res5{b}.branch2b.conv_offset.weight" for b in "abc"])
    assert isinstance(model.postprocess, MatrixNMS)


@needs_shared
@pytest.mark.parametrize(
    ("name", "curve"), [("ppyolo_r50vd", "E=811 ms=[649,730]"), ("ppyolov2_r50vd", "warm_piecewisedecay lr=.005 E=365")]
)
def test_schedule_of_the_reference(name, curve):
    curves = json.loads((SHARED / "golden/pure/lr.miemie.json").read_text())["scalars"]
    (points,) = (values for title, values in curves.items() if curve in title)
    exp = get_exp(name)
    factor = exp.get_lr_schedule(100)
    for step, rate in points:
        assert factor(step) * exp.learning_rate == pytest.approx(rate, abs=1e-9), step


@needs_shared
@pytest.mark.parametrize(
    ("name", "published"),
    [("ppyolo_r18vd", "ppyolo_r18vd"), ("ppyolo_r50vd", "ppyolo_r50vd_2x"), ("ppyolov2_r50vd", "ppyolov2_r50vd")],
)
def test_parameter_groups_of_the_reference(name, published):
    """Norms and the head's biases do not decay, the biases of ``conv_offset`` do; every learning rate is the same."""
    spared, decaying = json.loads((SHARED / "golden/pure/optim_groups.miemie.json").read_text())[published]
    exp = get_exp(name)
    with torch.device("meta"):
        model = exp.get_model()
    groups = group_parameters(model, exp.param_rules())
    counted = [*groups["norm"], *groups["output_bias"]]
    assert (len(counted), sum(p.numel() for p in counted)) == (spared["n_tensors"], spared["n_elements"])
    assert len(groups["rest"]) == decaying["n_tensors"]
    assert sum(p.numel() for p in groups["rest"]) == decaying["n_elements"]
    rest = {id(p) for p in groups["rest"]}
    biases = [n for n, p in model.named_parameters() if n.endswith("conv_offset.bias") and id(p) in rest]
    assert biases == decaying["biases_of_convs"]
    settings = {g["name"]: (g["weight_decay"], g["lr"]) for g in exp.get_optimizer(model).param_groups}
    rate = exp.learning_rate
    assert settings == {"norm": (0, rate), "output_bias": (0, rate), "rest": (5e-4, rate)}


def test_fields_reach_the_parts():
    model = get_exp(
        "ppyolo_r18vd",
        [
            "num_classes=3",
            "nms_top_k=7",
            "keep_top_k=11",
            "score_threshold=0.2",
            "post_threshold=0.1",
            "keep_prob=0.5",
            "drop_block_size=5",
            "ignore_threshold=0.6",
            "weight_iou=3",
            "weight_iou_aware=2",
            "iou_aware=True",
            "iou_aware_factor=0.3",
            "scale_x_y=1.2",
            "assign_bytes=1000",
        ],
    ).get_model()
    nms, head, loss = model.postprocess, model.head, model.criterion
    assert (nms.nms_top_k, nms.keep_top_k, nms.score_threshold, nms.post_threshold) == (7, 11, 0.2, 0.1)
    assert {(m.keep_prob, m.block_size) for m in model.modules() if isinstance(m, DropBlock)} == {(0.5, 5)}
    assert (loss.ignore_threshold, loss.weight_iou, loss.weight_iou_aware, loss.assign_bytes) == (0.6, 3, 2, 1000)
    assert (head.iou_aware, head.iou_aware_factor, head.scale_x_y, loss.scale_x_y) == (True, 0.3, 1.2, 1.2)
    assert head.num_classes == loss.num_classes == 3
    assert [o.out_channels for o in head.outputs] == [27, 27]
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert model.normalize(white).flatten().tolist() == pytest.approx([2.2489, 2.4286, 2.64], abs=1e-4)


@pytest.mark.parametrize(("kind", "multi_label"), [("multilabel", True), ("argmax", False)])
def test_greedy_suppression_is_selectable(kind, multi_label):
    nms = built("ppyolo_r18vd", f"nms_type={kind}", "nms_threshold=0.45").postprocess
    assert isinstance(nms, MulticlassNMS)
    assert (nms.nms_threshold, nms.multi_label, nms.score_threshold) == (0.45, multi_label, 0.01)


def test_newer_grid_is_selectable():
    spans = {m.span for m in built("ppyolo_r50vd", "coord_grid=half").modules() if isinstance(m, CoordConv)}
    assert spans == {0.5}


def test_training_pipeline():
    pipeline = get_exp("ppyolo_r50vd", ["no_aug_epochs=11", "mixup_beta=(1,2)", "flip_prob=0.25"]).train_pipeline()
    assert isinstance(pipeline.load, MixUp)
    assert (pipeline.load.alpha, pipeline.load.beta, pipeline.load.last_epochs_from) == (1, 2, 800)
    assert (pipeline.flip_prob, pipeline.expand_prob, pipeline.random_interpolation) == (0.25, 0.5, True)
    assert pipeline.crop is not None
    assert get_exp("ppyolo_r50vd", ["mixup=False"]).train_pipeline().load is load_sample


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("depth=20", "depth=20 .*18, 34, 50 or 101"),
        ("anchor_masks=((0,1,2),(3,4,5),(6,7,7))", "anchor_masks=.*each anchor once"),
        ("anchor_masks=((0,1,2),(3,4,5))", "anchor_masks=.*one for each of return_stages"),
        ("return_stages=(4,3,5)", "return_stages=.*ascending numbers from 2 to 5"),
        ("deform_stages=(6,)", "deform_stages=.*some of 2, 3, 4, 5"),
        ("anchors=((0,5),)", "anchors=.*positive sides"),
        ("keep_prob=0", "keep_prob=0.0 .*a share"),
        ("drop_block_size=2", "an odd number"),
        ("milestones=(7,3)", "milestones=.*ascending"),
        ("mixup_beta=(1,0)", "mixup_beta=.*two positive numbers"),
        ("nms_type=soft", "matrix | multilabel | argmax"),
        ("iou_aware_factr=0.1", "Did you mean 'iou_aware_factor'"),
    ],
)
def test_values_that_cannot_work_stop(override, message):
    with pytest.raises(UsageError, match=message):
        get_exp("ppyolo_r50vd", [override])


def test_the_pan_needs_two_pairs():
    with pytest.raises(UsageError, match="neck_pairs=1 .*with the PAN at least 2"):
        get_exp("ppyolov2_r50vd", ["neck_pairs=1"])


@NAMES
def test_demo_settings_are_fields_and_keep_the_architecture(name):
    exp, shipped = get_exp(name), built(name)
    for field, value in exp.demo_settings().items():
        exp.set(field, value, "test")
    exp.validate()
    assert exp.milestones[-1] < exp.max_epoch
    with torch.device("meta"):
        model = exp.get_model()
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in shipped.named_parameters()]
