"""Published layouts load strictly into all eight models; parameter counts are the recipe's."""

import pytest
import torch
from shared import needs_shared

from mmdet.core.checkpoint import load_pretrained
from mmdet.families.ppyoloe.compat import LOAD_RULES, torch_name

MODELS = pytest.mark.parametrize(("size", "plus"), [(s, p) for p in (False, True) for s in "smlx"])

# design/recipes.md, 3.2; the 17 bins of ``proj`` are counted there and are no parameter here
PARAMETERS = {
    ("s", False): 8_084_605,
    ("m", False): 24_134_909,
    ("l", False): 54_078_573,
    ("x", False): 102_331_501,
    ("s", True): 8_084_611,
    ("m", True): 24_134_921,
    ("l", True): 54_078_591,
    ("x", True): 102_331_525,
}


def published(size, plus):
    return f"ppyoloe_{'plus_' if plus else ''}crn_{size}"


@pytest.fixture
def empty_model(ppyoloe_exp):
    """A model without memory: names and shapes only."""

    def make(size, plus):
        with torch.device("meta"):
            return ppyoloe_exp(size, plus).get_model()

    return make


@MODELS
def test_parameter_count(size, plus, empty_model):
    assert sum(p.numel() for p in empty_model(size, plus).parameters()) + 17 == PARAMETERS[size, plus]


@needs_shared
@MODELS
@pytest.mark.parametrize("peer", ["miemie", "paddledet"])
def test_published_names_load_strictly(size, plus, peer, empty_model, names_file):
    file = names_file(f"{published(size, plus)}.{peer}")
    state = {name: torch.empty(shape, device="meta") for name, shape, _ in file["names"]}
    model = empty_model(size, plus)
    report = load_pretrained(model, state, strict=True)
    assert not (report.missing or report.unexpected or report.reinitialized)
    counters = {name for name in model.state_dict() if name.endswith("num_batches_tracked")}
    assert set(report.loaded) | counters == set(model.state_dict())


@needs_shared
@MODELS
def test_paddle_names_follow_the_published_map(size, plus, names_file):
    for paddle, torch_style in names_file(f"{published(size, plus)}.map")["map"]:
        assert torch_name(paddle) == torch_style


@needs_shared
def test_values_arrive(reference_state, ppyoloe_exp):
    state = reference_state("ppyoloe_plus_crn_s")
    model = ppyoloe_exp("s", True).get_model()
    load_pretrained(model, {"model": {f"module.{k}": v for k, v in state.items()}}, strict=True)
    own = model.state_dict()
    for name, value in state.items():
        ours = name.replace("yolo_head.", "head.")
        assert ours not in own or torch.equal(own[ours], value)


def test_own_names_are_not_taken_for_a_foreign_layout(ppyoloe_exp):
    keys = ppyoloe_exp().get_model().state_dict().keys()
    assert not any(layout.matches(keys) for layout in LOAD_RULES.layouts)


def test_other_class_count_keeps_all_but_the_class_layers(ppyoloe_exp):
    source = ppyoloe_exp(num_classes=80).get_model()
    model = ppyoloe_exp(num_classes=3).get_model()
    report = load_pretrained(model, source.state_dict())
    assert sorted(report.reinitialized) == sorted(f"head.pred_cls.{i}.{kind}" for i in range(3) for kind in ("weight", "bias"))
    torch.testing.assert_close(model.head.pred_cls[0].bias, torch.full((3,), -4.59512))
