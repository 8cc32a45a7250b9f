"""Megvii's files load strictly into all seven models; parameter and group counts are the recipe's."""

import json

import pytest
import torch
from shared import SHARED, needs_shared
from yolox_reference import SIZES, published_names, reference_state

from mmdet.core.checkpoint import load_backbone, load_pretrained
from mmdet.core.optim import group_parameters
from mmdet.exp import get_exp
from mmdet.families.yolox.compat import LOAD_RULES

MODELS = pytest.mark.parametrize("name", SIZES)

# design/recipes.md, 3.1
PARAMETERS = {
    "yolox_nano": 912_159,
    "yolox_tiny": 5_055_855,
    "yolox_s": 8_968_255,
    "yolox_m": 25_326_495,
    "yolox_l": 54_208_895,
    "yolox_x": 99_071_455,
    "yolov3": 63_724_767,
}


def empty_model(name, **fields):
    """A model without memory: names and shapes only."""
    exp = get_exp(name, fields)
    with torch.device("meta"):
        return exp, exp.get_model()


@MODELS
def test_parameter_count(name):
    assert sum(p.numel() for p in empty_model(name)[1].parameters()) == PARAMETERS[name]


@needs_shared
@MODELS
def test_published_names_load_strictly(name):
    state = {key: torch.empty(shape, device="meta") for key, shape, _ in published_names(name)}
    _, model = empty_model(name)
    report = load_pretrained(model, {"model": state, "start_epoch": 300}, strict=True)
    assert not (report.missing or report.unexpected or report.reinitialized)
    assert set(report.loaded) == set(model.state_dict()) and len(report.loaded) == len(state)


@needs_shared
@MODELS
def test_parameter_groups(name):
    exp, model = empty_model(name)
    groups = group_parameters(model, exp.param_rules())
    reference = json.loads((SHARED / "golden/pure/optim_groups.yolox.json").read_text())[name]
    found = [(len(group), sum(p.numel() for p in group)) for group in groups.values()]
    assert found == [(group["n_tensors"], group["n_elements"]) for group in reference]
    optimizer = exp.get_optimizer(model)
    for ours, theirs in zip(optimizer.param_groups, reference, strict=True):
        assert all(ours[key] == theirs[key] for key in ("weight_decay", "momentum", "nesterov"))


@needs_shared
def test_values_arrive():
    state = reference_state("yolox_nano")
    model = get_exp("yolox_nano").get_model()
    load_pretrained(model, {f"module.{k}": v for k, v in state.items()}, strict=True)
    own = model.state_dict()
    pairs = {"backbone.backbone.dark5.1.conv2": "backbone.dark5.1.conv2", "backbone.C3_p4.conv3": "neck.C3_p4.conv3"}
    for theirs, ours in {**pairs, "head.stems.1": "head.stems.1"}.items():
        assert torch.equal(own[f"{ours}.conv.weight"], state[f"{theirs}.conv.weight"])


@needs_shared
def test_a_backbone_alone_loads():
    state = {k: v for k, v in reference_state("yolox_nano").items() if k.startswith("backbone.backbone.")}
    model = get_exp("yolox_nano").get_model()
    report = load_backbone(model, state)
    assert len(report.loaded) == len(state) and not report.missing


def test_own_names_are_not_taken_for_a_foreign_layout():
    keys = empty_model("yolox_s")[1].state_dict().keys()
    assert not any(layout.matches(keys) for layout in LOAD_RULES.layouts)


@needs_shared
def test_the_real_checkpoint_keeps_all_but_the_class_layers():
    exp = get_exp("yolox_nano", {"num_classes": 3, "class_names": ("Platelets", "RBC", "WBC")})
    model = exp.get_model()
    report = exp.load_pretrained(model, SHARED / "data/yolox_nano/yolox_nano_coco.pth")
    assert len(report.loaded) == 636 and not report.missing and not report.unexpected
    assert sorted(report.reinitialized) == sorted(f"head.cls_preds.{i}.{kind}" for i in range(3) for kind in ("weight", "bias"))
    assert "636 tensors loaded, 6 re-initialised" in report.summary()
    torch.testing.assert_close(model.head.cls_preds[0].bias, torch.full((3,), -4.59512))


@needs_shared
def test_class_rows_are_matched_by_name():
    exp = get_exp("yolox_nano", {"num_classes": 3, "class_names": ("zebra", "cell", "person")})
    model, path = exp.get_model(), SHARED / "data/yolox_nano/yolox_nano_coco.pth"
    exp.load_pretrained(model, path)
    state = torch.load(path, weights_only=True)["model"]
    rows = state["head.cls_preds.2.weight"]
    assert torch.equal(model.head.cls_preds[2].weight[2], rows[0]) and torch.equal(model.head.cls_preds[2].weight[0], rows[22])
