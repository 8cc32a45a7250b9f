"""Memory stays flat: over epochs in the worker processes, over images in evaluation. Linux counts what is needed here."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy import write_coco, write_image

from mmdet.data.coco import CocoDataset, find_coco
from mmdet.data.loader import TrainDataset, TrainLoader
from mmdet.data.transforms import DetectionTrainPipeline

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="needs Linux's /proc/PID/smaps_rollup")


def proportional_bytes(pid) -> int:
    """Memory of a process, in which a page that n processes share counts 1/n (PSS). Pages of library files are left out: their
    share depends on which other programs run."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    parts = [int(words[1]) * 1024 for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:")]
    assert len(parts) == 2, "this kernel does not part PSS by kind"
    return sum(parts)


def family_bytes() -> int:
    return sum(proportional_bytes(pid) for pid in [os.getpid(), *(p.pid for p in multiprocessing.active_children())])


@needs_proc
def test_s3_workers_do_not_copy_the_annotations(tmp_path):
    """50,000 boxes in 2,500 images, 4 workers: after epoch 5 all processes together take at most 1.1 times as much as after
    epoch 1. (Files are shared by many image entries, so that the test is short.)"""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for n in range(5):
        write_image(tmp_path / "images" / f"{n}.png", rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
    corners = rng.integers(0, 30, (50_000, 2)).tolist()
    coco = {
        "images": [{"id": n, "file_name": f"{n % 5}.png", "width": 64, "height": 48} for n in range(2500)],
        "categories": [{"id": c, "name": f"c{c}"} for c in range(1, 4)],
        "annotations": [
            {"id": k, "image_id": k // 20, "category_id": 1 + k % 3, "bbox": [*corner, 12, 10], "area": 120, "iscrowd": 0}
            for k, corner in enumerate(corners)
        ],
    }
    write_coco(tmp_path, coco, "train")
    # A process of its own: forked from one that ran other tests, workers would count that one's memory as well.
    tests = Path(__file__).resolve().parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    used = list(map(int, done.stdout.split()))
    shown = [f"{value / 2**20:.1f} MiB" for value in used]
    assert len(used) == 5 and used[-1] <= 1.1 * used[0], shown
    assert used[-1] - used[0] < 10 * 2**20, shown  # arrays 3 MiB, a list of dicts in their place 19 (2026-11-30)


def train_five_epochs(folder) -> list[int]:
    """Bytes of this process and its four workers after each epoch."""
    source = CocoDataset(*find_coco(folder, "train"))
    assert len(source) == 2500 and "50000 boxes" in source.report()
    loader = TrainLoader(TrainDataset(source, DetectionTrainPipeline(), 0), 50, lambda step: (32, 32), workers=4)
    batches, used = loader.batches(), []
    for _ in range(5):
        for _ in range(loader.steps_per_epoch):
            next(batches)
        assert len(multiprocessing.active_children()) == 4
        used.append(family_bytes())
    loader.close()
    return used


# A process of its own: peak memory can only be read of a whole process. Prints the peak after images 3 and 30.
EVALUATION = """
import resource, sys
import torch
from mmdet.exp import get_exp

words = ["width=0.25", "depth=0.33", "test_size=320", "input_size=320", "score_threshold=0", "num_classes=3"]
exp = get_exp("ppyoloe_s", [*words, f"data_dir={sys.argv[1]}", "output_dir=" + sys.argv[1]])
exp.adopt_classes(exp.dataset("val").categories)
model = exp.get_model()
seen, forward = [], model.forward


def counted(batch):
    found = forward(batch)
    assert len(found[0]) > 0
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return found


model.forward = counted
exp.get_evaluator(batch_size=1, workers=0).evaluate(model)
print(seen[2], seen[29])
"""


@needs_proc
@pytest.mark.slow
def test_s6_evaluation_at_threshold_zero_keeps_its_memory(tmp_path):
    """An untrained network that keeps everything, 30 images: the peak after the last is at most 1.05 times that after three."""
    (tmp_path / "images").mkdir()
    for n in range(30):
        write_image(tmp_path / "images" / f"{n}.png", np.random.default_rng(n).integers(0, 255, (240, 320, 3), dtype=np.uint8))
    coco = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 320, "height": 240} for n in range(30)],
        "categories": [{"id": c, "name": f"c{c}"} for c in range(1, 4)],
        "annotations": [{"id": n, "image_id": n, "category_id": 1, "bbox": [10, 10, 50, 50]} for n in range(30)],
    }
    write_coco(tmp_path, coco, "val")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EVALUATION, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    early, late = map(int, done.stdout.split()[-2:])
    assert late <= 1.05 * early, (early, late)


if __name__ == "__main__":
    print(*train_five_epochs(Path(sys.argv[1])))  # noqa: T201
