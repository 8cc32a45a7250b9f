"""FCOS equals the reference implementations: features, decoded boxes, losses, assignments, gradients, suppression."""

import json

import numpy as np
import pytest
import torch
from shared import SHARED, name_seeded, needs_shared

from mmdet.core.checkpoint import load_pretrained
from mmdet.data.structures import Batch, Targets
from mmdet.exp import get_exp
from mmdet.families.fcos.compat import MIEMIE, our_name, renamed

pytestmark = needs_shared

# exp, golden name, whose; PaddleDetection's golden is compared too, because it alone has the ReLU before P7
MODELS = pytest.mark.parametrize(
    ("exp_name", "name", "peer"),
    [("fcos_r50", "fcos_r50_fpn", "paddledet"), ("fcos_r50_ms2x", "fcos_r50_fpn_2x", "miemie")],
    ids=["paddledet", "miemie"],
)
CASE = pytest.mark.parametrize("case", ["A", "B", "C"])
SIZE = 256


@pytest.fixture(scope="module")
def images():
    return torch.from_numpy(name_seeded().image((2, 3, SIZE, SIZE), seed=0))


@pytest.fixture(scope="module")
def reference():
    """``make(exp_name, name, peer)``: the shipped model with the reference's weights, made once."""
    made = {}

    def make(exp_name, name, peer):
        if name not in made:
            model = get_exp(exp_name).get_model()
            state = {}
            for key, shape, _ in json.loads((SHARED / f"golden/names/{name}.{peer}.json").read_text())["names"]:
                values = name_seeded().fill(key.replace("._mean", ".running_mean").replace("._variance", ".running_var"), shape)
                state[key] = torch.from_numpy(np.array(values).reshape(shape))
            load_pretrained(model, state, strict=True)
            made[name] = model
        return made[name]

    return make


def our(name, peer):
    """Our name of a reference's parameter; miemiedetection counts the levels from the coarsest."""
    ours = our_name(name) if peer == "paddledet" else renamed(name, MIEMIE)
    return f"head.scales.{4 - int(ours[-1])}" if "scales_on_reg" in ours else ours


def fine_first(values, sizes, peer):
    """Values (B, A, ...) over the levels in our order."""
    if peer == "paddledet":
        return values
    return np.concatenate(np.split(values, np.cumsum(sizes[::-1])[:-1], axis=1)[::-1], 1)


def stored(tensor, described):
    """What the golden file keeps of a tensor."""
    stride = described["flat_stride"]
    return tensor.numpy() if stride == 1 else tensor.flatten()[::stride].numpy()


def described(name, peer):
    return json.loads((SHARED / f"golden/fcos/{name}.eval.{peer}.json").read_text())["arrays"]


@MODELS
@CASE
def test_training(exp_name, name, peer, case, reference, images, golden):
    model = reference(exp_name, name, peer).train()
    arrays, scalars, facts = golden(f"fcos/{name}.train.{peer}")
    truth = facts["gt"][case]
    boxes = [np.asarray(b, np.float32).reshape(-1, 4) * (SIZE / 160) for b in truth["boxes"]]
    batch = Batch(images, Targets.from_lists(boxes, truth["classes"]))
    model.zero_grad()
    predictions = model.predict(batch.images)
    out = model.criterion(predictions, batch)
    out.total.backward()
    if case == "C":  # both references give infinity and NaN here
        assert torch.isfinite(out.total) and out.losses["loss_cls"] > 0
        assert out.losses["loss_box"] == out.losses["loss_ctn"] == 0
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
        return
    losses = scalars[case]["losses"]
    centerness = losses["loss_quality" if peer == "paddledet" else "loss_centerness"]
    for ours, theirs in (("loss_cls", losses["loss_cls"]), ("loss_box", losses["loss_box"]), ("loss_ctn", centerness)):
        assert out.losses[ours].item() == pytest.approx(theirs, rel=1e-5), ours
    parameters = dict(model.named_parameters())
    for theirs, norm in scalars[case]["grad_l2"].items():
        assert parameters[our(theirs, peer)].grad.norm().item() == pytest.approx(norm, rel=1e-3, abs=1e-9), theirs
    check_assignment(model.criterion.assign(predictions, batch), predictions, batch.targets, arrays, scalars[case], case)


