"""The five shipped experiments: their recipes' numbers, what is frozen, the order and size of batches, and that they learn."""

import numpy as np
import pytest
import torch
from toy import make_toy, write_coco, write_image

from mmdet.core.freeze import apply_frozen, train_mode
from mmdet.data.structures import Batch, Targets
from mmdet.errors import UsageError
from mmdet.exp import get_exp
from mmdet.models.matrix_nms import MatrixNMS
from mmdet.models.norms import FrozenBatchNorm2d
from mmdet.models.postprocess import MulticlassNMS

NAMES = ("fcos_r50", "fcos_r50_ms2x", "fcos_r50_iou", "fcos_dcn_r50", "fcos_rt_r50")
TINY = ("input_size=(96, 160)", "test_size=(96, 160)", "size_divisor=32", "batch_size=4", "recipe_batch_size=4")


def exp_on(data, name="fcos_rt_r50", words=()):
    exp = get_exp(name, [*TINY, f"data_dir={data}", *words])
    exp.prepare()
    return exp


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_recipes(name):
    """design/recipes.md, 3.4."""
    exp = get_exp(name)
    realtime, multiscale = name == "fcos_rt_r50", name in ("fcos_rt_r50", "fcos_r50_ms2x")
    assert exp.learning_rate == pytest.approx(0.01) and exp.batch_size == 16 and exp.weight_decay == 1e-4
    assert exp.ema is multiscale and (exp.ema_decay, exp.ema_decay_type) == (0.9998, "threshold")
    schedule = {"fcos_rt_r50": (48, (32, 44)), "fcos_r50_ms2x": (24, (16, 22))}.get(name, (12, (8, 11)))
    assert (exp.max_epoch, exp.milestones) == schedule
    shorts = {"fcos_rt_r50": list(range(256, 609, 32)), "fcos_r50_ms2x": list(range(640, 801, 32))}.get(name, [800])
    assert exp.short_sides() == shorts
    assert (exp.input_size[1], exp.size_divisor) == ((900, 32) if realtime else (1333, 128))
    assert exp.test_size == ((512, 736) if realtime else (800, 1333))
    assert exp.train_sizes()[-1] == ((608, 928) if realtime else (896, 1408))
    model = exp.get_model()
    assert model.head.strides == ((8, 16, 32) if realtime else (8, 16, 32, 64, 128))
    assert model.criterion.radius == 1.5 and model.criterion.quality == ("iou" if name == "fcos_r50_iou" else "centerness")
    nms = model.postprocess
    if multiscale:
        assert isinstance(nms, MatrixNMS) and (nms.score_threshold, nms.post_threshold, nms.nms_top_k) == (0.01, 0.01, 500)
    else:
        assert isinstance(nms, MulticlassNMS) and nms.multi_label
        assert (nms.score_threshold, nms.nms_threshold, nms.nms_top_k) == (0.025, 0.6, 1000)
    assert nms.keep_top_k == 100


@pytest.mark.parametrize(("name", "warmup"), [("fcos_r50", 500), ("fcos_r50_ms2x", 7330)])
def test_schedule(name, warmup):
    exp, steps = get_exp(name), 7330
    factor = exp.get_lr_schedule(steps)
    assert factor(0) == pytest.approx(1 / 3) and factor(warmup // 2) == pytest.approx(2 / 3) and factor(warmup) == 1
    first, second = (int(m) * steps for m in exp.milestones)
    assert factor(first - 1) == 1 and factor(first) == factor(second - 1) == pytest.approx(0.1)
    assert factor(second) == factor(exp.max_epoch * steps - 1) == pytest.approx(0.01)


def test_a_short_epoch_shortens_the_warm_up():
    factor = get_exp("fcos_r50").get_lr_schedule(20)
    assert factor(10) == pytest.approx(2 / 3) and factor(20) == 1


@pytest.mark.parametrize("name", NAMES)
def test_pixels(name):
    """ImageNet's statistics, or for the real-time one the mean alone; beyond an image's edge 0."""
    normalize = get_exp(name).get_model().normalize
    batch = Batch(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8))
    meta = [batch.meta[0].__class__((8, 5), (8, 5))]
    out = normalize(batch.images, meta)
    expected = (131.325, 138.72, 151.47) if name == "fcos_rt_r50" else (2.2489, 2.4286, 2.64)
    assert out[0, :, 0, 0].tolist() == pytest.approx(expected, abs=1e-4)
    assert not out[..., 5:].any() and out[..., :5].all()


