"""All eight models from real ``.pdparams`` files: a pickle of arrays under PaddleDetection's names."""

import json
import pickle

import numpy as np
import pytest
import torch
from shared import SHARED, name_seeded, needs_shared

from mmdet.core.checkpoint import load_backbone, load_pretrained
from mmdet.families.ppyoloe.compat import our_name

pytestmark = needs_shared

SIZES = [(s, p) if s in "sm" else pytest.param(s, p, marks=pytest.mark.slow) for p in (False, True) for s in "smlx"]


@pytest.fixture
def published(tmp_path):
    """``write("ppyoloe_crn_s") -> (path, values by torch-style name)``: the file as PaddleDetection would publish it."""

    def write(name, only="", protocol=2):
        names = SHARED / "golden/names"
        torch_names = dict(json.loads((names / f"{name}.map.json").read_text())["map"])
        content, values = {}, {}
        for paddle, shape, _ in json.loads((names / f"{name}.paddledet.json").read_text())["names"]:
            array = name_seeded().fill(torch_names[paddle], shape)
            array = np.zeros(shape, np.float32) if array is None else array.reshape(shape)
            values[torch_names[paddle]] = array
            if paddle.startswith(only):
                content[paddle.removeprefix(only)] = array
        content["StructuredToParameterName@@"] = {key: f"param_{i}" for i, key in enumerate(content)}
        path = tmp_path / f"{name}.pdparams"
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        return path, values

    return write


@pytest.mark.parametrize(("size", "plus"), SIZES)
def test_published_files_load_strictly(size, plus, published, ppyoloe_exp):
    path, values = published(f"ppyoloe_{'plus_' if plus else ''}crn_{size}")
    model = ppyoloe_exp(size, plus).get_model()
    report = load_pretrained(model, path, strict=True)
    assert not (report.missing or report.unexpected or report.reinitialized) and "layout: PaddleDetection" in str(report)
    own = model.state_dict()
    placed = {our_name(name): value for name, value in values.items() if our_name(name) in own}
    assert set(placed) == set(report.loaded)
    assert all(np.array_equal(own[name].numpy(), value) for name, value in placed.items())


@pytest.mark.parametrize("plus", [False, True])
def test_they_give_the_golden_values(plus, published, ppyoloe_exp, reference_images, golden):
    name = f"ppyoloe_{'plus_' if plus else ''}crn_s"
    model = ppyoloe_exp("s", plus).get_model()
    load_pretrained(model, published(name, protocol=4)[0], strict=True)
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train().predict(reference_images)
        boxes, scores = model.eval().decode(reference_images[:1])
    arrays, _, _ = golden(f"ppyoloe/{name}.eval.paddledet")
    np.testing.assert_allclose(boxes, arrays["boxes"], atol=3e-2)
    np.testing.assert_allclose(scores, arrays["scores"], atol=1e-4)


@pytest.mark.parametrize("plus", [False, True])
def test_a_backbone_file_without_its_prefix(plus, published, ppyoloe_exp):
    path, values = published(f"ppyoloe_{'plus_' if plus else ''}crn_s", only="backbone.")
    model = ppyoloe_exp("s", plus, num_classes=3).get_model()
    head = model.head.pred_reg[0].bias.clone()
    report = load_backbone(model, path)
    own = model.state_dict()
    assert not report.missing + report.unexpected + report.reinitialized and len(report.loaded) > 100
    assert all(np.array_equal(own[n].numpy(), v) for n, v in values.items() if n.startswith("backbone."))
    assert torch.equal(model.head.pred_reg[0].bias, head)
