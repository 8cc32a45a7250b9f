"""One batch of four photographs is learnt in 60 steps, in both phases, and what was learnt are the boxes."""

import numpy as np
import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.data.coco import CocoDataset
from mmdet.data.structures import Batch, Targets
from mmdet.data.transforms import ResizeTransform

SIZE = (128, 128)


def photographs(epoch):
    data = CocoDataset(SHARED / "data/bccd/annotations/instances_train.json", SHARED / "data/bccd/images")
    samples = [ResizeTransform(SIZE)(data.load(i)) for i in range(4)]
    images = torch.from_numpy(np.stack([s.image for s in samples])).permute(0, 3, 1, 2).contiguous()
    return Batch(images, Targets.from_lists([s.boxes for s in samples], [s.labels for s in samples]), epoch=epoch)


@needs_shared
@pytest.mark.parametrize("epoch", [0, 1000], ids=["atss", "task_aligned"])
def test_overfitting_one_batch(epoch, ppyoloe_exp):
    torch.manual_seed(0)
    model = ppyoloe_exp("s", num_classes=3).get_model()
    batch = photographs(epoch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first = None
    for _ in range(60):
        out = model(batch)
        first = first or out.total.item()
        if out.total.item() < first / 3:
            break
        optimizer.zero_grad()
        out.total.backward()
        # A fresh head has rare gradients of fifty times the usual size.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    assert out.total.item() < first / 3
    # Target scores are overlaps of predictions with boxes; a model that had learnt to predict nothing would leave none.
    assert out.stats["score_sum"] > 0.2 * batch.targets.valid.sum()