def test_stem_and_stage_two_are_frozen_with_their_norms():
    """The real-time recipe: the other norms learn, and take their batch's statistics."""
    exp = get_exp("fcos_rt_r50")
    model = exp.get_model()
    apply_frozen(model, exp.frozen(0))
    train_mode(model, exp.frozen(0))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (not name.startswith(("backbone.conv1.", "backbone.res2."))), name
    mean = {n: b.clone() for n, b in model.named_buffers() if n.endswith("running_mean")}
    model(batch_of(96))
    for name, before in mean.items():
        frozen = name.startswith(("backbone.conv1.", "backbone.res2."))
        assert torch.equal(dict(model.named_buffers())[name], before) == frozen, name


@pytest.mark.parametrize(("norm", "trained"), [("frozen", False), ("affine", True)])
def test_pretrained_norms_keep_their_statistics(norm, trained):
    exp = get_exp("fcos_r50", [f"norm={norm}", "num_classes=3"])
    model = exp.get_model()
    norms = [m for m in model.backbone.modules() if isinstance(m, FrozenBatchNorm2d)]
    assert len(norms) == 53
    apply_frozen(model, exp.frozen(0))
    train_mode(model, exp.frozen(0))
    model(batch_of(96)).total.backward()
    assert all(not m.running_mean.any() for m in norms)
    last = model.backbone.res5.res5c.branch2c.norm
    assert last.weight.requires_grad == trained and (last.weight.grad is not None) == trained
    assert not model.backbone.res2.res2a.branch2a.norm.weight.requires_grad


def test_nothing_is_frozen_where_nothing_is_pretrained():
    exp = get_exp("fcos_rt_r50")
    for name, value in exp.demo_settings().items():
        exp.set(name, value, "test")
    exp.validate()
    model = exp.get_model()
    apply_frozen(model, exp.frozen(0))
    assert all(p.requires_grad for p in model.parameters())
    assert len(exp.level_bounds) == len(model.head.strides) - 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [((), True), (("freeze_at=0", "norm=batch"), False), (("pretrained_backbone=r50.pth",), False)],
)
def test_a_frozen_backbone_without_weights_is_warned_of(words, hint, tmp_path, caplog_loguru):
    exp_on(make_toy(tmp_path, 4, 2), words=words)
    assert ("freeze_at=0 norm=batch" in caplog_loguru.text) == hint


@pytest.fixture
def caplog_loguru(caplog):
    from loguru import logger

    number = logger.add(caplog.handler, format="{message}")
    yield caplog
    logger.remove(number)


# -- data -------------------------------------------------------------------------------------------------------------------


def test_batches_are_grouped_scaled_and_padded(tmp_path):
    sizes = [(60, 80)] * 5 + [(80, 60)] * 3 + [(50, 150)]
    (tmp_path / "images").mkdir()
    for i, (h, w) in enumerate(sizes):
        write_image(tmp_path / "images" / f"{i}.png", np.full((h, w, 3), 60 + i, np.uint8))
    coco = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": w, "height": h} for i, (h, w) in enumerate(sizes)],
        "annotations": [{"id": i, "image_id": i, "category_id": 1, "bbox": [5, 5, 30, 20]} for i in range(len(sizes))],
        "categories": [{"id": 1, "name": "thing"}],
    }
    for split in ("train", "val"):
        write_coco(tmp_path, coco, split)
    exp = exp_on(tmp_path, words=["multiscale=(0.6, 1.0)", "batch_size=3", "freeze_at=0"])
    loader = exp.get_train_loader(workers=0)
    assert loader.steps_per_epoch == 3
    seen = []
    for _, batch in zip(range(3), loader.batches()):
        seen += batch.image_ids
        assert len({m.original_size[1] >= m.original_size[0] for m in batch.meta}) == 1
        assert all(side % 32 == 0 for side in batch.images.shape[2:])
        assert all(min(m.size) in (64, 96) or max(m.size) == 160 for m in batch.meta)
    assert sorted(seen) == list(range(9))
    loader.close()
    frames = {m.image_id: tuple(b.images.shape[2:]) for b in exp.get_eval_loader(batch_size=4, workers=0) for m in b.meta}
    assert frames == {**dict.fromkeys(range(5), (96, 128)), **dict.fromkeys(range(5, 8), (128, 96)), 8: (64, 160)}


def test_d04_images_without_boxes_are_visited_and_learnt_from(tmp_path):
    def edit(coco, split):
        coco["annotations"] = [a for a in coco["annotations"] if a["image_id"] not in (2, 4, 6)]

    exp = exp_on(make_toy(tmp_path, 6, 1, edit=edit), words=["batch_size=2", "freeze_at=0"])
    loader, model = exp.get_train_loader(workers=0), exp.get_model().train()
    seen = set()
    for _, batch in zip(range(loader.steps_per_epoch), loader.batches()):
        seen |= set(batch.image_ids)
        assert torch.isfinite(model(batch).total)
    loader.close()
    assert len(seen) == 6 and len(exp.get_eval_loader(workers=0).source) == 6


