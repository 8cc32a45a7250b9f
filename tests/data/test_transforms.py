"""Boxes follow pixels; colours stay what the matrix says; crowd regions survive."""

import cv2
import numpy as np
import pytest

from mmdet.data.structures import Sample, SampleKey
from mmdet.data.transforms import (
    INTERPOLATIONS,
    ColourDistortion,
    DetectionTrainPipeline,
    RandomCrop,
    ResizeTransform,
    Window,
    apply_colour,
    draw_expand,
    hue_matrix,
    move_boxes,
    saturation_matrix,
)

BLACK = (0, 0, 0)


def rectangle_sample(box=(120, 90, 330, 240), size=(400, 600)):
    """A white rectangle on black, its box an object and a crowd region too."""
    image = np.zeros((*size, 3), np.uint8)
    x1, y1, x2, y2 = box
    image[y1:y2, x1:x2] = 255
    return Sample.from_arrays(image, [box], [3], [box], image_id=8)


def white_box(image):
    """xyxy px of the pixels that are more white than black, None without any."""
    rows, columns = np.flatnonzero((image[..., 0] > 127).any(1)), np.flatnonzero((image[..., 0] > 127).any(0))
    return None if not len(rows) else np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_boxes_follow_the_pixels(interpolation):
    pipeline = DetectionTrainPipeline(distort=None, fill=BLACK, random_interpolation=False, interpolation=interpolation)
    sample, kept = rectangle_sample(), 0
    for seed in range(120):
        out = pipeline.transform(sample, (224, 288), np.random.default_rng(seed))
        assert out.image.shape == (224, 288, 3)
        seen = white_box(out.image)
        if seen is not None:
            np.testing.assert_allclose(out.ignore, [seen], atol=1)
        if len(out.boxes):
            kept += 1
            np.testing.assert_allclose(out.boxes[0], seen, atol=1)
            assert out.labels.tolist() == [3] and out.weights.tolist() == [1]
    assert kept == 120  # the only box is always kept by a crop that it constrains


def test_the_transform_maps_the_file_to_the_network():
    pipeline, sample = DetectionTrainPipeline(), rectangle_sample()
    mirrored = 0
    for seed in range(50):
        out = pipeline.transform(sample, (160, 224), np.random.default_rng(seed))
        corners = np.array([[120, 90, 1], [330, 240, 1]]) @ out.transform.T
        moved = np.concatenate([corners[:, :2].min(0), corners[:, :2].max(0)])
        np.testing.assert_allclose(out.boxes[0], np.clip(moved, 0, [224, 160, 224, 160]), atol=1e-3)
        mirrored += out.transform[0, 0] < 0
        assert out.original_size == (400, 600) and out.image_id == 8
    assert 10 < mirrored < 40


def test_one_resampling_equals_the_steps_one_by_one():
    """Distort, expand on a canvas, crop, mirror, resize: done naively with the same draws, the same pixels."""
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    sample = Sample.from_arrays(image, [[20, 20, 80, 70]], [0])
    fill = (123, 116, 103)
    pipeline = DetectionTrainPipeline(fill=fill, random_interpolation=False, interpolation=cv2.INTER_LINEAR)
    for seed in range(40):
        out = pipeline.transform(sample, (64, 96), np.random.default_rng(seed))
        draws = np.random.default_rng(seed)
        matrix = ColourDistortion().draw(draws)
        canvas_window = draw_expand(draws, 120, 90, 0.5, 4.0)
        window = RandomCrop().draw(draws, canvas_window, sample.boxes)
        flip = draws.random() < 0.5
        canvas = np.empty((canvas_window.height, canvas_window.width, 3), np.uint8)
        canvas[:] = fill
        coloured = image if matrix is None else apply_colour(image, matrix)
        canvas[-canvas_window.y : 90 - canvas_window.y, -canvas_window.x : 120 - canvas_window.x] = coloured
        x, y = window.x - canvas_window.x, window.y - canvas_window.y
        crop = canvas[y : y + window.height, x : x + window.width]
        expected = cv2.resize(crop, (96, 64), interpolation=cv2.INTER_LINEAR)
        np.testing.assert_array_equal(out.image, expected[:, ::-1] if flip else expected)


