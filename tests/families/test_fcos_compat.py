"""Published FCOS layouts load strictly; parameter counts are the recipe's; torchvision's detector gives the same boxes here."""

import pytest
import torch
from shared import needs_shared
from torchvision.models import resnet50
from torchvision.models.detection import fcos_resnet50_fpn

from mmdet.core.checkpoint import load_backbone, load_pretrained
from mmdet.core.freeze import apply_frozen
from mmdet.data.coco_names import COCO_NAMES
from mmdet.errors import CheckpointError
from mmdet.exp import get_exp
from mmdet.families.fcos.compat import LOAD_RULES, our_name

PUBLISHED = {
    "fcos_r50": "fcos_r50_fpn.paddledet",
    "fcos_r50_ms2x": "fcos_r50_fpn_2x.miemie",
    "fcos_r50_iou": "fcos_r50_fpn_iou.paddledet",
    "fcos_dcn_r50": "fcos_dcn_r50_fpn.paddledet",
    "fcos_rt_r50": "fcos_rt_r50_fpn_4x.miemie",
}
EXPS = pytest.mark.parametrize("name", PUBLISHED)
# design/recipes.md, 3.4, and the names files (without statistics of norms)
PARAMETERS = {
    "fcos_r50": 32_297_370,
    "fcos_r50_ms2x": 32_297_370,
    "fcos_r50_iou": 32_297_370,
    "fcos_dcn_r50": 33_666_513,
    "fcos_rt_r50": 31_117_208,
}


def empty_model(name, *words):
    """Names and shapes only."""
    with torch.device("meta"):
        return get_exp(name, words).get_model()


@EXPS
def test_parameter_count(name):
    assert sum(p.numel() for p in empty_model(name).parameters()) == PARAMETERS[name]


@needs_shared
@EXPS
def test_published_names_load_strictly(name, names_file):
    state = {key: torch.empty(shape) for key, shape, _ in names_file(PUBLISHED[name])["names"]}
    model = get_exp(name).get_model()
    report = load_pretrained(model, state, strict=True)
    counters = {key for key in model.state_dict() if key.endswith("num_batches_tracked")}
    assert set(report.loaded) | counters == set(model.state_dict())


@needs_shared
@EXPS
def test_what_is_trained_is_what_the_reference_trains(name, names_file):
    """The names file lists what has no learning rate; in ours that is made so, or frozen by the exp's patterns."""
    exp, file = get_exp(name), names_file(PUBLISHED[name])
    model = exp.get_model()
    apply_frozen(model, exp.frozen(0))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == file["n_trainable"]
    assert sum(not p.requires_grad for p in model.parameters()) == len(file["not_trainable"])


