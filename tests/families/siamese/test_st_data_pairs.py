"""Pairs: what each kind shows, that nothing is changed in place, and contiguous tensors (design/siamese.md, B18)."""

from dataclasses import replace

import numpy as np
import pytest
from track_toy import RED, red_palette

from mmdet.data.structures import SampleKey
from mmdet.families.siamese import paste
from mmdet.families.siamese.pairs import PairPipeline, PairSettings
from mmdet.families.siamese.paste import Scene
from mmdet.families.siamese.pictures import draw_pairs
from mmdet.families.siamese.readers import GOT10kFolder
from mmdet.families.siamese.sampler import PairSource, pair_loader
from mmdet.families.siamese.shapes import MovingShapes, encode_png, write_video
from mmdet.families.siamese.structures import collate_pairs

PLAIN = PairSettings(64, 128, negatives=(0, 0, 0, 0), pastes=(0, 0), distractor_prob=0, augment=None)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    MovingShapes(videos=6, frames=8, seed=1).write(root / "train")
    return PairSource([GOT10kFolder(root, "train", pairs_per_epoch=32)])


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Two videos, each a square of one colour on grey: red and green; a target can be told by its colour."""
    root = tmp_path_factory.mktemp("colours")
    (root / "train").mkdir()
    boxes = np.array([[100.0, 80, 130, 110], [140, 60, 170, 90], [40, 90, 70, 120]])
    for name, colour in (("red", (250, 10, 20)), ("green", (20, 240, 10))):
        palette = red_palette()
        palette[RED] = colour
        frames = np.full((3, 180, 240), 7, np.uint8)
        for frame, (x1, y1, x2, y2) in zip(frames, boxes.astype(int), strict=True):
            frame[y1:y2, x1:x2] = RED
        write_video(root / "train" / name, [encode_png(f, palette) for f in frames], boxes, np.full(3, 8), (240, 180))
    (root / "train" / "list.txt").write_text("red\ngreen\n")
    return PairSource([GOT10kFolder(root, "train")])


def make(source, settings, number, index=0):
    key = SampleKey(index, 0, number, (128, 128))
    return PairPipeline(settings)(source, key, np.random.default_rng([number, 5]))


def only(kind):
    """Settings under which all pairs are of one negative kind."""
    return replace(PLAIN, negatives=tuple(float(kind == i) for i in range(4)))


def shares(crop, box):
    """Parts of the pixels inside ``box`` that are red, and green."""
    x1, y1, x2, y2 = np.clip(np.rint(box), 0, len(crop)).astype(int)
    part = crop[y1:y2, x1:x2].reshape(-1, 3).astype(int)
    if not len(part):
        return 0.0, 0.0
    return np.mean((part - [250, 10, 20]).__abs__().sum(1) < 60), np.mean((part - [20, 240, 10]).__abs__().sum(1) < 60)


def test_plain_pairs_show_the_target_exactly_in_its_box(colours):
    for number in range(40):
        pair = make(colours, PLAIN, number)
        assert pair.positive and pair.position == number and pair.image_id.startswith("red:")
        assert pair.template.shape == (64, 64, 3) and pair.search.shape == (128, 128, 3)
        inside = np.clip(pair.box, 0, 128)
        assert shares(pair.search, inside)[0] > 0.85
        red = (np.abs(pair.search.astype(int) - [250, 10, 20]).sum(2) < 60).sum()
        area = (inside[2:] - inside[:2]).prod()
        assert red == pytest.approx(area, rel=0.12, abs=12)  # nothing of it lies outside
        assert shares(pair.template, np.array([16.0, 16, 48, 48]))[0] > 0.7  # up to 1.15 times smaller


def test_the_template_of_another_video(colours):
    pair = make(colours, only(0), 0)
    assert not pair.positive
    assert shares(pair.template, np.array([20.0, 20, 44, 44])) == (0, 1) and shares(pair.search, pair.box)[0] > 0.8


def test_a_window_away_from_the_target_shows_nothing_of_it(colours):
    made = [make(colours, only(1), number) for number in range(30)]
    away = [pair for pair in made if not pair.positive]
    assert len(away) > 10
    for pair in away:
        assert shares(pair.search, np.array([0.0, 0, 128, 128])) == (0, 0)
        assert (pair.box[:2] + pair.box[2:]) / 2 == pytest.approx([64, 64], abs=1e-3)


@pytest.mark.parametrize("kind", [2, 3])
def test_covered_targets(colours, kind):
    made = [make(colours, only(kind), number) for number in range(30)]
    covered = [pair for pair in made if not pair.positive]
    assert len(covered) >= 20
    for pair in covered:
        red, green = shares(pair.search, pair.box)
        assert red < 0.2 and (green > 0.6) == (kind == 3)


@pytest.mark.parametrize("pastes", [(1.0, 0.0), (0.0, 1.0)])
def test_moved_targets_are_where_the_box_says_and_nowhere_else(colours, pastes):
    for number in range(30):
        pair = make(colours, replace(PLAIN, pastes=pastes), number)
        assert pair.positive and shares(pair.search, pair.box)[0] > 0.85
        red = (np.abs(pair.search.astype(int) - [250, 10, 20]).sum(2) < 60).sum()
        assert red == pytest.approx((np.clip(pair.box, 0, 128)[2:] - np.clip(pair.box, 0, 128)[:2]).prod(), rel=0.15, abs=20)


def test_neighbours_are_distractors_beside_the_target(colours):
    found = 0
    for number in range(40):
        pair = make(colours, replace(PLAIN, distractor_prob=1.0), number)
        assert pair.positive and shares(pair.search, pair.box)[0] > 0.8
        for box in pair.distractors:
            found += 1
            assert shares(pair.search, box)[1] > 0.4  # one may lie over another
            overlap = np.minimum(box[2:], pair.box[2:]) - np.maximum(box[:2], pair.box[:2])
            assert overlap.min() <= 1.5  # px: boxes are at whole px, the target's is not
    assert found > 25


def test_kinds_come_as_often_as_stated(shapes):
    loader = pair_loader(shapes, PairPipeline(PairSettings(64, 128)), 16, workers=0)
    stream = loader.batches(0)
    positive = np.concatenate([next(stream).positive.numpy() for _ in range(40)])
    assert 0.66 <= positive.mean() <= 0.80  # nominally 0.70; what fails stays positive
    mild = np.mean([make(shapes, PairSettings(64, 128).for_validation(), n, n % 6).positive for n in range(200)])
    assert mild == pytest.approx(0.84, abs=0.08)


def test_one_video_alone_gives_pairs_too(tmp_path):
    MovingShapes(videos=1, frames=1).write(tmp_path / "train")
    source = PairSource([GOT10kFolder(tmp_path, "train")])
    for kind in range(4):
        make(source, only(kind), 0)
    for number in range(40):
        pair = make(source, PairSettings(64, 128), number)
        assert np.isfinite(pair.box).all()


def test_boxes_and_images_are_sound_and_contiguous(shapes):
    batch = next(pair_loader(shapes, PairPipeline(PairSettings(64, 128)), 32, workers=0).batches(0))
    for images, side in ((batch.templates, 64), (batch.searches, 128)):
        assert images.shape == (32, 3, side, side) and images.is_contiguous()
    assert (batch.boxes[:, 2:] > batch.boxes[:, :2]).all() and batch.boxes.isfinite().all()
    centers = (batch.boxes[:, :2] + batch.boxes[:, 2:])[batch.positive] / 2
    assert ((centers > -64) & (centers < 192)).all()
    valid = batch.distractors[batch.distractor_valid]
    assert ((valid >= 0) & (valid <= 128)).all()
    rows = draw_pairs(batch)
    assert len(rows) == 4 and all(row.dtype == np.uint8 and row.shape == (132, 4 * 196, 3) for row in rows)


def test_pairs_are_pure_functions_of_key_and_generator(shapes):
    one, other = (make(shapes, PairSettings(64, 128), 7, index=2) for _ in range(2))
    assert (one.search == other.search).all() and (one.template == other.template).all() and (one.box == other.box).all()
    assert collate_pairs([one]).image_ids == collate_pairs([other]).image_ids


# -- pasting ------------------------------------------------------------------------------------------------------------------


def scene(box=(40.0, 30.0, 60.0, 50.0), size=(120, 160)):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Scene(image, np.array(box), np.zeros((0, 4)))


def test_nothing_is_changed_in_place():
    before, rng = scene(), np.random.default_rng(1)
    copy, patch = before.image.copy(), np.zeros((15, 25, 3), np.uint8)
    for _ in range(20):
        paste.cover_with_background(rng, before)
        paste.cover_with_object(rng, before, patch)
        paste.move_target(rng, before)
        paste.move_target_to(rng, before, scene((5.0, 5.0, 20.0, 20.0)))
        paste.add_neighbour(rng, before, patch)
    assert (before.image == copy).all() and (before.box == [40, 30, 60, 50]).all()


def test_a_cover_hides_more_than_85_percent():
    rng, plain = np.random.default_rng(2), scene()
    white = replace(plain, image=np.full_like(plain.image, 255))
    for _ in range(50):
        covered = paste.cover_with_object(rng, white, np.zeros((9, 9, 3), np.uint8))
        assert (covered.image[30:50, 40:60] == 0).mean() > 0.85


def test_what_has_no_room_returns_none():
    rng = np.random.default_rng(3)
    full = scene((0.0, 0.0, 160.0, 120.0))
    assert paste.cover_with_background(rng, full) is None and paste.move_target(rng, full) is None
    assert paste.move_target_to(rng, full, scene(size=(50, 50))) is None
    assert paste.add_neighbour(rng, full, np.zeros((9, 9, 3), np.uint8)) is None
    outside = scene((-40.0, -40.0, -10.0, -10.0))
    assert paste.pixels_of(outside).size == 0 and paste.cover_with_object(rng, scene(), paste.pixels_of(outside)) is None


def test_free_places_touch_nothing_and_are_found_where_they_are_rare():
    rng, avoid = np.random.default_rng(4), np.array([[0.0, 0, 100, 60], [30, 70, 60, 100]])
    for _ in range(50):
        x, y = paste.free_place(rng, (100, 100), (20, 20), avoid)
        assert (x + 20 <= 30 or x >= 60) and y >= 60 and y + 20 <= 100 and x + 20 <= 100
    assert paste.free_place(rng, (100, 100), (20, 20), np.array([[0.0, 0, 100, 100]])) is None


def test_a_moved_box_keeps_its_fractions_of_px():
    moved = paste.move_target_to(np.random.default_rng(5), scene((40.3, 30.8, 61.1, 50.4)), scene((5.0, 5.0, 20.0, 20.0)))
    shift = moved.box - np.array([40.3, 30.8, 61.1, 50.4])
    assert shift == pytest.approx(np.rint(shift), abs=1e-9)
    assert moved.others.tolist() == [[5, 5, 20, 20]]