def test_crowd_regions_survive_without_constraining_the_crop():
    pipeline = DetectionTrainPipeline(distort=None, fill=BLACK)
    image = np.zeros((200, 300, 3), np.uint8)
    image[10:60, 200:290] = 255
    sample = Sample.from_arrays(image, [[20, 100, 120, 180]], [0], [[200, 10, 290, 60]])
    visible = 0
    for seed in range(100):
        out = pipeline.transform(sample, (160, 160), np.random.default_rng(seed))
        seen = white_box(out.image)
        if seen is not None:
            visible += 1
            np.testing.assert_allclose(out.ignore, [seen], atol=1.5)
        assert len(out.boxes) == 1
    assert 30 < visible < 100


def test_images_without_boxes_are_not_cropped():
    pipeline = DetectionTrainPipeline(distort=None, expand_prob=0, flip_prob=0)
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for seed in range(20):
        out = pipeline.transform(Sample.from_arrays(image), (40, 40), np.random.default_rng(seed))
        np.testing.assert_array_equal(out.image, image)
        assert out.boxes.shape == (0, 4) and out.labels.shape == (0,) and out.weights.shape == (0,)


def test_boxes_whose_centre_is_outside_and_tiny_ones_are_left_out_with_their_labels():
    boxes = [[0, 0, 60, 60], [60, 60, 100, 100], [20, 20, 20.5, 90]]
    sample = Sample.from_arrays(np.zeros((100, 100, 3), np.uint8), boxes, [0, 1, 2])
    pipeline = DetectionTrainPipeline(distort=None, expand_prob=0, flip_prob=0, crop=_FixedCrop(Window(0, 0, 70, 70)))
    out = pipeline.transform(sample, (70, 70), np.random.default_rng(0))
    assert out.labels.tolist() == [0] and out.boxes.tolist() == [[0, 0, 60, 60]]
    out = pipeline.transform(sample, (700, 700), np.random.default_rng(0))
    assert out.labels.tolist() == [0, 2]  # now five pixels wide
    out = pipeline.transform(sample.replace(boxes=sample.boxes + 20), (70, 70), np.random.default_rng(0))
    assert out.boxes.tolist() == [[20, 20, 70, 70]]  # clipped to the window


class _FixedCrop:
    def __init__(self, window):
        self.window = window

    def draw(self, rng, canvas, boxes):
        return self.window