@needs_shared
@pytest.mark.parametrize("name", ["fcos_r50", "fcos_dcn_r50"])
def test_parameter_groups_are_the_references(name, names_file):
    """Learning-rate factors and weight decay of every parameter that PaddleDetection trains."""
    exp, file = get_exp(name), names_file(PUBLISHED[name])
    model = exp.get_model()
    group_of = {id(p): g for g in exp.get_optimizer(model).param_groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    for theirs, _, _ in file["names"]:
        parameter = parameters.get(our_name(theirs))
        if parameter is None or theirs in file["not_trainable"]:
            continue
        group = group_of[id(parameter)]
        assert group["base_lr"] == pytest.approx(exp.learning_rate * file["lr_mult"].get(theirs, 1.0)), theirs
        assert group["weight_decay"] == (0.0 if theirs in file["no_decay"] else 1e-4), theirs


@needs_shared
def test_a_norm_without_statistics_stays_what_it_is(names_file):
    """miemiedetection's ``af`` layers: scale and shift alone."""
    torch.manual_seed(0)
    state = {key: torch.randn(shape) for key, shape, _ in names_file("fcos_r50_fpn_2x.miemie")["names"]}
    model = get_exp("fcos_r50_ms2x").get_model()
    load_pretrained(model, state, strict=True)
    x = torch.randn(2, 512, 4, 4)
    scale, shift = (state[f"backbone.stage5_1.conv2.af.{kind}"].reshape(1, -1, 1, 1) for kind in ("weight", "bias"))
    torch.testing.assert_close(model.backbone.res5.res5b.branch2b.norm(x), x * scale + shift)
    assert torch.equal(model.head.scales[0], state["head.scales_on_reg.4"])
    assert torch.equal(model.neck.lateral[0].weight, state["fpn.fpn_inner_convs.2.conv.weight"])


def perturbed(model):
    """Weights of which none is what a fresh model has, and biases that keep torchvision's distances positive."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif value.is_floating_point() and value.dim() < 2:
                value.add_(0.05 * torch.randn_like(value))
        model.head.regression_head.bbox_reg.bias.fill_(1.5)
        model.head.classification_head.cls_logits.bias.add_(torch.linspace(0, 3, 91))
    return model.eval()


def test_torchvisions_detector_gives_the_same_boxes_and_scores():
    """Its class rows are category ids; its score is the root of ours; its points are half a stride to the left and above."""
    theirs = perturbed(fcos_resnet50_fpn(weights=None, weights_backbone=None))
    model = get_exp("fcos_r50").get_model().eval()
    report = load_pretrained(model, theirs.state_dict(), class_names=COCO_NAMES, strict=True)
    assert "layout: torchvision" in report.notes
    x = torch.rand(1, 3, 128, 128)
    with torch.no_grad():
        features = list(theirs.backbone(x).values())
        out = theirs.head(features)
        boxes, scores = model.decode(x)
        points = torch.cat([grid_at_the_corner(f.shape[-2:], s) for f, s in zip(features, (8, 16, 32, 64, 128))])
        strides = torch.cat([torch.full((f.shape[-2:].numel(), 1), s) for f, s in zip(features, (8.0, 16, 32, 64, 128))])
    distances = out["bbox_regression"][0] * strides
    assert distances.min() > 0
    expected = torch.cat([points - distances[:, :2], points + distances[:, 2:]], 1)
    torch.testing.assert_close(boxes[0], expected, rtol=1e-4, atol=2e-3)
    person, toothbrush = 1, 90  # category ids of the first and the last class
    quality = out["bbox_ctrness"][0].sigmoid()
    for ours, category in ((0, person), (79, toothbrush)):
        torch.testing.assert_close(scores[0, :, ours : ours + 1], out["cls_logits"][0, :, [category]].sigmoid() * quality)


def grid_at_the_corner(size, stride):
    y, x = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    return torch.stack([x, y], -1).reshape(-1, 2).float() * stride


@pytest.mark.parametrize("name", ["fcos_r50", "fcos_rt_r50"])
def test_torchvisions_backbone_alone(name):
    theirs = resnet50(weights=None)
    model = get_exp(name).get_model()
    report = load_backbone(model, theirs.state_dict())
    assert not report.missing and sorted(report.unexpected) == ["backbone.fc.bias", "backbone.fc.weight"]
    assert torch.equal(model.backbone.res4.res4f.branch2b.conv.weight, theirs.layer3[5].conv2.weight)
    assert torch.equal(model.backbone.res2.res2a.short.norm.running_var, theirs.layer1[0].downsample[1].running_var)


@EXPS
def test_own_names_are_not_taken_for_a_foreign_layout(name):
    keys = empty_model(name).state_dict().keys()
    assert not any(layout.matches(keys) for layout in LOAD_RULES.layouts)


def test_other_class_count_keeps_all_but_the_class_layers():
    """Case C01."""
    source = get_exp("fcos_rt_r50").get_model()
    model = get_exp("fcos_rt_r50", ["num_classes=3"]).get_model()
    report = load_pretrained(model, source.state_dict())
    assert sorted(report.reinitialized) == ["head.cls_pred.bias", "head.cls_pred.weight"]
    torch.testing.assert_close(model.head.cls_pred.bias, torch.full((3,), -4.59512))
    assert torch.equal(model.head.reg_pred.weight, source.head.reg_pred.weight)


@pytest.mark.parametrize("other", ["ppyoloe_s", "yolox_nano"])
def test_another_familys_file_is_refused(other):
    """Case C02, both ways."""
    ours, theirs = get_exp("fcos_rt_r50").get_model(), get_exp(other).get_model()
    for model, source in ((ours, theirs), (theirs, ours)):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"matched \d+ of \d+ tensors"):
            load_pretrained(model, source.state_dict())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
