"""Mix-up: pixels, boxes and weights of two samples; drawn from the key's generator over the whole set."""

import numpy as np
import pytest

from mmdet.data.loader import TrainDataset
from mmdet.data.mixup import MixUp, mix
from mmdet.data.structures import Sample, SampleKey
from mmdet.data.transforms import DetectionTrainPipeline


def flat_sample(value, size, boxes, labels, ignore=(), image_id=0):
    return Sample.from_arrays(np.full((*size, 3), value, np.uint8), boxes, labels, ignore, image_id)


class FlatSource:
    """Image k is of grey level 10 k and has k % 3 boxes."""

    def __init__(self, count):
        self.count, self.loaded = count, []

    def __len__(self):
        return self.count

    def load(self, index):
        self.loaded.append(index)
        boxes = [[2.0 * i, 3, 20 + i, 30] for i in range(index % 3)]
        return flat_sample(10 * index, (40, 50), boxes, [index] * len(boxes), image_id=index)


def generator(position):
    return np.random.default_rng(np.random.SeedSequence([0, 0, 0, position]))


def test_mix_by_hand():
    first = flat_sample(100, (30, 20), [[1, 2, 11, 12]], [4], [[0, 0, 5, 5]], image_id="a")
    second = flat_sample(201, (10, 40), [[3, 4, 33, 9], [0, 0, 40, 10]], [0, 1], [[6, 0, 9, 9]], image_id="b")
    first.weights[:] = 0.5
    out = mix(first, second, 0.25)
    assert out.image.shape == (30, 40, 3) and out.image.dtype == np.uint8
    assert np.unique(out.image[:10, :20]).tolist() == [176]  # 0.25 * 100 + 0.75 * 201 = 175.75
    assert np.unique(out.image[:10, 20:]).tolist() == [151]  # 150.75, from the second alone
    assert np.unique(out.image[10:, :20]).tolist() == [25]
    assert np.unique(out.image[10:, 20:]).tolist() == [0]
    assert out.boxes.tolist() == [[1, 2, 11, 12], [3, 4, 33, 9], [0, 0, 40, 10]]
    assert out.labels.tolist() == [4, 0, 1] and out.labels.dtype == np.int64
    assert out.weights.tolist() == [0.125, 0.75, 0.75] and out.weights.dtype == np.float32
    assert out.ignore.tolist() == [[0, 0, 5, 5], [6, 0, 9, 9]]
    assert (out.image_id, out.original_size) == ("a", (30, 20))
    assert first.weights.tolist() == [0.5] and np.unique(first.image).tolist() == [100]


def test_halves_round_to_even():
    assert np.unique(mix(flat_sample(1, (4, 4), [], []), flat_sample(2, (4, 4), [], []), 0.5).image).tolist() == [2]
    assert np.unique(mix(flat_sample(1, (4, 4), [], []), flat_sample(0, (4, 4), [], []), 0.5).image).tolist() == [0]


def test_images_without_boxes_mix_too():
    out = mix(flat_sample(1, (4, 4), [], []), flat_sample(2, (4, 4), [], []), 0.3)
    assert out.boxes.shape == (0, 4) and out.weights.shape == out.labels.shape == (0,)


def test_factor_and_partner_come_from_the_key_alone():
    source, load = FlatSource(9), MixUp()
    key = SampleKey(4, 0, 17, (32, 32))
    a, b = (load(source, key, generator(17)) for _ in range(2))
    assert np.array_equal(a.image, b.image) and np.array_equal(a.weights, b.weights)
    assert not np.array_equal(a.weights, load(source, key, generator(18)).weights) or source.loaded[-1] != source.loaded[1]


def test_partners_are_all_others_and_weights_follow_the_beta_distribution():
    source, load = FlatSource(5), MixUp()
    partners, factors = [], []
    for position in range(400):
        source.loaded.clear()
        out = load(source, SampleKey(2, 0, position, (32, 32)), generator(position))
        assert source.loaded[0] == 2
        partners.append(source.loaded[1])
        factors.append(float(out.weights[0]))  # image 2 has two boxes, and they come first
        others = np.float32(1) - np.float32(factors[-1])
        assert out.weights.tolist() == pytest.approx([factors[-1]] * 2 + [others] * (partners[-1] % 3), abs=1e-6)
    assert set(partners) == {0, 1, 3, 4}
    assert np.mean(factors) == pytest.approx(0.5, abs=0.03)
    assert np.var(factors) == pytest.approx(1.5**2 / (3**2 * 4), abs=0.01)  # of beta(1.5, 1.5)


def test_the_last_epochs_and_a_single_image_are_left_alone():
    load = MixUp(last_epochs_from=3)
    for source, epoch, mixed in ((FlatSource(5), 2, True), (FlatSource(5), 3, False), (FlatSource(1), 0, False)):
        out = load(source, SampleKey(0, epoch, 0, (32, 32)), generator(0))
        assert (len(source.loaded) == 2) is mixed
        if not mixed:
            assert np.unique(out.image).tolist() == [0] and out.weights.tolist() == []


def test_it_stands_before_the_pipeline():
    source = FlatSource(6)
    plain = DetectionTrainPipeline(expand_prob=0, crop=None, distort=None, flip_prob=0)
    mixed = DetectionTrainPipeline(expand_prob=0, crop=None, distort=None, flip_prob=0, load=MixUp())
    key = SampleKey(5, 0, 3, (64, 96))
    alone = TrainDataset(source, plain, seed=0)[key]
    both = TrainDataset(source, mixed, seed=0)[key]
    assert both.image.shape == alone.image.shape == (64, 96, 3)
    assert len(alone.boxes) == 2 and (alone.weights == 1).all()
    assert np.array_equal(both.boxes[:2], alone.boxes) and (both.weights < 1).all()
    assert len(np.unique(both.image)) == 1 and both.image[0, 0, 0] != 50


@pytest.mark.parametrize("wrong", [(0, 1), (1, -2)])
def test_beta_needs_positive_parameters(wrong):
    with pytest.raises(ValueError, match="positive alpha and beta"):
        MixUp(*wrong)
