"""The published nano on a hundred photographs of COCO: its AP, and the reference's detections one by one."""

import json
from collections import defaultdict

import pytest
import torch
from shared import SHARED, needs_shared
from small_run import DEVICE, evaluate

from mmdet.models.boxes import iou_pairwise

CHECKPOINT, DATA = SHARED / "data/yolox_nano/yolox_nano_coco.pth", SHARED / "data/coco_val100"


def by_image_and_class(detections):
    groups = defaultdict(list)
    for d in detections:
        x, y, w, h = d["bbox"]
        groups[d["image_id"], d["category_id"]].append((x, y, x + w, y + h, d["score"]))
    return {key: torch.tensor(rows, dtype=torch.float64) for key, rows in groups.items()}


@needs_shared
@pytest.mark.slow
def test_ap_and_detections_of_the_published_nano(tmp_path):
    assert "--device" in DEVICE
    words = ("-n", "yolox_nano", "-c", CHECKPOINT, "--data", DATA)
    assert evaluate(*words, "--json", tmp_path / "metrics.json", "--save-detections", tmp_path / "found.json") == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert metrics["AP"] == pytest.approx(0.362, abs=1e-3) and metrics["AP50"] == pytest.approx(0.526, abs=1e-3)
    assert metrics["AP75"] == pytest.approx(0.391, abs=1e-3)

    reference = by_image_and_class(json.loads((SHARED / "data/yolox_nano/ref_val100_dets.json").read_text()))
    found = by_image_and_class(json.loads((tmp_path / "found.json").read_text()))
    total = matched = 0
    for key, rows in reference.items():
        total += len(rows)
        if key in found:
            near = (rows[:, None, 4] - found[key][None, :, 4]).abs() <= 0.005
            matched += (near & (iou_pairwise(rows[:, :4], found[key][:, :4]) >= 0.99)).any(1).sum().item()
    assert total == 1737 and matched >= 0.99 * total, f"{matched} of {total}"