def test_crops_obey_their_threshold():
    """With one threshold: some box has that IoU with the window, some centre is inside; or nothing was cropped."""
    canvas, boxes = Window(-50, -30, 500, 400), np.array([[10.0, 20, 210, 220], [200, 150, 380, 330]])
    for threshold in (0.0, 0.3, 0.5):
        crop, cropped = RandomCrop(thresholds=(threshold,)), 0
        for seed in range(100):
            window = crop.draw(np.random.default_rng(seed), canvas, boxes)
            if window == canvas:
                continue
            cropped += 1
            x1, y1, x2, y2 = window.x, window.y, window.x + window.width, window.y + window.height
            assert canvas.x <= x1 and canvas.y <= y1 and x2 <= canvas.x + 500 and y2 <= canvas.y + 400
            common = [max(0, min(x2, b[2]) - max(x1, b[0])) * max(0, min(y2, b[3]) - max(y1, b[1])) for b in boxes]
            areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in boxes]
            ious = [c / (a + window.width * window.height - c) for c, a in zip(common, areas)]
            centres = [((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in boxes]
            assert max(ious) >= threshold and any(x1 < cx < x2 and y1 < cy < y2 for cx, cy in centres)
            ratio = (window.width / 500) / (window.height / 400)
            assert 0.48 <= ratio <= 2.1 and window.width * window.height >= 0.085 * 500 * 400  # 0.3 squared, whole pixels
        assert 25 < cropped < 80  # "no crop" comes first half the time


def test_expansion_holds_the_image_and_its_ratio_is_uniform():
    rng = np.random.default_rng(0)
    windows = [draw_expand(rng, 100, 50, 0.5, 4.0) for _ in range(2000)]
    changed = [w for w in windows if w.width > 100]
    assert 900 < len(changed) < 1100
    for w in changed:
        assert w.x <= 0 <= w.width - 100 + w.x and w.y <= 0 <= w.height - 50 + w.y
    ratios = np.array([w.width / 100 for w in changed])
    assert abs(ratios.mean() - 2.5) < 0.1 and ratios.max() <= 4 and abs(np.percentile(ratios, 25) - 1.75) < 0.15


def test_colours_by_hand():
    pixel = np.array([[[200, 100, 50]]], np.uint8)
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    half = apply_colour(pixel, saturation_matrix(0.5)[:3])
    np.testing.assert_array_equal(half[0, 0], np.rint(0.5 * np.array([200, 100, 50]) + 0.5 * luma))
    np.testing.assert_array_equal(apply_colour(pixel, hue_matrix(0)[:3]), pixel)
    turned = apply_colour(pixel, hue_matrix(18)[:3])[0, 0].astype(float)
    assert abs(turned @ [0.299, 0.587, 0.114] - luma) < 1 and np.abs(turned - [200, 100, 50]).max() > 10
    grey = np.full((1, 1, 3), 90, np.uint8)
    np.testing.assert_allclose(apply_colour(grey, hue_matrix(18)[:3]), grey, atol=1)


def test_rounding_is_half_even_and_values_saturate():
    values = np.array([[[1, 3, 5]]], np.uint8)
    assert apply_colour(values, np.diag([0.5, 0.5, 0.5, 1])[:3]).tolist() == [[[0, 2, 2]]]
    double = np.diag([2.0, -1.0, 60.0, 1])[:3]
    assert apply_colour(values, double).tolist() == [[[2, 0, 255]]]


def test_each_distortion_happens_half_of_the_time():
    rng = np.random.default_rng(0)
    drawn = [ColourDistortion().draw(rng) for _ in range(3000)]
    assert 0.04 < np.mean([m is None for m in drawn]) < 0.09  # (1/2)^4
    assert 0.45 < np.mean([m is not None and m[0, 3] != 0 for m in drawn]) < 0.55  # brightness adds
    contrast_only = ColourDistortion(prob=1.0, hue=0, saturation=(1, 1), brightness=(0, 0))
    factors = [contrast_only.draw(rng)[0].sum() for _ in range(500)]
    assert min(factors) >= 0.49 and max(factors) <= 1.51 and abs(np.mean(factors) - 1) < 0.05


def test_flip_of_boxes_is_a_reflection():
    mirror = np.array([[-2.0, 0, 100], [0, 2, 0], [0, 0, 1]])
    assert move_boxes(np.array([[5.0, 5, 10, 20]]), mirror, (100, 100)).tolist() == [[80, 10, 90, 40]]


def test_evaluation_resize():
    sample = rectangle_sample()
    out = ResizeTransform((320, 320))(sample)
    assert out.image.shape == (320, 320, 3)
    np.testing.assert_allclose(out.boxes, [[120 * 320 / 600, 90 * 0.8, 330 * 320 / 600, 240 * 0.8]], rtol=1e-6)
    np.testing.assert_allclose(white_box(out.image), out.boxes[0], atol=1)
    np.testing.assert_allclose(out.transform, np.diag([320 / 600, 0.8, 1]))
    np.testing.assert_array_equal(out.image, cv2.resize(sample.image, (320, 320), interpolation=cv2.INTER_CUBIC))


def test_the_same_key_gives_the_same_sample_and_input_stays_untouched():
    class Source:
        def load(self, index):
            return rectangle_sample()

    pipeline = DetectionTrainPipeline()
    first, second = (pipeline(Source(), SampleKey(0, 1, 2, (96, 96)), np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first.image, second.image)
    np.testing.assert_array_equal(first.boxes, second.boxes)
    sample = rectangle_sample()
    pipeline.transform(sample, (96, 96), np.random.default_rng(3))
    np.testing.assert_array_equal(sample.image, rectangle_sample().image)
