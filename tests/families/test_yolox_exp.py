"""The experiments: the recipe's numbers, what depends on the epoch, fields that reach the parts, values that cannot work."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared
from yolox_reference import SIZES, xyxy

from mmdet.core.ema import exponential_decay
from mmdet.core.hooks import KeepCheckpoint
from mmdet.data.letterbox import LetterboxTransform
from mmdet.errors import UsageError
from mmdet.exp import get_exp
from mmdet.models.postprocess import MulticlassNMS

SMALL = ("yolox_nano", "yolox_tiny")
MODELS = pytest.mark.parametrize("name", SIZES)


@MODELS
def test_the_recipe(name):
    exp = get_exp(name)
    assert (exp.max_epoch, exp.warmup_epochs, exp.no_aug_epochs, exp.batch_size) == (300, 5, 15, 64)
    assert exp.basic_lr_per_img == 0.01 / 64 and (exp.weight_decay, exp.momentum, exp.clip_norm) == (5e-4, 0.9, 0)
    assert (exp.score_threshold, exp.nms_threshold, exp.nms_type) == (0.01, 0.65, "argmax")
    small = name in SMALL
    sizes = [h for h, w in exp.train_sizes() if h == w]
    assert sizes == (list(range(320, 641, 32)) if small else list(range(480, 801, 32)))
    assert exp.input_size == exp.test_size == ((416, 416) if small else (640, 640))
    assert exp.mosaic_scale == ((0.5, 1.5) if small else (0.1, 2.0)) and exp.mosaic_prob == (0.5 if name == "yolox_nano" else 1)
    assert (exp.train_pipeline().mixup is None) == small
    assert len({exp.size_at(step) for step in range(10, 20)}) == 1 and len({exp.size_at(step) for step in range(500)}) > 8


def test_norms_and_prior():
    model = get_exp("yolox_nano").get_model()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 104 and {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.03)}
    for layer in (*model.head.cls_preds, *model.head.obj_preds):
        torch.testing.assert_close(layer.bias, torch.full_like(layer.bias, -4.59512))


def test_pixels_are_bgr_as_they_come():
    images = torch.tensor([10, 20, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert get_exp("yolox_s").get_model().normalize(images).flatten().tolist() == [255, 20, 10]


def test_what_the_last_epochs_change():
    exp = get_exp("yolox_s", {"max_epoch": 20, "no_aug_epochs": 5})
    assert [exp.eval_interval_at(e) for e in (0, 14, 15, 19)] == [10, 10, 1, 1]
    assert exp.get_model().criterion.l1_from_epoch == exp.train_pipeline().plain_from == 15
    (hook,) = exp.get_hooks()
    assert isinstance(hook, KeepCheckpoint) and (hook.epochs_done, hook.file_name) == (15, "last_mosaic.pth")
    factor = exp.get_lr_schedule(12)
    assert (factor(0), factor(60), factor(180), factor(239)) == pytest.approx((0, 1, 0.05, 0.05)) and factor(179) > 0.05


@pytest.mark.parametrize(("plain", "start"), [(0, 20), (20, 0), (25, 0)])
def test_no_or_only_plain_epochs(plain, start):
    exp = get_exp("yolox_s", {"max_epoch": 20, "no_aug_epochs": plain})
    assert exp.plain_from == start and list(exp.get_hooks()) == []
    assert exp.eval_interval_at(19) == (1 if plain else 10) and 0 < exp.get_lr_schedule(10)(100) <= 1


def test_average_and_optimizer():
    exp = get_exp("yolox_nano")
    ema = exp.get_ema()
    assert ema.start == "copy" and not ema.correct and ema.decay(7) == exponential_decay(0.9998)(7)
    assert exp.get_optimizer(exp.get_model()).defaults["nesterov"]
    plain = get_exp("yolox_nano", {"momentum": 0.0})
    assert not plain.get_optimizer(plain.get_model()).defaults["nesterov"]


def test_fields_reach_the_parts():
    exp = get_exp(
        "yolox_nano",
        ["num_classes=3", "nms_threshold=0.4", "keep_top_k=11", "nms_type=multilabel", "weight_iou=3", "assign_bytes=5"]
        + ["degrees=1", "translate=0.2", "shear=3", "mosaic_scale=(0.7,0.8)", "mixup_prob=0.25", "mixup_scale=(0.9,1.1)"]
        + ["hsv_gains=(1,2,3)", "hsv_prob=0.75", "flip_prob=0.125", "mosaic_prob=0.375", "pad_value=7", "no_aug_epochs=2"],
    )
    model, made = exp.get_model(), exp.train_pipeline()
    assert model.head.num_classes == model.criterion.num_classes == 3
    assert (model.criterion.weight_iou, model.criterion.assign_bytes, model.criterion.l1_from_epoch) == (3, 5, 298)
    assert (model.postprocess.nms_threshold, model.postprocess.keep_top_k, model.postprocess.multi_label) == (0.4, 11, True)
    affine = made.mosaic.affine
    assert (affine.degrees, affine.translate, affine.shear, affine.scale) == (1, 0.2, 3, (0.7, 0.8))
    assert (made.mixup.prob, made.mixup.scale, made.mixup.fill, made.mosaic.fill, made.fill) == (0.25, (0.9, 1.1), 7, 7, 7)
    assert (made.hsv.prob, made.hsv.gains, made.flip_prob, made.mosaic_prob, made.plain_from) == (
        0.75,
        (1, 2, 3),
        0.125,
        0.375,
        298,
    )
    evaluation = exp.eval_transform()
    assert isinstance(evaluation, LetterboxTransform) and (evaluation.size, evaluation.fill) == ((416, 416), 7)
    assert get_exp("yolox_s", ["hsv_prob=0"]).train_pipeline().hsv is None
    assert get_exp("yolov3").get_model().backbone.stem[0].act.negative_slope == 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("width=0", "width=0.0 .*a positive number"),
        ("mosaic_prob=1.5", "mosaic_prob=1.5 .*0 to 1"),
        ("mosaic_scale=(2,1)", "smallest factor <= largest factor"),
        ("mixup_scale=(0,1)", "0 < smallest"),
        ("shear=50", "0 <= shear < 45"),
        ("pad_value=300", "0 to 255"),
        ("hsv_gains=(-1,0,0)", "three numbers"),
        ("act=relu", "silu | leaky_relu"),
        ("mosaic_probb=0.5", "Did you mean 'mosaic_prob'"),
    ],
)
def test_values_that_cannot_work_stop(override, message):
    with pytest.raises(UsageError, match=message):
        get_exp("yolox_s", [override])


def test_demo_settings_are_fields():
    exp = get_exp("yolox_nano")
    for name, value in exp.demo_settings().items():
        exp.set(name, value, "test")
    exp.validate()
    assert 0 < exp.plain_from < exp.max_epoch and exp.train_sizes() == [(192, 192)]


@needs_shared
def test_suppression_equals_the_reference():
    given = np.load(SHARED / "golden/pure/postprocess.yolox.npz")
    pred = torch.from_numpy(given["pred"])
    boxes, scores = xyxy(pred), pred[..., 4:5] * pred[..., 5:]
    cases = {"c0.01_n0.65": (0.01, 0.65, False), "c0.25_n0.45": (0.25, 0.45, False), "c0.25_n0.45_agnostic": (0.25, 0.45, True)}
    for name, (score, overlap, agnostic) in cases.items():
        nms = MulticlassNMS(score, overlap, keep_top_k=-1, multi_label=False, class_agnostic=agnostic)
        for image, found in enumerate(nms(boxes, scores)):
            rows = given[f"{name}_img{image}"]
            np.testing.assert_allclose(found.boxes, rows[:, :4], atol=1e-4)
            np.testing.assert_allclose(found.scores, rows[:, 4] * rows[:, 5], atol=1e-6)
            np.testing.assert_array_equal(found.labels, rows[:, 6])
