"""Case C05: mosaic ends and the L1 loss begins at the same epoch, with persistent workers and after a resume on either side."""

import shutil

import numpy as np
import pytest
import torch
from small_run import RunFolder, train
from toy import toy_coco, write_coco, write_image

from mmdet.core.files import read_checkpoint
from mmdet.exp import get_exp

COLOURS = [(40 * (k % 6) + 20, 90 * (k // 6 % 3) + 20, 200 - 60 * (k // 4)) for k in range(8)]
TIME = ("max_epoch=6", "no_aug_epochs=2")
TINY = ("input_size=64", "test_size=64")


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """Eight images of one colour each, a box in every one."""
    path = tmp_path_factory.mktemp("flat")
    (path / "images").mkdir()
    coco = toy_coco(8, 2)
    for entry, colour in zip(coco["images"], COLOURS, strict=True):
        write_image(path / "images" / entry["file_name"], np.full((120, 160, 3), colour, np.uint8))
    for split in ("train", "val"):
        write_coco(path, coco, split)
    return path


def loader_of(flat, workers):
    words = ["batch_size=4", "input_size=96", "multiscale=(1,1)", "hsv_prob=0", "mosaic_prob=1", "mosaic_scale=(0.8,1)"]
    exp = get_exp("yolox_nano", [f"data_dir={flat}", "num_classes=2", *words, *TIME])
    exp.adopt_classes(exp.dataset("train").categories)
    return exp.get_train_loader(workers=workers)


def sources(image) -> int:
    """Distinct colours of (3, H, W), the border's grey left out."""
    colours = {tuple(c) for c in image.permute(1, 2, 0).reshape(-1, 3).tolist()}
    return len(colours - {(114, 114, 114)})


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_sources_per_sample_over_the_boundary_and_after_a_resume(flat):
    live = loader_of(flat, workers=2)
    stream = live.batches()
    batches = [next(stream) for _ in range(12)]  # two steps per epoch
    live.close()
    counts = [[sources(image) for image in batch.images] for batch in batches]
    assert [b.epoch for b in batches] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert max(map(max, counts[:8])) > 2 and np.mean(counts[6:8]) > 1.3
    assert counts[8:] == [[1] * 4] * 4
    for start in (6, 7, 8, 10):
        resumed = loader_of(flat, workers=1)
        stream = resumed.batches(start)
        for expected in batches[start:]:
            found = next(stream)
            assert torch.equal(found.images, expected.images) and torch.equal(found.targets.boxes, expected.targets.boxes)
        resumed.close()


@pytest.fixture(scope="module")
def straight(flat, tmp_path_factory):
    """A whole run with two workers; the checkpoint of every epoch is kept."""
    out = tmp_path_factory.mktemp("runs")
    words = ("--data", flat, "--output", out, "-b", "4", *TINY, "eval_interval=6", "keep_checkpoints=9")
    assert train(*words, *TIME, "mosaic_prob=1", "-expn", "straight", exp=("-n", "yolox_nano"), workers=2) == 0
    return RunFolder(out / "yolox_nano" / "straight")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_l1_and_evaluations_follow_the_epoch(straight):
    assert [line["step"] for line in straight.steps] == list(range(1, 13))
    late = ["loss_l1" in line for line in straight.steps]
    assert late == [False] * 8 + [True] * 4
    assert [e["epoch"] for e in straight.evaluations] == [5, 6]
    kept = read_checkpoint(straight / "last_mosaic.pth")
    assert (kept["epoch"], kept["step"], kept["position"]) == (4, 8, 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("done", [3, 4, 5])
def test_resumed_on_either_side_equals_uninterrupted(straight, done, tmp_path):
    folder = tmp_path / "yolox_nano" / "again"
    folder.mkdir(parents=True)
    shutil.copy(straight / f"epoch_{done:03d}.pth", folder / "last.pth")
    assert train("--resume", folder / "last.pth", "--output", tmp_path, *TINY, exp=("-n", "yolox_nano"), workers=2) == 0
    again = RunFolder(folder)
    assert again.losses() == straight.losses()[2 * done :]
    states = [read_checkpoint(run / "last.pth") for run in (straight, again)]
    for part in (lambda s: s["model"], lambda s: s["ema"]["model"]):
        assert all(torch.equal(part(states[1])[name], value) for name, value in part(states[0]).items())
    assert (folder / "last_mosaic.pth").exists() == (done <= 4)
