"""The eight shipped experiments and what their fields do."""

from pathlib import Path

import pytest
import torch

from mmdet.core.optim import group_parameters
from mmdet.errors import UsageError
from mmdet.exp import get_exp

EXPS = Path(__file__).parents[2] / "exps"
NAMES = [f"ppyoloe_{plus}{size}" for plus in ("", "plus_") for size in "smlx"]
# design/recipes.md, 3.2
BACKBONE_OUT = {"s": (128, 256, 512), "m": (192, 384, 768), "l": (256, 512, 1024), "x": (320, 640, 1280)}
NECK_OUT = {"s": (384, 192, 96), "m": (576, 288, 144), "l": (768, 384, 192), "x": (960, 480, 240)}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files(name):
    exp = get_exp(EXPS / f"{name}.py")
    with torch.device("meta"):
        model = exp.get_model()
    assert model.backbone.out_channels == BACKBONE_OUT[name[-1]]
    assert model.neck.out_channels == NECK_OUT[name[-1]]
    plus = "plus" in name
    assert exp.plus is plus
    assert (exp.max_epoch, exp.static_assigner_epoch) == ((80, 30) if plus else (300, 100))
    assert exp.learning_rate == pytest.approx(0.001 if plus else 0.01)
    assert exp.train_sizes()[0] == (320, 320)
    assert exp.train_sizes()[-1] == (768, 768)
    assert len(exp.train_sizes()) == 15
    lines = (EXPS / f"{name}.py").read_text().splitlines()
    assert 5 <= len(lines) <= 25
    text = "\n".join(lines)
    assert f"-f exps/{name}.py" in text
    assert "configs/ppyoloe/" in text
    assert "AP to expect" in text


def test_schedule_of_the_recipe():
    factor = get_exp(EXPS / "ppyoloe_s.py").get_lr_schedule(100)
    assert factor(0) == 0
    assert factor(250) == pytest.approx(0.5)
    assert factor(500) == 1
    assert factor(5 * 100 + (360 - 5) * 50) == pytest.approx(0.5)  # half way to epoch 360
    assert 0 < factor(300 * 100 - 1) < 0.1


def test_only_norms_are_spared_from_decay(ppyoloe_exp):
    exp = ppyoloe_exp("s", True)
    with torch.device("meta"):
        groups = group_parameters(exp.get_model(), exp.param_rules())
    assert len(groups["norm"]) == 156
    assert {group["name"]: group["weight_decay"] for group in exp.get_optimizer(exp.get_model()).param_groups} == {
        "norm": 0.0,
        "rest": 5e-4,
    }


def test_fields_reach_the_parts(ppyoloe_exp):
    exp = ppyoloe_exp(
        num_classes=3,
        static_assigner_epoch=7,
        nms_threshold=0.4,
        keep_top_k=11,
        nms_type="argmax",
        class_loss="focal",
        weight_iou=3.0,
    )
    model = exp.get_model()
    assert model.head.num_classes == model.criterion.num_classes == 3
    assert (model.criterion.static_assigner_epoch, model.criterion.class_loss, model.criterion.weight_iou) == (7, "focal", 3.0)
    assert (model.postprocess.nms_threshold, model.postprocess.keep_top_k, model.postprocess.multi_label) == (0.4, 11, False)
    plus = ppyoloe_exp(plus=True).get_model()
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert plus.normalize(white).flatten().tolist() == pytest.approx([1, 1, 1])
    assert model.normalize(white).flatten().tolist() == pytest.approx([2.2489, 2.4286, 2.64], abs=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("depth=0", "depth=0.0 .*a positive number"),
        ("flip_prob=1.5", "flip_prob=1.5 .*a probability"),
        ("static_assigner_epoch=-1", "0 or more"),
        ("class_loss=bce", "varifocal | focal"),
        ("static_asigner_epoch=3", "Did you mean 'static_assigner_epoch'"),
    ],
)
def test_values_that_cannot_work_stop(override, message):
    with pytest.raises(UsageError, match=message):
        get_exp(EXPS / "ppyoloe_s.py", [override])


def test_demo_settings_are_fields():
    exp = get_exp(EXPS / "ppyoloe_s.py")
    for name, value in exp.demo_settings().items():
        exp.set(name, value, "test")
    exp.validate()
    assert 0 < exp.static_assigner_epoch < exp.max_epoch
