"""A tracker that needs no training (it looks for the template's colour) and small videos for it."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from mmdet.families.siamese.shapes import encode_png, write_video

RED, GREY = 15, 7


class ColourModel(nn.Module):
    """Scores cells by how near their colour is to that of the template's middle; all boxes have the template's target size."""

    exemplar_size, search_size, stride = 64, 128, 8

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.BatchNorm2d(3)
        self.calls = []

    def encode_template(self, templates):
        assert templates.dtype == torch.uint8 and templates.shape[1:] == (3, 64, 64) and templates.is_contiguous()
        self.calls.append((self.training, torch.is_grad_enabled()))
        return templates[:, :, 28:36, 28:36].float().mean((2, 3))

    def search(self, state, searches):
        assert searches.dtype == torch.uint8 and searches.shape[1:] == (3, 128, 128) and searches.is_contiguous()
        near = (searches.float() - state[:, :, None, None]).abs().sum(1, keepdim=True) < 60
        # Of the target, 32 px wide in the crop, around each point: the part that has its colour.
        filled = nn.functional.avg_pool2d(near.float(), 32, stride=8, padding=16, count_include_pad=True)[:, 0, :16, :16]
        filled = (filled + torch.roll(filled, (-1, -1), (1, 2))) / 2  # points lie at 4, 12, ...: between the windows' centres
        return filled.clamp(0, 1) * self.gain, torch.full((len(filled), 4, 16, 16), 16.0)


COLOUR_EXP = """
from track_toy import ColourModel
from mmdet.families.siamese.data_exp import TrackDataExp


class Exp(TrackDataExp):
    exemplar_size = 64
    search_size = 128

    def get_model(self):
        return ColourModel()
"""


def red_palette():
    palette = np.full((16, 3), 128, np.uint8)
    palette[RED] = (250, 10, 20)
    return palette


def straight_boxes(frames, start=(20.0, 30.0), step=(2.0, 1.0), size=(24.0, 24.0)):
    """(F, 4) xyxy of a box that moves by ``step`` in each frame."""
    corner = np.array(start) + np.arange(frames)[:, None] * np.array(step)
    return np.concatenate([corner, corner + np.array(size)], 1)


def red_frames(boxes, size=(160, 120)):
    """Palette indices (F, H, W) of a red rectangle on grey; boxes at whole px."""
    frames = np.full((len(boxes), size[1], size[0]), GREY, np.uint8)
    for frame, (x1, y1, x2, y2) in zip(frames, np.rint(boxes).astype(int), strict=True):
        frame[max(y1, 0) : y2, max(x1, 0) : x2] = RED
    return frames


def write_red_videos(root: Path, lengths=(12, 20, 1), split="val", size=(160, 120)):
    """Videos ``red_0`` ... in GOT-10k's layout; returns the boxes of each."""
    (root / split).mkdir(parents=True)
    all_boxes = []
    for number, frames in enumerate(lengths):
        boxes = straight_boxes(frames, start=(20 + 10 * number, 30))
        images = [encode_png(frame, red_palette()) for frame in red_frames(boxes, size)]
        write_video(root / split / f"red_{number}", images, boxes, np.full(frames, 8), size)
        all_boxes.append(boxes)
    (root / split / "list.txt").write_text("".join(f"red_{n}\n" for n in range(len(lengths))))
    return all_boxes
