"""Case C02: no family fine-tunes from another one's file, also where both share a backbone."""

import pytest

from mmdet.core import load_pretrained
from mmdet.errors import CheckpointError
from mmdet.exp import get_exp

NAMES = ("ppyoloe_s", "yolox_nano", "ppyolo_r50vd", "fcos_r50")


@pytest.fixture(scope="module")
def models():
    return {name: get_exp(name).get_model() for name in NAMES}


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_only_the_own_family_is_accepted(models, source, target):
    state = models[source].state_dict()
    if source == target:
        report = load_pretrained(models[target], state, strict=True)
        assert len(report.loaded) == len(state)
        return
    before = {k: v.clone() for k, v in list(models[target].state_dict().items())[:5]}
    with pytest.raises(CheckpointError, match=r"matched \d+ of \d+ tensors.*no checkpoint of this model"):
        load_pretrained(models[target], state)
    assert all((models[target].state_dict()[k] == v).all() for k, v in before.items())
