"""Two photographs are learnt by heart, and what was learnt are the boxes; a data set with oddities trains and is judged."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared
from toy import make_toy

from mmdet.data.coco import CocoDataset
from mmdet.data.structures import Batch, Targets
from mmdet.data.transforms import ResizeTransform
from mmdet.exp import get_exp
from mmdet.models.boxes import iou_pairwise

SIZE = (128, 128)
STEPS = 70


def photographs():
    data = CocoDataset(SHARED / "data/bccd/annotations/instances_train.json", SHARED / "data/bccd/images")
    samples = [ResizeTransform(SIZE)(data.load(i)) for i in range(2)]
    images = torch.from_numpy(np.stack([s.image for s in samples])).permute(0, 3, 1, 2).contiguous()
    return Batch(images, Targets.from_lists([s.boxes for s in samples], [s.labels for s in samples]))


@needs_shared
def test_overfitting_one_batch():
    torch.manual_seed(0)
    exp = get_exp("ppyolo_r18vd", ["num_classes=3", "keep_prob=1"])
    model, batch = exp.get_model(), photographs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parallel = exp.get_parallel()
    first = None
    for step in range(STEPS):
        # L1 losses do not settle at a constant rate.
        optimizer.param_groups[0]["lr"] = 0.01 * 0.1 ** ((step > STEPS * 0.6) + (step > STEPS * 0.85))
        out = model(batch)
        first = first or {name: value.item() for name, value in out.losses.items()}
        optimizer.zero_grad()
        out.total.backward()
        parallel.clip(model)
        optimizer.step()
    for name, value in out.losses.items():
        assert value.item() < first[name] / 3, name
    found = model.eval()(batch)
    learnt = 0
    for image, detections in enumerate(found):
        sure = detections.scores > 0.3
        for box, label, valid in zip(
            batch.targets.boxes[image], batch.targets.labels[image], batch.targets.valid[image], strict=True
        ):
            same = detections.boxes[sure & (detections.labels == label)]
            learnt += int(valid and len(same) and iou_pairwise(box[None], same).max() > 0.6)
    # Boxes that share a cell with a later one cannot all be learnt.
    assert learnt > 0.8 * out.stats["num_pos"] * len(batch)


@pytest.fixture
def odd_data(tmp_path):
    """TOY(6, 2): image 2 without boxes, image 3 with boxes that have no area or lie outside, image 4 with a crowd region."""

    def edit(coco, split):
        rows = {a["image_id"]: a for a in coco["annotations"]}
        coco["annotations"].remove(rows[2])
        rows[4]["iscrowd"] = 1
        extra = ([20, 20, 0, 30], [60, 60, -10, 20], [150, 100, 30, 30], [300, 10, 20, 20])
        for i, box in enumerate(extra):
            coco["annotations"].append({**rows[3], "id": 100 + i, "bbox": box})

    return make_toy(tmp_path, 6, 2, edit=edit)


def test_an_epoch_of_odd_data(odd_data):
    """Cases D04, D05, E05 and N04: every image is visited, losses are finite, the same in half precision."""
    exp = get_exp("ppyolo_r18vd", ["input_size=160", "test_size=160", "multiscale=(1,1)", f"data_dir={odd_data}"])
    exp.set("batch_size", 2, "test")
    exp.prepare()
    assert exp.num_classes == 2
    model = exp.get_model()
    loader = exp.get_train_loader(workers=0)
    batches = loader.batches()
    seen, crowds = set(), 0
    for step in range(loader.steps_per_epoch):
        batch = next(batches)
        seen |= set(batch.image_ids)
        crowds += int(batch.targets.ignore.any())
        with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
            out = model(batch)
        out.total.backward()
        assert all(v.isfinite() for v in out.losses.values())
        assert out.losses["loss_obj"] > 0
        assert (batch.targets.weights[batch.targets.valid] < 1).all()  # mixed, every one
    loader.close()
    assert seen == {1, 2, 3, 4, 5, 6}
    assert crowds
    assert all(p.grad.isfinite().all() for p in model.parameters())
    judged = exp.get_evaluator(batch_size=4, workers=0).evaluate(model)
    assert 0 <= judged.metrics["AP"] <= 1
