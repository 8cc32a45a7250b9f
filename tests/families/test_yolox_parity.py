"""YOLOX-nano and YOLOX-s equal Megvii's: features, decoded boxes, losses with and without L1, assignments, gradients."""

import numpy as np
import pytest
import torch
from shared import needs_shared
from yolox_reference import golden, reference_images, reference_model, xyxy

from mmdet.data.structures import Batch, Targets
from mmdet.families.yolox.compat import our_name

pytestmark = needs_shared

NAMES = pytest.mark.parametrize("name", ["yolox_nano", "yolox_s"])
LOSSES = {"loss_iou": "iou_loss", "loss_obj": "conf_loss", "loss_cls": "cls_loss", "loss_l1": "l1_loss"}


def close(value, expected, rel):
    return value == pytest.approx(expected, rel=rel, abs=1e-6)


@NAMES
@pytest.mark.parametrize("case", ["A", "B", "C"])
@pytest.mark.parametrize(("epoch", "l1"), [(284, 0), (285, 1)])
def test_training(name, case, epoch, l1):
    arrays, described = golden(f"yolox/{name}.train")
    model = reference_model(name).train()
    truth = described["facts"]["gt"][case]
    batch = Batch(reference_images(), Targets.from_lists(truth["boxes"], truth["classes"]), epoch=epoch)
    predictions = model.predict(batch.images)
    out = model.criterion(predictions, batch)
    out.total.backward()
    reference = described["scalars"][f"{case}_l1{l1}"]
    assert ("loss_l1" in out.losses) == bool(l1)  # where it does not count, the reference gives 0
    for ours, theirs in LOSSES.items():
        assert close(float(out.losses.get(ours, 0)), reference["losses"][theirs], 1e-4), ours
    assert close(out.total.item(), reference["losses"]["total_loss"], 1e-4)
    assert close(out.stats["num_fg"].item(), reference["losses"]["num_fg"], 1e-6)
    parameters = dict(model.named_parameters())
    for theirs, norm in reference["grad_l2"].items():
        assert close(parameters[our_name(theirs)].grad.norm().item(), norm, 1e-3), theirs
    total = torch.stack([p.grad.double().norm() for p in parameters.values()]).norm().item()
    assert close(total, reference["grad_l2_total"], 1e-3)

    assigned = model.criterion.assign(predictions, batch)
    for image in range(2):
        key, positive = f"{case}_l1{l1}_img{image}", assigned.positive[image]
        if f"{key}_fg_index" not in arrays:
            assert l1 or not truth["boxes"][image]
            continue
        np.testing.assert_array_equal(positive.nonzero().flatten(), arrays[f"{key}_fg_index"])
        np.testing.assert_array_equal(assigned.box_index[image, positive], arrays[f"{key}_matched_gt"])
        np.testing.assert_allclose(assigned.scores[image, positive], arrays[f"{key}_pred_iou"], atol=1e-4)
    assert not assigned.scores[~assigned.positive].any()


@NAMES
def test_the_first_norm_moves_as_there(name):
    _, described = golden(f"yolox/{name}.train")
    model = reference_model(name).train()
    with torch.no_grad():
        model.predict(reference_images())
    after, norm = described["scalars"]["A_l10"]["bn0_after"], model.backbone.stem.conv.bn
    np.testing.assert_allclose(norm.running_mean[:4], after["running_mean"], rtol=1e-4)
    np.testing.assert_allclose(norm.running_var[:4], after["running_var"], rtol=1e-4)


@NAMES
def test_calibrated_evaluation(name):
    arrays, described = golden(f"yolox/{name}.eval")
    model, images = reference_model(name), reference_images()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train().predict(images)
        features = model.eval().neck(model.backbone(images[:1]))
        boxes, scores = model.decode(images[:1])
    for i, feature in enumerate(features):
        stride = described["arrays"][f"fpn_{i}"]["flat_stride"]
        np.testing.assert_allclose(feature.flatten()[::stride], arrays[f"fpn_{i}"].flatten(), atol=5e-3)
    decoded = torch.from_numpy(arrays["decoded"])
    torch.testing.assert_close(boxes, xyxy(decoded), rtol=0, atol=3e-2)
    torch.testing.assert_close(scores, decoded[..., 5:] * decoded[..., 4:5], rtol=0, atol=1e-4)


@NAMES
def test_plain_evaluation(name):
    """The seeded running statistics as they are: box codes before the exponential."""
    arrays, described = golden(f"yolox/{name}.eval")
    model = reference_model(name).eval()
    with torch.no_grad():
        predictions = model.predict(reference_images()[:1])
    theirs = arrays["plain_reg_out_0"]
    stride = described["arrays"]["plain_reg_out_0"]["flat_stride"]
    ours = predictions.box_codes[0, :400].T.flatten()[::stride]
    np.testing.assert_allclose(ours, theirs.flatten(), rtol=1e-4, atol=1e-4)
