"""Whole runs of ``tools/train.py`` on a handful of images: they learn, repeat, go on, and their checkpoints judge the same."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import BY_HEART, NAME, SIZES, RunFolder, evaluate, train
from toy import make_toy, toy_coco, write_coco, write_image

from mmdet.core import RunOptions, Trainer, read_checkpoint
from mmdet.data.structures import Batch, Detections
from mmdet.exp import get_exp

IDS = (7, 13, 42)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with TOY(12, 3), category ids 7, 13, 42, which val lists in another order."""
    path = tmp_path_factory.mktemp("runs")

    def reorder(coco, split):
        if split == "val":
            coco["categories"] = [coco["categories"][i] for i in (2, 0, 1)]

    make_toy(path / "toy", 12, 3, category_ids=IDS, edit=reorder)
    return path


def folder(work, name):
    return work / "outputs" / NAME / name


@pytest.fixture(scope="module")
def learned(work):
    """72 steps: enough to find most of the twelve boxes."""
    words = ("--data", work / "toy", "--output", work / "outputs", "-expn", "learned", "-b", "4", *BY_HEART)
    assert train(*words, "max_epoch=24", "eval_interval=12", "basic_lr_per_img=0.0005") == 0
    return RunFolder(folder(work, "learned"))


@pytest.fixture(scope="module")
def tuned(work, learned):
    """Three further epochs in bf16, from the weights of the first run."""
    words = ("--data", work / "toy", "--output", work / "outputs", "-expn", "tuned", "-b", "4", *BY_HEART)
    words += ("-c", learned / "weights.pth", "--amp", "bf16", "max_epoch=3", "eval_interval=1", "basic_lr_per_img=0.0002")
    assert train(*words) == 0
    return RunFolder(folder(work, "tuned"))


def test_d01_one_map_for_both_sets_and_the_run_learns(learned):
    rows = [line.split() for line in learned.log.splitlines()]
    assert all([str(n), str(i), f"c{n + 1}"] in rows for n, i in enumerate(IDS))
    assert [line["step"] for line in learned.steps] == list(range(1, 73))
    assert learned.steps[-1]["loss"] < 0.6 * learned.steps[0]["loss"]
    assert [e["epoch"] for e in learned.evaluations] == [12, 24]
    assert learned.evaluations[-1]["metrics"]["AP"] > 0.15
    assert set(learned.evaluations[-1]["per_class"]) == {"c1", "c2", "c3"}
    assert "training done, best AP" in learned.log.strip().splitlines()[-1]
    assert read_checkpoint(learned / "last.pth")["class_names"] == ["c1", "c2", "c3"]


def test_fine_tuning_reports_what_was_loaded(learned, tuned):
    line = next(line for line in tuned.log.splitlines() if "fine-tuning from" in line)
    assert "weights.pth" in line and "0 re-initialised" in line and "0 missing" in line and "0 of the file unused" in line
    assert tuned.steps[0]["loss"] < 0.7 * learned.steps[0]["loss"]


def test_c07_eval_prints_what_training_logged(work, tuned, capsys, monkeypatch):
    monkeypatch.chdir(work)
    best = max(tuned.evaluations, key=lambda e: e["metrics"]["AP"])
    assert best["metrics"]["AP"] > 0.15
    assert f"evaluating the EMA weights of step {best['step']} in float32" in tuned.log
    assert "forward pass in bfloat16" in tuned.log
    for words in ((), ("-b", "1"), ("-b", "5")):
        assert evaluate("-c", tuned / "best.pth", *words, "--json", "metrics.json") == 0
        out = capsys.readouterr().out
        assert f"judging the EMA weights of step {best['step']} of" in out and "in float32 on cpu" in out
        metrics = json.loads(Path("metrics.json").read_text())["metrics"]
        assert metrics == pytest.approx(best["metrics"], abs=1e-4)
    for name in ("weights.pth", "last.pth"):  # of the best and of the last epoch
        assert evaluate("-c", tuned / name, "--json", "metrics.json") == 0
        logged = best if name == "weights.pth" else tuned.evaluations[-1]
        assert json.loads(Path("metrics.json").read_text())["metrics"] == pytest.approx(logged["metrics"], abs=1e-4)
    assert evaluate("-c", tuned / "best.pth", "--raw") == 0
    assert "judging the raw weights" in capsys.readouterr().out


