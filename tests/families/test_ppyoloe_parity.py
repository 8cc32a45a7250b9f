"""PP-YOLOE-s and PP-YOLOE+-s equal the reference implementations: decoded boxes, losses, assignments, gradients."""

import numpy as np
import pytest
import torch
from shared import needs_shared

from mmdet.data.structures import Batch, Targets
from mmdet.families.ppyoloe.compat import our_name

pytestmark = needs_shared

PLUS = pytest.mark.parametrize("plus", [False, True], ids=["ppyoloe_s", "ppyoloe_plus_s"])
CASE = pytest.mark.parametrize("case", ["A", "B", "C"])
PHASE = pytest.mark.parametrize(("phase", "epoch"), [("atss", 0), ("tal", 1000)])


def close(value, expected, rel):
    return value == pytest.approx(expected, rel=rel, abs=1e-9)


@PLUS
@CASE
@PHASE
def test_training(plus, case, phase, epoch, reference_model, reference_images, golden):
    name, model = reference_model(plus)
    arrays, scalars, facts = golden(f"ppyoloe/{name}.train.miemie")
    _, paddle, _ = golden(f"ppyoloe/{name}.train.paddledet")
    truth = facts["gt"][case]
    batch = Batch(reference_images, Targets.from_lists(truth["boxes"], truth["classes"]), epoch=epoch)
    model.train()
    predictions = model.predict(batch.images)
    out = model.criterion(predictions, batch)
    out.total.backward()
    key = f"{phase}_{case}"
    for reference in (scalars[key], paddle[key]):
        losses = reference["losses"]
        assert close(out.losses["loss_cls"].item(), losses["loss_cls"], 1e-4)
        assert close(out.losses["loss_iou"].item(), 2.5 * losses["loss_iou"], 1e-4)
        assert close(out.losses["loss_dfl"].item(), 0.5 * losses["loss_dfl"], 1e-4)
        assert close(out.stats["loss_l1"].item(), losses["loss_l1"], 1e-4)
        parameters = dict(model.named_parameters())
        for theirs, norm in reference["grad_l2"].items():
            assert close(parameters[our_name(theirs)].grad.norm().item(), norm, 1e-3), theirs
        total = torch.stack([p.grad.double().norm() for p in parameters.values()]).norm().item()
        assert close(total, reference["grad_l2_total"], 1e-3)
    check_assignment(model, predictions, batch, arrays, key)


def check_assignment(model, predictions, batch, arrays, key):
    assigned = model.criterion.assign(predictions, batch)
    index = assigned.positive.nonzero()
    np.testing.assert_array_equal(index, arrays[f"{key}_pos_index"])
    if not len(index):
        return
    image, box = index[:, 0], assigned.box_index[assigned.positive]
    labels = torch.full(assigned.positive.shape, 80)
    labels[assigned.positive] = batch.targets.labels[image, box]
    np.testing.assert_array_equal(labels, arrays[f"{key}_assigned_labels"])
    np.testing.assert_array_equal(batch.targets.boxes[image, box], arrays[f"{key}_pos_bbox"])
    np.testing.assert_allclose(assigned.scores[assigned.positive], arrays[f"{key}_pos_score"], rtol=1e-4, atol=1e-6)
    assert not assigned.scores[~assigned.positive].any()


@PLUS
def test_raw_training_outputs(plus, reference_model, reference_images, golden):
    name, model = reference_model(plus)
    arrays, _, _ = golden(f"ppyoloe/{name}.train.miemie")
    with torch.no_grad():
        predictions = model.train().predict(reference_images)
    np.testing.assert_allclose(predictions.class_logits.sigmoid(), arrays["train_cls_score"], atol=1e-4)
    np.testing.assert_allclose(predictions.box_logits.flatten(2), arrays["train_reg_distri"], atol=2e-3)
    np.testing.assert_array_equal(predictions.points, arrays["anchor_points_px"])


@PLUS
def test_calibrated_evaluation(plus, reference_model, reference_images, golden):
    name, model = reference_model(plus)
    arrays, _, _ = golden(f"ppyoloe/{name}.eval.miemie")
    paddle, _, _ = golden(f"ppyoloe/{name}.eval.paddledet")
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train().predict(reference_images)
        model.eval()
        maps = model.backbone(reference_images[:1])
        features = model.neck(maps)
        boxes, scores = model.decode(reference_images[:1])
    for i in range(3):
        np.testing.assert_allclose(maps[i], arrays[f"backbone_{i}"], atol=5e-3)
        np.testing.assert_allclose(features[i], arrays[f"neck_{i}"], atol=5e-3)
    for reference in (arrays, paddle):
        np.testing.assert_allclose(boxes, reference["boxes"], atol=3e-2)
        np.testing.assert_allclose(scores, reference["scores"], atol=1e-4)


@PLUS
def test_plain_evaluation(plus, reference_model, reference_images, golden):
    name, model = reference_model(plus)
    arrays, _, _ = golden(f"ppyoloe/{name}.eval.miemie")
    with torch.no_grad():
        predictions = model.eval().predict(reference_images[:1])
    coarse = predictions.class_logits[:, :25].transpose(1, 2).reshape(1, 80, 5, 5)
    np.testing.assert_allclose(coarse, arrays["plain_cls_logit_0"], atol=1e-5)
    coarse = predictions.box_logits[:, :25].flatten(2).transpose(1, 2).reshape(1, 68, 5, 5)
    np.testing.assert_allclose(coarse, arrays["plain_reg_logit_0"], atol=1e-5)


@PLUS
def test_suppression_of_the_reference_outputs(plus, ppyoloe_exp, golden):
    """The shipped NMS settings on PaddleDetection's own boxes and scores."""
    name = "ppyoloe_plus_crn_s" if plus else "ppyoloe_crn_s"
    arrays, _, _ = golden(f"ppyoloe/{name}.eval.paddledet")
    nms = ppyoloe_exp("s", plus).get_model().postprocess
    found = nms(torch.from_numpy(arrays["boxes"]), torch.from_numpy(arrays["scores"]))[0]
    rows = torch.cat([found.labels[:, None].float(), found.scores[:, None], found.boxes], 1).numpy()
    expected = arrays["nms_out"]
    assert rows.shape == expected.shape
    np.testing.assert_allclose(rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)], atol=1e-4)
