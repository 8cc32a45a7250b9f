"""Public cases with YOLOX: D05, D06, E04, E05 and N04 with mosaic on, N06, S1."""

import cv2
import numpy as np
import pytest
import torch
from small_run import RunFolder, train
from toy import make_toy, toy_coco, write_coco, write_image

from mmdet.data.structures import Detections
from mmdet.exp import get_exp

ON = ["mosaic_prob=1", "mixup_prob=1", "mosaic_scale=(0.5,1.5)"]


def exp_for(path, *words):
    exp = get_exp("yolox_nano", [f"data_dir={path}", "batch_size=2", "input_size=96", "test_size=96", "multiscale=(1,1)", *words])
    exp.prepare()
    return exp


def one_image(path, size, annotations, name="big.png"):
    """A data set of one grey image of ``size`` (H, W)."""
    (path / "images").mkdir(exist_ok=True)
    coco = toy_coco(1, 1)
    coco["images"][0] |= {"width": size[1], "height": size[0], "file_name": name}
    coco["annotations"] = [{"id": i, "image_id": 1, "category_id": 1, **a} for i, a in enumerate(annotations, 1)]
    if not (path / "images" / name).exists():
        write_image(path / "images" / name, np.full((*size, 3), 127, np.uint8))
    for split in ("train", "val"):
        write_coco(path, coco, split)
    return path


def test_d05_degenerate_boxes_with_mosaic(tmp_path):
    boxes = [[10, 10, 20, 20], [50, 20, 0, 30], [60, 60, -10, 20], [190, 90, 30, 30], [300, 10, 20, 20]]
    exp = exp_for(one_image(tmp_path, (100, 200), [{"bbox": b} for b in boxes]), *ON)
    stream, model = exp.get_train_loader(workers=0).batches(), exp.get_model().train()
    for _ in range(5):
        batch = next(stream)
        boxes = batch.targets.boxes[batch.targets.valid]
        assert (boxes >= 0).all() and (boxes <= 96).all() and (boxes[:, 2:] - boxes[:, :2] > 1).all()
        assert torch.isfinite(model(batch).total)


def test_d06_turned_photographs_with_mosaic(tmp_path):
    """Stored 60 x 40, left half red, EXIF orientation 6: upright it is 40 x 60 with red on top."""
    stored = np.zeros((40, 60, 3), np.uint8)
    stored[:, :30], stored[:, 30:] = (250, 0, 0), (0, 0, 250)
    ok, data = cv2.imencode(".jpg", stored[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 100])
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    for size, box in (((60, 40), [0, 0, 40, 30]), ((40, 60), [0, 0, 30, 40])):
        folder = tmp_path / f"{size[0]}"
        (folder / "images").mkdir(parents=True)
        (folder / "images" / "a.jpg").write_bytes(data.tobytes()[:2] + segment + data.tobytes()[2:])
        exp = exp_for(one_image(folder, size, [{"bbox": box}], "a.jpg"), *ON[:1], *ON[2:], "degrees=0", "shear=0", "hsv_prob=0")
        batch = next(exp.get_train_loader(workers=0).batches())
        checked = 0
        for image, boxes, valid in zip(batch.images, batch.targets.boxes, batch.targets.valid, strict=True):
            for x1, y1, x2, y2 in boxes[valid].tolist():
                inner = image[:, int(y1) + 4 : int(y2) - 3, int(x1) + 4 : int(x2) - 3]
                checked += inner[0].numel()
                assert (inner[0] > 200).all() and (inner[2] < 60).all()
        assert checked > 500


def test_e04_boxes_come_back_from_the_letterbox(tmp_path):
    annotation = {"bbox": [200, 100, 400, 300], "area": 120000}
    exp = exp_for(one_image(tmp_path, (960, 1280), [annotation]), "test_size=640")

    class Found(torch.nn.Module):
        def forward(self, batch):
            return [Detections(torch.tensor([[100.0, 50, 300, 200]]), torch.tensor([0.9]), torch.tensor([0]))]

    evaluator = exp.get_evaluator(batch_size=1, workers=0)
    assert evaluator.evaluate(Found()).metrics["AP"] == pytest.approx(1.0)
    assert evaluator.detections[0]["bbox"] == pytest.approx([200, 100, 400, 300], abs=0.01)


def test_e05_crowd_regions_with_mosaic(tmp_path):
    person, crowd = {"bbox": [10, 10, 100, 100]}, {"bbox": [300, 100, 200, 200], "iscrowd": 1, "area": 40000}
    exp = exp_for(one_image(tmp_path, (480, 640), [person, crowd]), *ON)
    stream, model = exp.get_train_loader(workers=0).batches(), exp.get_model().train()
    silenced = 0
    for _ in range(6):
        batch = next(stream)
        predictions = model.predict(batch.images, batch.meta)
        logits = predictions.obj_logits.detach().requires_grad_()
        model.criterion(predictions._replace(obj_logits=logits), batch).losses["loss_obj"].backward()
        positive = model.criterion.assign(predictions, batch).positive
        x, y = predictions.points.unbind(1)
        for i, regions in enumerate(batch.targets.ignore):
            inside = torch.zeros_like(x, dtype=torch.bool)
            for x1, y1, x2, y2 in regions:
                inside |= (x > x1) & (x < x2) & (y > y1) & (y < y2)
            quiet = inside & ~positive[i]
            assert (logits.grad[i, quiet] == 0).all() and (logits.grad[i, ~quiet] != 0).all()
            silenced += quiet.sum()
    assert silenced > 20


def test_n04_no_boxes_anywhere_with_mosaic(tmp_path):
    make_toy(tmp_path, 4, 1, edit=lambda coco, split: split == "train" and coco["annotations"].clear())
    exp = exp_for(tmp_path, *ON)
    batch = next(exp.get_train_loader(workers=0).batches())
    out = exp.get_model().train()(batch)
    assert batch.targets.boxes.shape == (2, 0, 4) and out.losses["loss_obj"] > 0 and torch.isfinite(out.total)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"), 8, 2)


def small(toy, out, *words, workers=0):
    words = ("--data", toy, "--output", out, "-b", "4", "input_size=64", "test_size=64", "eval_interval=9", *ON, *words)
    return train(*words, exp=("-n", "yolox_nano"), workers=workers)


def test_n06_a_rate_a_million_times_too_high(toy, tmp_path, capsys):
    words = ("max_epoch=3", "no_aug_epochs=1", "warmup_epochs=0", "basic_lr_per_img=156.25", "-expn", "far")
    assert small(toy, tmp_path, *words) != 0
    text = capsys.readouterr().err
    assert "iteration" in text and "t_000" in text and "lr" in text and "training done" not in text
    for path in (tmp_path / "yolox_nano" / "far").glob("*.pth"):
        for name, value in torch.load(path, weights_only=True)["model"].items():
            assert value.isfinite().all(), (path, name)


def test_s1_the_seed_decides_every_step_whatever_the_workers(toy, tmp_path):
    runs = {}
    for name, seed, workers in (("a", 0, 0), ("b", 0, 2), ("c", 1, 0)):
        assert small(toy, tmp_path, "max_epoch=2", "no_aug_epochs=1", "--seed", seed, "-expn", name, workers=workers) == 0
        runs[name] = RunFolder(tmp_path / "yolox_nano" / name).losses()
    assert runs["a"] == runs["b"] and len(runs["a"]) == 4 and runs["a"] != runs["c"]
