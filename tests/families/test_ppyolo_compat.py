"""Published layouts load strictly into all four models; fine-tuning keeps what fits; foreign files are refused."""

import pytest
import torch
from shared import needs_shared

from mmdet.core.checkpoint import load_pretrained
from mmdet.data.coco_names import COCO_NAMES
from mmdet.errors import CheckpointError
from mmdet.exp import get_exp
from mmdet.families.ppyolo.compat import load_rules, our_name

PUBLISHED = {  # our exp -> the names files, and the number of parameters (design/recipes.md, 3.3)
    "ppyolo_r18vd": ("ppyolo_r18vd", 13_135_838),
    "ppyolo_r50vd": ("ppyolo_r50vd_2x", 47_045_559),
    "ppyolov2_r50vd": ("ppyolov2_r50vd", 54_579_383),
    "ppyolov2_r101vd": ("ppyolov2_r101vd", 73_571_511),
}
MODELS = pytest.mark.parametrize("exp", PUBLISHED)


def empty_model(exp, *words):
    """A model without memory: names and shapes only."""
    with torch.device("meta"):
        return get_exp(exp, list(words)).get_model()


def small(*words):
    """A model in which only the head depends on the words."""
    torch.manual_seed(0)
    return get_exp("ppyolo_r18vd", ["return_stages=(2,3)", *words]).get_model()


@MODELS
def test_parameter_count(exp):
    assert sum(p.numel() for p in empty_model(exp).parameters()) == PUBLISHED[exp][1]


@needs_shared
@MODELS
@pytest.mark.parametrize("peer", ["miemie", "paddledet"])
def test_published_names_load_strictly(exp, peer, names_file):
    file = names_file(f"{PUBLISHED[exp][0]}.{peer}")
    state = {name: torch.empty(shape, device="meta") for name, shape, _ in file["names"]}
    model = empty_model(exp)
    report = load_pretrained(model, state, strict=True)
    assert not (report.missing or report.unexpected or report.reinitialized)
    counters = {name for name in model.state_dict() if name.endswith("num_batches_tracked")}
    assert set(report.loaded) | counters == set(model.state_dict())
    assert ("layout: miemiedetection" if peer == "miemie" else "layout: PaddleDetection") in report.notes


@needs_shared
@MODELS
def test_names_follow_the_published_map(exp, names_file):
    """The two layouts meet in the same names of ours, and every one of these exists."""
    own = set(empty_model(exp).state_dict())
    for paddle, torch_style in names_file(f"{PUBLISHED[exp][0]}.map")["map"]:
        assert our_name(paddle) == our_name(torch_style)
        assert our_name(paddle) in own


@needs_shared
def test_values_arrive(reference_state):
    state = reference_state("ppyolo_r18vd")
    model = get_exp("ppyolo_r18vd").get_model()
    load_pretrained(model, {"model": {f"module.{k}": v for k, v in state.items()}}, strict=True)
    own = model.state_dict()
    for name, value in state.items():
        assert torch.equal(own[our_name(name)], value)


@MODELS
def test_own_names_are_not_taken_for_a_foreign_layout(exp):
    keys = empty_model(exp).state_dict().keys()
    assert not any(layout.matches(keys) for layout in load_rules(3, True).layouts)
    assert all(our_name(key) == key for key in keys)


@pytest.mark.parametrize("iou_aware", [False, True])
def test_class_rows_by_name(iou_aware):
    """Channels of a level: one IoU each, then for each anchor x, y, w, h, object and the classes."""
    words = [f"iou_aware={iou_aware}"]
    source, model = small(*words), small("num_classes=3", *words)
    names = ("zebra", "not in COCO", "person")
    report = load_pretrained(model, source.state_dict(), class_names=names, default_names=COCO_NAMES)
    assert sorted(report.reinitialized) == sorted(f"head.outputs.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias"))
    fresh = small("num_classes=3", *words)
    lead = 3 * iou_aware
    for kind in ("weight", "bias"):
        theirs, ours, start = (getattr(m.head.outputs[1], kind).detach() for m in (source, model, fresh))
        assert torch.equal(ours[:lead], theirs[:lead])
        for anchor in range(3):
            block, file_block, new = (t[lead:].unflatten(0, (3, -1))[anchor] for t in (ours, theirs, start))
            assert torch.equal(block[:5], file_block[:5])
            for row, name in ((0, "zebra"), (2, "person")):
                assert torch.equal(block[5 + row], file_block[5 + COCO_NAMES.index(name)])
            assert torch.equal(block[6], new[6])
    assert torch.equal(model.neck.blocks[0].tip.conv.weight, source.neck.blocks[0].tip.conv.weight)


def test_other_class_count_without_names_keeps_all_but_the_class_layers():
    source, model = small(), small("num_classes=3")
    before = model.head.outputs[0].weight.clone()
    report = load_pretrained(model, source.state_dict())
    assert len(report.reinitialized) == 4
    assert not report.missing
    assert torch.equal(model.head.outputs[0].weight, before)


@pytest.mark.parametrize("other", ["ppyoloe_s", "fcos_rt_r50", "yolox_nano"])
def test_files_of_other_families_are_refused(other):
    """Case C02."""
    state = {name: torch.zeros(value.shape) for name, value in empty_model(other).state_dict().items()}
    with pytest.raises(CheckpointError, match=r"matched \d+ of \d+ tensors"):
        load_pretrained(small(), state)


def test_an_empty_file_is_refused():
    with pytest.raises(CheckpointError, match="0 of 0"):
        load_pretrained(small(), {})