# -- S1 and resume --------------------------------------------------------------------------------------------------------------


def test_s1_the_seed_decides_every_step_whatever_the_workers(work, monkeypatch):
    """With the recipe's augmentation and sizes that change from step to step."""
    monkeypatch.chdir(work)
    words = ("--data", "toy", "-b", "4", "max_epoch=1", "eval_interval=9", "multiscale=(0.4,1)", "basic_lr_per_img=0.001")
    for name, seed, workers in (("first", 0, 0), ("same", 0, 2), ("other", 1, 0)):
        assert train(*words, "warmup_epochs=0", "--seed", seed, "-expn", name, workers=workers) == 0
    first, same, other = (RunFolder(folder(work, name)) for name in ("first", "same", "other"))
    assert len(first.steps) == 3 and first.losses() == same.losses()
    assert [s["size"] for s in first.steps] == [s["size"] for s in same.steps]
    assert all(a["loss"] != b["loss"] for a, b in zip(first.steps, other.steps, strict=True))
    pairs = [[read_checkpoint(folder(work, name) / "last.pth") for name in ("first", n)] for n in ("same", "other")]
    equal = [all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) for a, b in pairs]
    assert equal == [True, False]


def test_resume_goes_on_with_the_newest_run(work, capsys, monkeypatch):
    """``--resume`` followed by a field: the field is not taken for the file. The step count goes on in the same folder."""
    monkeypatch.chdir(work)
    words = ("--data", "toy", "--output", "resumed", "-b", "6", "eval_interval=9", "warmup_epochs=0", "max_epoch=2")
    for name in ("older", "newer"):
        assert train(*words, "-expn", name) == 0
    capsys.readouterr()
    assert train("--data", "toy", "--output", "resumed", "-b", "6", "--resume", "max_epoch=3") == 0
    assert "resumed from" in capsys.readouterr().err
    older, newer = (RunFolder(f"resumed/{NAME}/{name}") for name in ("older", "newer"))
    assert [len(older.steps), [s["step"] for s in newer.steps]] == [4, [1, 2, 3, 4, 5, 6]]
    assert [path.name for path in sorted(Path("resumed", NAME).iterdir())] == ["newer", "older"]
    assert newer.log.count("run folder:") == 2 and read_checkpoint(newer / "last.pth")["epoch"] == 3


# -- D11 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, epochs", [(3, 60), (1, 8)])
def test_d11_fewer_images_than_the_batch(work, count, epochs, monkeypatch):
    """One step an epoch, which the schedule counts; the loss halves in 60. A val list without images: nothing is judged."""
    monkeypatch.chdir(work)

    def edit(coco, split):
        if split == "val" and count == 1:
            coco["images"], coco["annotations"] = [], []

    make_toy(f"few{count}", count, 1, edit=edit)
    words = ("--data", f"few{count}", "-b", "8", "-expn", f"few{count}", f"max_epoch={epochs}", f"eval_interval={epochs}")
    assert train(*words, *BY_HEART, "basic_lr_per_img=0.001", "warmup_epochs=5") == 0
    run = RunFolder(folder(work, f"few{count}"))
    assert f"{epochs} epochs of 1 steps" in run.log and [s["step"] for s in run.steps] == list(range(1, epochs + 1))
    rates = [s["lr"]["rest"] for s in run.steps]
    assert rates[0] == 0 and rates[5] == pytest.approx(0.008) and rates[5:] == sorted(rates[5:], reverse=True)
    if count == 3:
        assert run.steps[-1]["loss"] <= 0.5 * run.steps[0]["loss"]
        assert run.evaluations[-1]["metrics"]["AP"] is not None and "training done, best AP" in run.log
    else:
        assert all(step["loss"] > 0 for step in run.steps)
        assert not run.evaluations and "has no images: evaluation is skipped" in run.log
        assert "training done; nothing was judged" in run.log and (run / "weights.pth").is_file()


# -- what reaches the loss ------------------------------------------------------------------------------------------------------


def small_exp(*words):
    return get_exp(NAME, [*SIZES, *map(str, words)])


