"""Mosaic, affine map and mix-up: the same as paste-then-warp up to interpolation, boxes on the pixels, a function of the key."""

import cv2
import numpy as np
import pytest
from shared import SHARED, needs_shared

from mmdet.data.affine import RandomAffine, larger, map_boxes, mirror, paint, scaling
from mmdet.data.coco import CocoDataset
from mmdet.data.hsv import HSVJitter
from mmdet.data.loader import TrainDataset
from mmdet.data.mosaic import Mosaic, MosaicTrainPipeline, ScaledMixUp, mosaic_tiles
from mmdet.data.structures import Sample, SampleKey

STILL = RandomAffine(0.0, 0.0, (1.0, 1.0), 0.0)
SIZE = (160, 192)


def smooth(seed, size):
    """(H, W, 3) uint8 without detail, so that resampling once or twice makes no difference."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)


def rectangle(size, box, fill=0):
    """A white rectangle; its box is an object and a crowd region too."""
    image = np.full((*size, 3), fill, np.uint8)
    x1, y1, x2, y2 = box
    image[y1:y2, x1:x2] = 255
    return Sample.from_arrays(image, [box], [3], [box], image_id="r")


def white_box(image, threshold=200):
    seen = image.min(2) > threshold
    rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    return None if not len(rows) else np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


class Source:
    """Flat images of distinct colours, image k with k % 3 boxes and one crowd region."""

    def __init__(self, count=12, size=(48, 60)):
        self.count, self.size, self.loaded = count, size, []

    def __len__(self):
        return self.count

    def sample(self, index):
        image = np.full((*self.size, 3), (20 * index, 255 - 20 * index, 10 * index), np.uint8)
        boxes = [[5.0 + 9 * i, 6, 30 + 9 * i, 40] for i in range(index % 3)]
        return Sample.from_arrays(image, boxes, [index] * len(boxes), [[2, 2, 20, 20]], image_id=index)

    def annotation(self, index):
        return self.sample(index)

    def load(self, index):
        self.loaded.append(index)
        return self.sample(index)


# -- one resampling against paste-then-warp -------------------------------------------------------------------------------


def paste_then_warp(samples, size, rng, affine):
    """The mosaic by the book: resize, paste on a canvas of twice the size, warp. Also which pixels are near a seam."""
    height, width = size
    center = int(rng.uniform(0.5 * width, 1.5 * width)), int(rng.uniform(0.5 * height, 1.5 * height))
    matrix = affine.draw(rng, size)
    canvas = np.full((2 * height, 2 * width, 3), 114, np.uint8)
    owner = np.zeros((2 * height, 2 * width), np.uint8)
    for number, (sample, tile) in enumerate(zip(samples, mosaic_tiles([s.image for s in samples], center, size), strict=True)):
        h, w = (round(tile.place[i, i] * sample.image.shape[1 - i]) for i in (1, 0))
        left, top = tile.place[:2, 2].astype(int)
        x1, y1, x2, y2 = tile.rect
        small = cv2.resize(sample.image, (w, h))
        canvas[y1:y2, x1:x2] = small[y1 - top : y2 - top, x1 - left : x2 - left]
        owner[y1:y2, x1:x2] = number + 1
    centred = scaling(1, 1, (-0.5, -0.5)) @ matrix @ scaling(1, 1, (0.5, 0.5))
    warped = cv2.warpAffine(canvas, centred[:2], (width, height), borderValue=(114, 114, 114))
    owner = cv2.warpAffine(owner, centred[:2], (width, height), flags=cv2.INTER_NEAREST)
    reach = np.ones((2 * int(np.ceil(np.linalg.norm(matrix[:2, :2], 2))) + 3,) * 2, np.uint8)
    seam = cv2.dilate(owner, reach) != cv2.erode(owner, reach)
    seam[[0, 1, -1, -2]] = seam[:, [0, 1, -1, -2]] = True  # there may be one just outside
    return warped, seam, owner


@pytest.mark.parametrize("scale", [(0.5, 1.5), (0.1, 2.0)])
def test_one_warp_per_image_equals_paste_then_warp(scale):
    affine = RandomAffine(10.0, 0.1, scale, 2.0)
    samples = [Sample.from_arrays(smooth(k, size)) for k, size in enumerate([(97, 130), (160, 192), (300, 90), (64, 70)])]
    covered = 0
    for seed in range(30):
        out = Mosaic(affine)(samples, SIZE, np.random.default_rng(seed))
        expected, seam, owner = paste_then_warp(samples, SIZE, np.random.default_rng(seed), affine)
        difference = np.abs(out.image.astype(int) - expected).max(2)[~seam]
        # In strong reduction one averages pixels of the source that the other skips: a few grey levels more.
        assert np.percentile(difference, 99) <= 6 and difference.mean() < 1
        assert (out.image[(owner == 0) & ~seam] == 114).all()
        covered += (owner > 0).mean()
    assert covered > 10


def test_flat_images_differ_at_seams_only():
    """No pixel is lost between two tiles, none is mixed."""
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]
    samples = [Sample.from_arrays(np.full((100, 120, 3), c, np.uint8)) for c in colours]
    affine = RandomAffine(10.0, 0.1, (0.5, 1.5), 2.0)
    for seed in range(20):
        out = Mosaic(affine)(samples, SIZE, np.random.default_rng(seed)).image
        expected, seam, _ = paste_then_warp(samples, SIZE, np.random.default_rng(seed), affine)
        np.testing.assert_array_equal(out[~seam], expected[~seam])
        assert {tuple(c) for c in out.reshape(-1, 3).tolist()} <= {*colours, (114, 114, 114)}


def test_tiles_of_a_frame_share_its_pixels_exactly():
    frame = RandomAffine(10.0, 0.0, (0.8, 0.8), 2.0).draw(np.random.default_rng(5), SIZE)
    white = np.full((10, 10, 3), 255, np.uint8)
    counts, whole = np.zeros((*SIZE, 3), int), np.zeros((*SIZE, 3), np.uint8)
    for x1, x2 in ((20, 90), (90, 200)):
        for y1, y2 in ((15, 77), (77, 150)):
            part = np.zeros((*SIZE, 3), np.uint8)
            paint(part, white, frame, (x1, y1, x2, y2), frame)
            counts += part == 255
    paint(whole, white, frame, (20, 15, 200, 150), frame)
    np.testing.assert_array_equal(counts, whole == 255)
    assert counts.sum() > 10_000


def test_painting_on_itself_changes_nothing_and_outside_paints_nothing():
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    canvas = np.zeros_like(image)
    paint(canvas, image, np.eye(3))
    np.testing.assert_array_equal(canvas, image)
    for shift in ((50, 0), (0, -40), (-500, 0)):
        canvas = np.zeros_like(image)
        paint(canvas, image, scaling(1, 1, shift))
        assert not canvas.any()


# -- boxes ----------------------------------------------------------------------------------------------------------------


def test_boxes_and_crowd_regions_follow_the_pixels():
    """Rectangles wholly inside the frame; the box around a turned rectangle touches its corners."""
    affine = RandomAffine(10.0, 0.1, (0.5, 1.5), 2.0)
    compared = 0
    for seed in range(80):
        samples = [rectangle((150, 180), (40, 30, 130, 110))] + [Sample.from_arrays(np.zeros((60, 60, 3), np.uint8))] * 3
        out = Mosaic(affine, fill=0)(samples, (256, 256), np.random.default_rng(seed))
        seen = white_box(out.image, 127)
        if len(out.boxes):
            np.testing.assert_array_equal(out.boxes, out.ignore)
            assert out.labels.tolist() == [3] and out.boxes.dtype == np.float32
        if seen is not None and (seen[:2] > 1).all() and (seen[2:] < 255).all():
            moved = map_boxes(samples[0].boxes, out.transform, (-999, -999, 999, 999))[0]
            if np.abs(moved - out.boxes[0]).max() < 1e-3:  # not cut by its tile
                np.testing.assert_allclose(out.boxes[0], seen, atol=1.6)
                compared += 1
    assert compared > 10


def test_ids_weights_and_transform_are_those_of_the_parts():
    first = rectangle((60, 80), (10, 10, 70, 50)).replace(weights=np.array([0.5], np.float32))
    samples = [first, rectangle((60, 80), (10, 10, 70, 50)), *[Sample.from_arrays(np.zeros((9, 9, 3), np.uint8))] * 2]
    drawn = (Mosaic(STILL)(samples, (128, 128), np.random.default_rng(seed)) for seed in range(20))
    out = next(sample for sample in drawn if len(sample.boxes) == 2)
    assert (out.image_id, out.original_size) == ("r", (60, 80))
    assert out.weights.tolist() == [0.5, 1.0]
    center = out.transform @ (80, 60, 1)  # its lower right corner
    assert center[:2].tolist() == [int(c) for c in center[:2]] and (center[:2] >= 64).all() and (center[:2] < 192).all()


def test_what_the_canvas_cuts_to_a_line_is_gone():
    """A box without area would grow one again when it is turned."""
    affine = RandomAffine(10.0, 0.0, (1.0, 1.0), 2.0)
    thin = [rectangle((128, 128), (0, 0, 1, 128)), *[Sample.from_arrays(np.zeros((128, 128, 3), np.uint8))] * 3]
    for seed in range(30):
        out = Mosaic(affine)(thin, (128, 128), np.random.default_rng(seed))
        assert not len(out.boxes)  # one pixel wide: not longer than the smallest side
        assert (out.ignore[:, 2:] > out.ignore[:, :2]).all()
    assert larger(np.array([[0, 0, 1, 9], [0, 0, 1.01, 9]]), 1.0).tolist() == [False, True]


def test_mirror():
    sample = rectangle((40, 60), (5, 10, 25, 30))
    out = mirror(sample)
    np.testing.assert_array_equal(out.boxes[0], white_box(out.image))
    np.testing.assert_array_equal(out.ignore, out.boxes)
    assert out.boxes.tolist() == [[35, 10, 55, 30]]
    np.testing.assert_allclose(mirror(out).transform, np.eye(3))


# -- mix-up ---------------------------------------------------------------------------------------------------------------


def mix_by_steps(sample, other, rng, scale=(0.5, 1.5)):
    """Letterbox, resize, mirror, black beyond, cut, blend: one after the other."""
    height, width = sample.image.shape[:2]
    jitter, flip = rng.uniform(*scale), rng.random() < 0.5
    fit = min(height / other.image.shape[0], width / other.image.shape[1])
    h, w = int(other.image.shape[0] * fit), int(other.image.shape[1] * fit)
    box = np.full((height, width, 3), 114, np.uint8)
    box[:h, :w] = cv2.resize(other.image, (w, h))
    box = cv2.resize(box, (int(width * jitter), int(height * jitter)))
    box = box[:, ::-1] if flip else box
    left, top = (int(rng.integers(extra)) if extra > 0 else 0 for extra in (box.shape[1] - width, box.shape[0] - height))
    layer = np.zeros((max(height, box.shape[0]), max(width, box.shape[1]), 3), np.uint8)
    layer[: box.shape[0], : box.shape[1]] = box
    return np.rint(0.5 * sample.image + 0.5 * layer[top : top + height, left : left + width])


def test_mix_up_equals_its_steps():
    sample = Sample.from_arrays(smooth(1, SIZE), [[5, 5, 50, 60]], [1])
    for seed in range(30):
        size = [(120, 144), (160, 100), (70, 192), (320, 384)][seed % 4]
        other = Sample.from_arrays(smooth(seed, size), [[0, 0, size[1], size[0]]], [2])
        out = ScaledMixUp()(sample, other, np.random.default_rng(seed))
        expected = mix_by_steps(sample, other, np.random.default_rng(seed))
        difference = np.abs(out.image - expected).max(2)
        assert np.percentile(difference, 95) <= 3, seed  # the rest: the rim, which resizing twice blurs with the border
        assert out.boxes[0].tolist() == [5, 5, 50, 60] and out.labels.tolist() == [1, 2] and out.weights.tolist() == [1, 1]


def test_boxes_of_the_blended_image_follow_its_pixels():
    black = Sample.from_arrays(np.zeros((*SIZE, 3), np.uint8), [[5, 5, 50, 60]], [1], [[1, 1, 9, 9]])
    for seed in range(40):
        other = rectangle((100, 150), (20, 25, 110, 80))
        out = ScaledMixUp(fill=0)(black, other, np.random.default_rng(seed))
        np.testing.assert_allclose(out.boxes[1], white_box(out.image, 63), atol=1)
        np.testing.assert_array_equal(out.ignore[1], out.boxes[1])
        assert out.image.max() == 128 and out.ignore[0].tolist() == [1, 1, 9, 9]  # 127.5 rounds half-even


def test_what_is_cut_off_is_left_out():
    small = Sample.from_arrays(np.zeros((64, 64, 3), np.uint8), [[0, 0, 3, 3], [61, 61, 64, 64]], [0, 1], [[61, 61, 64, 64]])
    base = Sample.from_arrays(np.zeros((64, 64, 3), np.uint8), [[1, 1, 9, 9]], [5])
    counts = [len(ScaledMixUp(scale=(1.5, 1.5))(base, small, np.random.default_rng(s)).boxes) for s in range(20)]
    assert set(counts) == {1, 2}


# -- colours ---------------------------------------------------------------------------------------------------------------


def test_hsv_jitter_is_addition_in_hsv():
    image = smooth(3, (50, 70))
    changed = 0
    for seed in range(40):
        change = HSVJitter().draw(np.random.default_rng(seed))
        out = HSVJitter().image(image, np.random.default_rng(seed))
        if change is None:
            assert out is image
            continue
        changed += 1
        assert (np.abs(change) <= (5, 30, 30)).all()
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(np.int16) + change
        hsv[..., 0] %= 180
        expected = cv2.cvtColor(np.clip(hsv, 0, 255).astype(np.uint8), cv2.COLOR_HSV2RGB)
        np.testing.assert_array_equal(out, expected)
    assert 25 < changed < 40
    assert HSVJitter(prob=0.0).draw(np.random.default_rng(0)) is None


# -- the pipeline ---------------------------------------------------------------------------------------------------------


def pipeline(**changes):
    settings = {
        "affine": RandomAffine(scale=(0.5, 1.5)),
        "mixup": ScaledMixUp(),
        "hsv": HSVJitter(),
        "plain_from": 3,
    }
    return MosaicTrainPipeline(**{**settings, **changes})


def test_a_sample_is_a_function_of_its_key():
    data = TrainDataset(Source(), pipeline(), seed=4)
    key = SampleKey(5, 1, 17, (96, 128))
    first = data[key]
    for other in (SampleKey(0, 0, 0, (64, 64)), SampleKey(7, 2, 3, (160, 96))):
        assert data[other].image.shape == (*other.size, 3)
    np.random.seed(9)
    again = TrainDataset(Source(), pipeline(), seed=4)[key]
    for name in ("image", "boxes", "labels", "weights", "ignore", "transform"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.image, data[key._replace(position=18)].image)
    assert not np.array_equal(first.image, data[key._replace(epoch=0)].image)
    assert first.image_id == 5


def test_images_come_from_the_whole_set():
    source = Source()
    data = TrainDataset(source, pipeline(), seed=0)
    for position in range(60):
        data[SampleKey(0, 0, position, (64, 64))]
    assert set(source.loaded) == set(range(12))


def test_plain_from_its_epoch_on():
    source = Source()
    data = TrainDataset(source, pipeline(hsv=None), seed=0)
    for epoch in (3, 4, 100):
        source.loaded.clear()
        out = data[SampleKey(8, epoch, 2, (96, 96))]
        assert source.loaded == [8]
        inner = out.image[:76]  # 48 x 60 px fit as 76.8 x 96
        assert len(np.unique(inner.reshape(-1, 3), axis=0)) == 1 and (out.image[76:] == 114).all()
        np.testing.assert_allclose(np.sort(out.boxes[:, 1]), [9.6, 9.6], atol=1e-4)
        assert len(out.ignore) == 1
    source.loaded.clear()
    data[SampleKey(8, 2, 2, (96, 96))]
    assert len(source.loaded) >= 4


def test_the_border_keeps_its_grey_and_small_boxes_go_in_plain_samples():
    big = Sample.from_arrays(smooth(0, (200, 400)), [[0, 0, 3, 300], [10, 10, 100, 100]], [0, 1], [[0, 0, 2, 2]])
    out = pipeline()._plain(big, (64, 100), np.random.default_rng(1))
    assert (out.image[50:] == 114).all() and out.labels.tolist() == [1] and len(out.ignore) == 1


@pytest.mark.parametrize("prob", [0.0, 0.3])
def test_mosaic_happens_with_its_probability(prob):
    source, composed = Source(), 0
    data = TrainDataset(source, pipeline(mosaic_prob=prob), seed=0)
    for position in range(200):
        source.loaded.clear()
        data[SampleKey(0, 0, position, (32, 32))]
        composed += len(source.loaded) > 1
    assert abs(composed / 200 - prob) < 0.1


def test_a_set_without_boxes_is_legal():
    source = Source()
    source.sample = lambda index: Sample.from_arrays(np.zeros((20, 30, 3), np.uint8), image_id=index)
    data = TrainDataset(source, pipeline(), seed=0)
    out = data[SampleKey(0, 0, 0, (64, 64))]
    assert out.boxes.shape == (0, 4) and out.labels.shape == (0,) and out.ignore.shape == (0, 4)
    base = rectangle((40, 40), (4, 4, 30, 30))
    source.sample = lambda index: base if index == 0 else Sample.from_arrays(np.zeros((20, 30, 3), np.uint8))
    assert pipeline(mixup=ScaledMixUp())(source, SampleKey(0, 0, 0, (64, 64)), np.random.default_rng(0)).image.shape == (
        64,
        64,
        3,
    )


@needs_shared
def test_boxes_of_photographs_stay_inside_and_uncapped():
    source = CocoDataset(SHARED / "data/bccd/annotations/instances_train.json", SHARED / "data/bccd/images")
    data = TrainDataset(source, pipeline(affine=RandomAffine()), seed=0)
    most = 0
    for position in range(12):
        out = data[SampleKey(position, 0, position, (320, 352))]
        assert (out.boxes >= 0).all() and (out.boxes <= (352, 320, 352, 320)).all() and larger(out.boxes, 1.0).all()
        assert len(out.boxes) == len(out.labels) == len(out.weights)
        most = max(most, len(out.boxes))
    assert most > 50
