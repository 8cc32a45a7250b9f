"""One batch of four photographs is learnt from the published weights and from nothing, and what was learnt are the boxes."""

import pytest
import torch
from shared import SHARED, needs_shared

from mmdet.core.checkpoint import load_pretrained
from mmdet.data.coco import CocoDataset
from mmdet.data.collate import collate
from mmdet.data.letterbox import LetterboxTransform
from mmdet.exp import get_exp


@needs_shared
@pytest.mark.parametrize("epoch", [0, 299], ids=["without_l1", "with_l1"])
def test_overfitting_one_batch(epoch):
    data = CocoDataset(SHARED / "data/bccd/annotations/instances_train.json", SHARED / "data/bccd/images")
    batch = collate([LetterboxTransform((128, 128))(data.load(i)) for i in range(4)], epoch=epoch)
    torch.manual_seed(0)
    model = get_exp("yolox_nano", ["num_classes=3"]).get_model()
    load_pretrained(model, SHARED / "data/yolox_nano/yolox_nano_coco.pth")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, nesterov=True)
    first = None
    for _ in range(60):
        out = model(batch)
        first = first or {name: value.item() for name, value in out.losses.items()}
        optimizer.zero_grad()
        out.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    assert out.total.item() < sum(first.values()) / 2
    assert out.losses["loss_iou"].item() < first["loss_iou"] * 0.8
    assert out.stats["num_fg"] > 1
    # What it finds in these photographs after that: most boxes of the largest class.
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model(batch)
        found = model.eval()(batch)
    assert sum((d.scores > 0.3).sum().item() for d in found) > 0.3 * batch.targets.valid.sum().item()