def test_n03_large_coordinates_and_class_numbers_survive_bf16(tmp_path):
    """From the annotation file to the criterion; bfloat16 would make 640 of 639.3 and 2048 of 2049."""
    categories = [{"id": n, "name": f"class {n}"} for n in range(3000)]
    annotation = {"id": 1, "image_id": 1, "category_id": 2049, "bbox": [10.7, 3.3, 628.6, 26.6]}
    coco = {"images": [{"id": 1, "file_name": "wide.png", "width": 640, "height": 32}], "categories": categories}
    write_image(tmp_path / "wide.png", np.full((32, 640, 3), 127, np.uint8))
    for split in ("train", "val"):
        write_coco(tmp_path, coco | {"annotations": [annotation]}, split)
    sizes = ("input_size=(32,640)", "test_size=(32,640)", "flip_prob=0", "batch_size=1")
    exp = small_exp(f"data_dir={tmp_path}", *sizes, "amp=bf16", "static_assigner_epoch=0", *BY_HEART)
    trainer = Trainer(exp, RunOptions(device="cpu", workers=0, progress=False))
    seen = {}

    def look(module, args):
        seen["half"], seen["targets"] = args[0].class_logits.dtype, args[1].targets

    def look_at_assignment(predictions, batch, assign=trainer.model.criterion.assign):
        assigned = assign(predictions, batch)
        seen["assigned"] = batch.targets.labels[0, assigned.box_index[0][assigned.positive[0]]]
        return assigned

    trainer.model.criterion.register_forward_pre_hook(look)
    trainer.model.criterion.assign = look_at_assignment
    losses = trainer.dry_run()
    assert seen["half"] == torch.bfloat16 and all(value == value for value in losses.values())
    assert seen["targets"].boxes.dtype == torch.float32
    assert seen["targets"].boxes[0, 0].tolist() == pytest.approx([10.7, 3.3, 639.3, 29.9], abs=1e-3)
    assert seen["targets"].labels.tolist() == [[2049]]
    assert len(seen["assigned"]) and (seen["assigned"] == 2049).all()


def test_e04_e05_boxes_and_crowd_regions_in_the_networks_frame(tmp_path):
    """640 x 480 to 160 x 160: boxes follow the pixels and come back; the crowd region is no object and no background."""
    make_toy(tmp_path, 1, 1)
    person, crowd = [10, 10, 100, 100], [300, 100, 200, 200]
    coco = toy_coco(1, 1)
    coco["images"][0] |= {"width": 640, "height": 480, "file_name": "big.png"}
    coco["annotations"][0]["bbox"] = person
    coco["annotations"].append({"id": 2, "image_id": 1, "category_id": 1, "bbox": crowd, "iscrowd": 1, "area": 40000})
    write_image(tmp_path / "images" / "big.png", np.full((480, 640, 3), 127, np.uint8))
    for split in ("train", "val"):
        write_coco(tmp_path, coco, split)
    exp = small_exp("batch_size=1", "num_classes=1", f"data_dir={tmp_path}", "flip_prob=0", *BY_HEART)
    exp.prepare()
    batch = next(exp.get_train_loader(workers=0).batches())
    targets = batch.targets
    assert targets.boxes.tolist() == [[pytest.approx([2.5, 10 / 3, 27.5, 110 / 3], abs=1e-4)]]
    assert targets.ignore.tolist() == [[pytest.approx([75, 100 / 3, 125, 100], abs=1e-4)]]
    back = Detections(targets.boxes[0], torch.ones(1), torch.zeros(1, dtype=torch.int64)).to_original(batch.meta[0])
    assert back.boxes.tolist() == [pytest.approx([10, 10, 110, 110], abs=1e-2)]

    model = exp.get_model().train()
    predictions = model.predict(batch.images, batch.meta)
    x, y = predictions.points.unbind(1)
    inside = (x > 75) & (x < 125) & (y > 100 / 3) & (y < 100)
    for epoch in (0, exp.static_assigner_epoch):
        logits = predictions.class_logits.detach().requires_grad_()
        timed = Batch(batch.images, targets, batch.meta, epoch=epoch)
        assigned = model.criterion.assign(predictions._replace(class_logits=logits), timed)
        model.criterion(predictions._replace(class_logits=logits), timed).losses["loss_cls"].backward()
        assert assigned.positive.any() and not assigned.positive[0, inside].any() and inside.sum() > 30
        assert (logits.grad[0, inside] == 0).all() and (logits.grad[0, ~inside] != 0).all()
