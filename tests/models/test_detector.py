"""The first layer and the composition."""

import pytest
import torch
from torch import nn

from mmdet.data.structures import Batch, Detections, ImageMeta, LossOutput
from mmdet.models.detector import Detector, Normalize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_pixels_are_normalised_by_hand():
    images = torch.tensor([255, 0, 51], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(1, 3, 2, 2)
    out = Normalize(MEAN, STD)(images)
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225]
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor(expected))
    assert out.dtype == torch.float32


def test_blue_first_in_0_to_255():
    images = torch.tensor([1, 2, 3], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert Normalize(scale=1.0, bgr=True)(images).flatten().tolist() == [3, 2, 1]


def test_pixels_beyond_the_unpadded_size_get_the_pad_value():
    images = torch.full((2, 3, 4, 6), 200, dtype=torch.uint8)
    out = Normalize(MEAN, STD, pad=0.0)(images, [ImageMeta((4, 6), (4, 6)), ImageMeta((3, 2), (3, 2))])
    assert (out[0] != 0).all()
    assert (out[1, :, :3, :2] != 0).all()
    assert out[1].count_nonzero() == 3 * 3 * 2
    assert images.eq(200).all()


def test_floating_images_pass_through_and_other_integers_do_not():
    images = torch.rand(1, 3, 2, 2)
    assert Normalize(MEAN, STD)(images) is images
    with pytest.raises(TypeError, match=r"uint8 .* or floating .* got torch.int64"):
        Normalize()(torch.zeros(1, 3, 2, 2, dtype=torch.int64))


def test_wrong_statistics_are_named():
    with pytest.raises(ValueError, match=r"std must be positive, got \(1.0, 0.0, 1.0\)"):
        Normalize(std=(1.0, 0.0, 1.0))
    with pytest.raises(ValueError, match="three values"):
        Normalize(mean=(0.5,))


def test_normalising_constants_are_in_no_checkpoint():
    assert not Normalize(MEAN, STD).state_dict()


class Identity(nn.Module):
    """A part that hands on what it gets, and remembers the memory format."""

    def forward(self, x):
        self.contiguous = x.is_contiguous() if isinstance(x, torch.Tensor) else None
        return x


class ToyHead(Identity):
    def decode(self, predictions):
        assert not torch.is_autocast_enabled("cpu")
        return predictions.new_zeros(len(predictions), 5, 4), predictions.new_zeros(len(predictions), 5, 2)


def toy_detector():
    def criterion(predictions, batch):
        return LossOutput({"loss": predictions.mean() + batch.epoch})

    def postprocess(boxes, scores, meta):
        return [Detections(b, s[:, 0], s[:, 0].long()) for b, s, _ in zip(boxes, scores, meta, strict=True)]

    return Detector(Normalize(), Identity(), Identity(), ToyHead(), criterion, postprocess)


def test_forward_by_mode():
    model = toy_detector()
    batch = Batch(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), epoch=3)
    with pytest.raises(ValueError, match="training needs batch.targets"):
        model(batch)
    batch.targets = object()
    assert model(batch).total == 3
    with torch.autocast("cpu", torch.bfloat16):
        found = model.eval()(batch)
    assert len(found) == 2
    assert found[0].boxes.shape == (5, 4)


def test_strided_images_reach_the_network_contiguous():
    model = toy_detector()
    model.predict(torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    assert model.backbone.contiguous