def test_d05_boxes_are_cleaned(tmp_path):
    """Two of five are used, one of them clipped."""
    (tmp_path / "images").mkdir()
    write_image(tmp_path / "images" / "a.png", np.full((100, 200, 3), 90, np.uint8))
    boxes = [[10, 10, 20, 20], [50, 20, 0, 30], [60, 60, -10, 20], [190, 90, 30, 30], [300, 10, 20, 20]]
    coco = {
        "images": [{"id": 1, "file_name": "a.png", "width": 200, "height": 100}],
        "annotations": [{"id": i + 1, "image_id": 1, "category_id": 1, "bbox": b} for i, b in enumerate(boxes)],
        "categories": [{"id": 1, "name": "thing"}],
    }
    for split in ("train", "val"):
        write_coco(tmp_path, coco, split)
    exp = exp_on(tmp_path, words=["batch_size=1", "flip_prob=0", "multiscale=(1, 1)", "freeze_at=0"])
    loader = exp.get_train_loader(workers=0)
    batch = next(loader.batches())
    loader.close()
    assert batch.meta[0].size == (80, 160) and batch.images.shape[2:] == (96, 160)
    torch.testing.assert_close(batch.targets.boxes[0], torch.tensor([[8.0, 8, 24, 24], [152, 72, 160, 80]]))
    assert torch.isfinite(exp.get_model().train()(batch).total)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_evaluator_gives_the_same_at_any_batch_size(tmp_path, batch_size):
    """Group norms see the padding, so an image's frame must not depend on its neighbours."""
    torch.manual_seed(0)
    exp = exp_on(make_toy(tmp_path, 6, 2), words=["freeze_at=0", "score_threshold=0.0", "nms_type=multilabel"])
    model = exp.get_model()
    torch.nn.init.normal_(model.head.cls_pred.weight, std=0.2)
    torch.nn.init.constant_(model.head.reg_pred.bias, 2.0)
    found = []
    for size in (3, batch_size):
        evaluator = exp.get_evaluator(batch_size=size, workers=0)
        evaluator.evaluate(model)
        found.append(evaluator.detections)
    assert len(found[0]) == len(found[1]) > 100
    for a, b in zip(*found):
        assert (a["image_id"], a["category_id"]) == (b["image_id"], b["category_id"])
        assert a["bbox"] == pytest.approx(b["bbox"], abs=1e-2) and a["score"] == pytest.approx(b["score"], abs=1e-5)


# -- learning ---------------------------------------------------------------------------------------------------------------


def batch_of(size=96, seed=0):
    """Two images with a bright rectangle per box."""
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(60, 90, (2, 3, size, size), dtype=np.uint8))
    boxes, labels = [[[8, 8, 44, 40], [50, 48, 90, 88]], [[20, 30, 70, 80]]], [[0, 1], [2]]
    for image, its_boxes, its_labels in zip(images, boxes, labels):
        for (x1, y1, x2, y2), label in zip(its_boxes, its_labels):
            image[label, y1:y2, x1:x2] = 250
    return Batch(images, Targets.from_lists(boxes, labels))


@pytest.mark.parametrize("words", [(), ("quality=iou", "box_loss=iou")], ids=["centerness", "iou"])
def test_overfitting_one_batch(words):
    torch.manual_seed(0)
    settings = ("norm=batch", "freeze_at=0", "num_classes=3", "level_bounds=(24, 48)")
    exp = get_exp("fcos_rt_r50", ["input_size=96", "test_size=96", *settings, *words])
    model, batch = exp.get_model().train(), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first = None
    for _ in range(60):
        out = model(batch)
        first = first or out.losses
        if out.losses["loss_cls"] < first["loss_cls"] / 5 and out.losses["loss_box"] < first["loss_box"] / 2:
            break
        optimizer.zero_grad()
        out.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    assert out.losses["loss_cls"] < first["loss_cls"] / 5 and out.losses["loss_box"] < first["loss_box"] / 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("freeze_at=5", "freeze_at=5 .*0 to 4"),
        ("norm=group", "batch | frozen | affine"),
        ("level_bounds=(64,)", "level_bounds=.*three levels or more"),
        ("level_bounds=(64, 32)", "level_bounds=.*ascending"),
        ("channels=100", "channels=100 .*a multiple of 32"),
        ("input_size=(900, 600)", "input_size=.*the short and the long side"),
        ("multiscale=(1.01, 1.02)", "multiscale=.*a multiple of 32 px"),
        ("deform_stages=(2,)", "deform_stages=.*some of"),
        ("center_radius=-1", "center_radius=-1.0 .*0 or more"),
        ("milestones=(9, 3)", "milestones=.*ascending epochs"),
        ("warmup_start=2", "warmup_start=2.0 .*0 to 1"),
    ],
)
def test_values_that_cannot_work_stop(override, message):
    with pytest.raises(UsageError, match=message):
        get_exp("fcos_rt_r50", [override])
