"""Three tiny tasks on generated data, for runs of a few seconds: two detection label spaces and one of colours."""

import json

import cv2
import numpy as np
import torch
from torch import nn
from toy import make_toy

from mmdet.data.structures import LossOutput
from mmdet.families.multitask.exp import MultiTaskExp
from mmdet.families.multitask.heads import PooledEmbedding, PooledLinear
from mmdet.families.multitask.sources import CocoFolder, ImageFolder, ImageLabels, ImagePairs
from mmdet.families.multitask.task import TaskSpec
from mmdet.families.yolox.head import DecoupledHead
from mmdet.families.yolox.loss import YOLOXCriterion

SIZE = 64


def make_data(root, images=8):
    """``a`` and ``b`` in COCO's layout (3 and 2 classes), ``colours`` in folders, ``tags`` and ``pairs`` as lists."""
    for name, classes in (("a", 3), ("b", 2)):
        make_toy(root / name, images, classes)
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        names = []
        for number, (colour, rgb) in enumerate((("blue", (0, 0, 255)), ("green", (0, 255, 0)), ("red", (255, 0, 0)))):
            folder = root / "colours" / split / colour
            folder.mkdir(parents=True)
            for i in range(4):
                noise = draw.integers(0, 120, (40, 40, 3)) + np.array(rgb) // 2
                cv2.imencode(".png", noise.astype(np.uint8)[..., ::-1])[1].tofile(folder / f"{i}.png")
                names.append((f"{split}/{colour}/{i}.png", colour, number))
        for folder in ("tags", "pairs"):
            (root / folder).mkdir(exist_ok=True)
        path = lambda n: f"../colours/{n}"  # noqa: E731
        tags = {path(n): [colour] + (["warm"] if colour == "red" else ["cold"]) for n, colour, _ in names}
        content = {"classes": ["blue", "cold", "green", "red", "warm"], "images": tags}
        (root / "tags" / f"{split}.json").write_text(json.dumps(content))
        pairs = [[path(a), path(b), int(x == y)] for (a, _, x), (b, _, y) in zip(names, names[3:] + names[:3])]
        (root / "pairs" / f"{split}.json").write_text(json.dumps(pairs))
    return root


class Backbone(nn.Module):
    """(B, 3, H, W) -> three maps of strides 8, 16, 32."""

    out_channels = (8, 8, 8)

    def __init__(self, dropout=0.0):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 4, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.downs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(3)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, images):
        x, maps = self.drop(self.stem(images)), []
        for down in self.downs:
            x = down(x)
            maps.append(x)
        return maps


class Neck(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.out_channels = tuple(channels)
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 1) for c in channels)

    def forward(self, maps):
        return [x + conv(x) for x, conv in zip(maps, self.convs, strict=True)]


class PointHead(nn.Module):
    """A detection head small enough to be checked by hand: one number per place of the last map."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels[-1], 1, 1)

    def forward(self, maps):
        return self.conv(maps[-1])


class PointCriterion(nn.Module):
    def forward(self, predictions, batch):
        loss = (predictions.mean((1, 2, 3)) - batch.targets.valid.sum(1)).square().mean()
        return LossOutput({"loss_square": loss})


def detection(name, folder, classes, **more):
    return TaskSpec(
        name,
        "detection",
        data=CocoFolder(folder, classes=classes),
        batch_size=more.pop("batch_size", 2),
        head=lambda channels: DecoupledHead(channels, classes, channels=8),
        criterion=lambda: YOLOXCriterion(classes, l1_from_epoch=0),
        **more,
    )


def colours(name="cls", **more):
    return TaskSpec(
        name,
        "classification",
        data=ImageFolder("colours", classes=3),
        batch_size=more.pop("batch_size", 2),
        head=lambda channels: PooledLinear(3, channels),
        share=more.pop("share", {"backbone": 0}),
        **more,
    )


def tags(name="tags", **more):
    return TaskSpec(
        name,
        "multilabel",
        data=ImageLabels("tags", classes=5),
        batch_size=2,
        head=lambda channels: PooledLinear(5, channels),
        share={"backbone": 0},
        **more,
    )


def pairs(name="same", **more):
    return TaskSpec(
        name,
        "pairwise",
        data=ImagePairs("pairs"),
        batch_size=2,
        head=lambda channels: PooledEmbedding(4, channels),
        share={"backbone": 0},
        **more,
    )


class ToyExp(MultiTaskExp):
    """detA on one shard, detB on two, colours on one."""

    max_iter = 20
    eval_interval = 20
    print_interval = 1
    basic_lr_per_img = 0.001 / 8
    recipe_batch_size = 8
    input_size = (SIZE, SIZE)
    test_size = (SIZE, SIZE)
    ema_decay = 0.9
    warmup_pass = "off"
    dropout: float = 0.0

    tasks = [detection("detA", "a", 3, weight=2.0), detection("detB", "b", 2, shards=2), colours()]

    def get_backbone(self):
        return Backbone(self.dropout)

    def get_neck(self, channels):
        return Neck(channels)


def toy_exp(kind=ToyExp, **values):
    exp = kind()
    for name, value in {"exp_name": "toy", **values}.items():
        exp.set(name, value, "test")
    exp.validate()
    return exp


def digest(tensors):
    import hashlib

    total = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        total.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def largest_difference(first, second):
    """Over all tensors of two dictionaries (tensors or arrays)."""
    assert first.keys() == second.keys()
    return max(float((torch.as_tensor(first[k]).double() - torch.as_tensor(second[k]).double()).abs().max()) for k in first)
