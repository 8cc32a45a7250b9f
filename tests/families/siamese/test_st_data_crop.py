"""Crop geometry (ST-05), the draws of crops, and the maps and changes of augmentation."""

import math

import numpy as np
import pytest

from mmdet.families.siamese.augment import SearchAugment, flip_map, map_target, rotation_map
from mmdet.families.siamese.crop import CropDraw, Window, context_side, cut, map_box, mean_color

RNG = np.random.default_rng


@pytest.mark.parametrize("side", [1.0, 17.5, 64.0, 300.0])
def test_a_square_box_of_side_a_has_a_context_side_of_2a(side):
    assert context_side(side, side) == pytest.approx(2 * side, rel=1e-12)


def test_context_side_by_hand():
    assert context_side(40, 30) == pytest.approx(math.sqrt((40 + 35) * (30 + 35)))
    assert context_side(40, 30, context=0.0) == pytest.approx(math.sqrt(1200))


@pytest.mark.parametrize(("size", "factor"), [(128, 1.0), (256, 2.0)])
def test_the_target_is_64_px_in_both_crops(size, factor):
    """As a box, and as pixels of a white square on black."""
    image = np.zeros((400, 500, 3), np.uint8)
    image[150:190, 200:240] = 255
    box = np.array([200.0, 150, 240, 190])
    window = Window.around(box, factor * context_side(40, 40))
    mapped = map_box(box, window.transform(size))
    assert mapped[2:] - mapped[:2] == pytest.approx([64, 64], abs=1e-9)
    assert mapped == pytest.approx([size / 2 - 32] * 2 + [size / 2 + 32] * 2, abs=1e-9)
    crop = cut(image, window, size, np.zeros(3, np.uint8))
    row, column = crop[size // 2, :, 0].astype(float) / 255, crop[:, size // 2, 0].astype(float) / 255
    assert row.sum() == pytest.approx(64, abs=0.5) and column.sum() == pytest.approx(64, abs=0.5)
    centroid = (row * (np.arange(size) + 0.5)).sum() / row.sum()
    assert centroid == pytest.approx(size / 2, abs=0.05)


def test_a_box_comes_back_from_crop_to_image():
    rng = RNG(0)
    for _ in range(200):
        corner, sides = rng.uniform(-50, 600, 2), rng.uniform(3, 400, 2)
        box = np.concatenate([corner, corner + sides])
        window = CropDraw.for_search(0).draw(rng, box, 2.0, 0.5, epoch=9)
        transform = window.transform(256)
        assert map_box(map_box(box, transform), np.linalg.inv(transform)) == pytest.approx(box, abs=1e-3)


def test_flipping_twice_is_the_identity():
    box = np.array([10.3, 20.7, 91.2, 77.7])
    once = map_target(box, flip_map(128))
    assert once == pytest.approx([128 - 91.2, 20.7, 128 - 10.3, 77.7])
    assert map_target(once, flip_map(128)) == pytest.approx(box, abs=1e-4)


def test_a_turned_box_is_the_hull_of_its_edge_mid_points():
    box = np.array([44.0, 54.0, 84.0, 74.0])  # 40 x 20 about the middle of 128 px
    assert map_target(box, rotation_map(128, 90)) == pytest.approx([54, 44, 74, 84])
    turned = map_target(box, rotation_map(128, 30))
    half = (20 * math.cos(math.radians(30)), 20 * math.sin(math.radians(30)))
    assert turned == pytest.approx([64 - half[0], 64 - half[1], 64 + half[0], 64 + half[1]])


def test_beyond_the_image_is_the_mean_colour_and_inside_the_image_itself():
    image = RNG(1).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    fill = mean_color(image)
    assert np.abs(fill - image.reshape(-1, 3).mean(0)).max() <= 0.5
    crop = cut(image, Window(30, 25, 128, 128), 128, fill)  # scale 1, the image in the middle
    assert (crop[39:89, 34:94] == image).all()
    outside = np.ones((128, 128), bool)
    outside[39:89, 34:94] = False
    assert (crop[outside] == fill).all()
    assert (cut(image, Window(500, 500, 40, 40), 128, fill) == fill).all()


def test_a_stretched_window_leaves_bars_and_keeps_the_shape():
    image = np.full((200, 200, 3), 200, np.uint8)
    crop = cut(image, Window(100, 100, 100, 50), 100, np.zeros(3, np.uint8))
    assert (crop[25:75] == 200).all() and (crop[:25] == 0).all() and (crop[75:] == 0).all()


def test_the_crop_of_a_large_target_is_averaged_not_sampled():
    checker = (np.indices((512, 512)).sum(0) % 2 * 255).astype(np.uint8)
    crop = cut(np.repeat(checker[..., None], 3, 2), Window(256, 256, 512, 512), 64, np.zeros(3, np.uint8))
    assert np.abs(crop.astype(int) - 127).max() <= 2


def test_search_crops_keep_most_of_the_target_inside():
    """The box, 5 % of the crop's side smaller, lies in the window; scales stay in the stated range."""
    rng, draw = RNG(2), CropDraw.for_search(wide_from=5)
    for epoch, limits in ((0, (0.75, 1.35)), (5, (0.70, 1.40))):
        sides = []
        for _ in range(3000):
            box = np.array([100.0, 100, 100 + rng.uniform(10, 80), 100 + rng.uniform(10, 80)])
            usual = 2 * context_side(*(box[2:] - box[:2]))
            window = draw.draw(rng, box, 2.0, 0.5, epoch)
            sides += [window.width / usual, window.height / usual]
            low, high = window.box[:2], window.box[2:]
            slack = 0.05 * np.array([window.width, window.height]) + 1e-9
            assert (box[:2] >= low - slack).all() and (box[2:] <= high + slack).all()
        assert limits[0] - 1e-9 <= min(sides) < limits[0] + 0.03 and limits[1] - 0.03 < max(sides) <= limits[1] + 1e-9


def test_draws_keep_scale_and_centre_as_often_as_stated():
    rng, box = RNG(3), np.array([50.0, 60, 90, 90])
    usual = context_side(40, 30)
    for draw, factor in ((CropDraw.for_template(), 1.0), (CropDraw.for_search(), 2.0), (CropDraw.for_validation(), 2.0)):
        windows = [draw.draw(rng, box, factor, 0.5) for _ in range(4000)]
        kept = np.mean([w.width == w.height == factor * usual for w in windows])
        centred = np.mean([(w.x, w.y) == (70, 75) for w in windows])
        assert kept == pytest.approx(draw.keep_scale, abs=0.03) and centred == pytest.approx(draw.keep_center, abs=0.03)


def test_a_target_larger_than_its_window_stays_in_the_middle():
    box = np.array([0.0, 0, 1000, 10])  # the context side is far below 1000 px
    draw = CropDraw(keep_scale=1.0, scale=(1, 1), keep_center=0.0, shrink=0.0)
    window = draw.draw(RNG(0), box, 1.0, 0.5)
    assert window.width < 1000 and window.x == 500


def test_changes_of_pixels_touch_only_copies_and_happen_as_often_as_stated():
    crop = RNG(4).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    before, augment, rng = crop.copy(), SearchAugment(), RNG(5)
    box = np.array([20.0, 20, 40, 40])
    changed = 0
    for _ in range(2000):
        result = augment.change_pixels(rng, crop, box)
        assert result.shape == crop.shape and result.dtype == np.uint8
        changed += not np.array_equal(result, crop)
    assert (crop == before).all()
    assert changed / 2000 == pytest.approx(1 - (1 - 0.40) * (1 - 0.15), abs=0.05)
    maps = [augment.draw_map(rng, 64) for _ in range(4000)]
    assert np.mean([m is not None for m in maps]) == pytest.approx(0.13, abs=0.02)