def check_assignment(assigned, predictions, targets, arrays, scalars, case):
    """Both references number the levels of their targets from the finest; a label there is the class plus one."""
    start = 0
    for level, size in enumerate(predictions.level_sizes):
        part = slice(start, start + size)
        start += size
        image, point = assigned.positive[:, part].nonzero(as_tuple=True)
        assert len(image) == scalars["n_pos"][level]
        if not len(image):
            continue
        row, column = arrays[f"{case}_pos_index_{level}"][:, 1:].T
        np.testing.assert_array_equal(image, arrays[f"{case}_pos_index_{level}"][:, 0])
        np.testing.assert_array_equal(point, row * round(size**0.5) + column)
        box = assigned.box_index[:, part][image, point]
        np.testing.assert_array_equal(targets.labels[image, box] + 1, arrays[f"{case}_pos_label_{level}"])
        here, stride = predictions.points[part][point], predictions.strides[part][point]
        boxes = targets.boxes[image, box]
        distances = torch.cat([here - boxes[:, :2], boxes[:, 2:] - here], 1) / stride
        np.testing.assert_allclose(distances, arrays[f"{case}_pos_reg_{level}"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(assigned.scores[:, part][image, point], arrays[f"{case}_pos_ctn_{level}"], rtol=1e-5)


@MODELS
def test_evaluation(exp_name, name, peer, reference, images, golden):
    model = reference(exp_name, name, peer).eval()
    arrays, _, _ = golden(f"fcos/{name}.eval.{peer}")
    about = described(name, peer)
    with torch.no_grad():
        maps = model.backbone(images[:1])
        levels = model.neck(maps)
        predictions = model.head(levels)
        boxes, scores = model.head.decode(predictions)
    sizes = predictions.level_sizes
    for i, x in enumerate(maps):
        expected = arrays[f"backbone_{i}"]
        np.testing.assert_allclose(stored(x, about[f"backbone_{i}"]), expected, atol=1e-5 * np.abs(expected).max())
    for i, x in enumerate(levels if peer == "paddledet" else levels[::-1]):
        expected = arrays[f"fpn_{i}"]
        np.testing.assert_allclose(stored(x, about[f"fpn_{i}"]), expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(boxes, fine_first(arrays["boxes"], sizes, peer), atol=1e-3)
    # Of the scores every second value is stored; 80 classes are an even number, so each point keeps the even classes.
    expected = arrays["scores"].reshape(1, -1, 40)
    np.testing.assert_allclose(scores[..., ::2], fine_first(expected, sizes, peer), atol=1e-5)


def test_suppression(reference, images, golden):
    """The shipped settings give PaddleDetection's 100 detections."""
    model = reference("fcos_r50", "fcos_r50_fpn", "paddledet").eval()
    arrays, _, _ = golden("fcos/fcos_r50_fpn.eval.paddledet")
    with torch.no_grad():
        found = model(Batch(images[:1]))[0]
    rows = torch.cat([found.labels[:, None].float(), found.scores[:, None], found.boxes], 1).numpy()
    expected = arrays["nms_out"]
    assert rows.shape == expected.shape
    np.testing.assert_allclose(np.sort(rows[:, 1]), np.sort(expected[:, 1]), atol=1e-5)
    for row in rows:
        nearest = np.abs(expected - row).max(1).min()
        assert nearest < 1e-2, row


def test_matrix_nms_survives_boxes_without_area(reference, images, golden):
    """The reference's whole result is one row of -1 here."""
    arrays, _, _ = golden("fcos/fcos_r50_fpn_2x.eval.miemie")
    model = reference("fcos_r50_ms2x", "fcos_r50_fpn_2x", "miemie").eval()
    with torch.no_grad():
        found = model(Batch(images[:1]))[0]
    assert (arrays["nms_out"] == -1).all() and len(found) == 100 and torch.isfinite(found.boxes).all()
