"""The tracker's step on known maps (ST-17), and its rules for what cannot be."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from track_toy import ColourModel, red_frames, red_palette, straight_boxes

from mmdet.families.siamese.crop import context_side
from mmdet.families.siamese.track_metrics import overlaps
from mmdet.families.siamese.tracker import Tracker, TrackerSettings, choose

SETTINGS = TrackerSettings()


class Known(nn.Module):
    """Gives the maps that it was made with."""

    exemplar_size, search_size, stride = 64, 128, 8

    def __init__(self, score, ltrb):
        super().__init__()
        self.maps = torch.tensor(score, dtype=torch.float64)[None], torch.tensor(ltrb, dtype=torch.float64)[None]
        self.eval()

    def encode_template(self, templates):
        return templates.float().mean()

    def search(self, state, searches):
        return tuple(m.float() for m in self.maps)


def known_maps(row, column, size, score=0.9, n=16):
    """One good point among poor ones, all with boxes of ``size`` (w, h) px centred on them."""
    scores = np.full((n, n), 0.05)
    scores[row, column] = score
    half = np.array([size[0], size[1], size[0], size[1]]) / 2
    return scores, np.tile(half[:, None, None], (1, n, n))


IMAGE = np.full((300, 400, 3), 90, np.uint8)


def test_the_step_is_the_closed_form():
    scores, ltrb = known_maps(9, 6, (40.0, 25.0))
    ltrb[0, 9, 6] += 3  # the box's centre is 1.5 px left of its point
    tracker = Tracker(Known(scores, ltrb), SETTINGS)
    state = tracker.start(IMAGE, np.array([180.0, 120, 220, 160]))
    after = tracker.follow(state, IMAGE)
    scale = 64 / context_side(40, 40)
    width, height, old = 43.0, 25.0, 40 * scale
    padded = [math.sqrt((w + (w + h) / 2) * (h + (w + h) / 2)) for w, h in ((width, height), (old, old))]
    change = max(padded[0] / padded[1], padded[1] / padded[0]) * max(width / height, height / width)
    penalty = math.exp(-(change - 1) * 0.16)
    score = float(np.float32(0.9))
    rate = penalty * score * 0.30
    expected_center = (200 + ((6 - 7.5) * 8 - 1.5) / scale, 140 + (9 - 7.5) * 8 / scale)
    expected_size = (40 * (1 - rate) + width / scale * rate, 40 * (1 - rate) + height / scale * rate)
    assert (after.x, after.y) == pytest.approx(expected_center, abs=1e-6)
    assert (after.width, after.height) == pytest.approx(expected_size, abs=1e-6)
    expected = [expected_center[0] - expected_size[0] / 2, expected_center[1] - expected_size[1] / 2]
    assert after.box[:2] == pytest.approx(expected, abs=1e-6) and after.score == pytest.approx(0.9, abs=1e-6)


def test_the_penalty_is_1_when_nothing_changes():
    scores, ltrb = known_maps(8, 8, (32.0, 20.0))
    choice = choose(scores, ltrb, 8, np.array([32.0, 20.0]), SETTINGS)
    assert choice.penalty == 1.0 and choice.offset == pytest.approx([4, 4]) and choice.size == pytest.approx([32, 20])
    for other in ((64.0, 40.0), (20.0, 32.0), (16.0, 10.0)):
        assert choose(scores, ltrb, 8, np.array(other), SETTINGS).penalty < 1


def test_the_window_prefers_the_middle_and_reaches_the_border():
    scores, ltrb = np.full((16, 16), 0.5), np.full((4, 16, 16), 16.0)
    assert np.abs(choose(scores, ltrb, 8, np.array([32.0, 32]), SETTINGS).offset).max() == 4
    scores[0, 0] = 1.0
    strong = TrackerSettings(window_influence=0.1)
    assert choose(scores, ltrb, 8, np.array([32.0, 32]), strong).offset == pytest.approx([-60, -60])
    only_window = TrackerSettings(window_influence=1.0)
    scores[:], ltrb[:, 1:] = 0.5, np.nan  # only the border's first row is finite: its weight is not 0 everywhere
    assert choose(scores, ltrb, 8, np.array([32.0, 32]), only_window).offset == pytest.approx([-4, -60])


def test_points_lie_as_in_training():
    """32 x 32 points of stride 8: -124 to 124 from the crop's centre, training's 4 to 252 minus 128."""
    ltrb = np.full((4, 32, 32), 16.0)
    for row, column, offset in ((0, 0, (-124, -124)), (31, 0, (-124, 124)), (31, 31, (124, 124))):
        scores = np.zeros((32, 32))
        scores[row, column] = 1
        choice = choose(scores, ltrb, 8, np.array([32.0, 32]), TrackerSettings(window_influence=0.0))
        assert choice.offset == pytest.approx(offset)


def test_limits_of_centre_and_size():
    scores, ltrb = known_maps(0, 0, (600.0, 600.0), score=1.0)
    fast = TrackerSettings(window_influence=0.0, penalty_k=0.0, size_lr=1.0)
    tracker = Tracker(Known(scores, ltrb), fast)
    after = tracker.follow(tracker.start(IMAGE, np.array([0.0, 0, 200, 200])), IMAGE)
    assert (after.x, after.y) == (0, 0) and (after.width, after.height) == (400, 300)
    tracker = Tracker(Known(*known_maps(8, 8, (0.1, 0.1), score=1.0)), fast)
    after = tracker.follow(tracker.start(IMAGE, np.array([100.0, 100, 140, 140])), IMAGE)
    assert (after.width, after.height) == (10, 10)


def test_maps_that_are_not_finite_leave_the_target_where_it_was():
    scores, ltrb = known_maps(8, 8, (32.0, 32.0))
    box = np.array([100.0, 100, 140, 130])
    for spoilt in ((scores * np.nan, ltrb), (scores, ltrb * np.nan), (scores, np.zeros_like(ltrb))):
        tracker = Tracker(Known(*spoilt), SETTINGS)
        after = tracker.follow(tracker.start(IMAGE, box), IMAGE)
        assert after.box == pytest.approx(box) and after.score == 0
    scores[3, 3] = np.nan  # one point alone does not decide
    tracker = Tracker(Known(scores, ltrb), SETTINGS)
    assert tracker.follow(tracker.start(IMAGE, box), IMAGE).score == pytest.approx(0.9, abs=1e-6)


def test_starting_and_standing_still_gives_the_same_box():
    """One pixel convention: no shift by half a pixel at the start, none in each step."""
    box = np.array([100.25, 80.5, 131.75, 112.0])
    scale = 64 / context_side(31.5, 31.5)
    model = Known(*known_maps(8, 8, (31.5 * scale, 31.5 * scale), score=1.0))
    model.maps[1][0, :, 8, 8] += torch.tensor([4.0, 4, -4, -4], dtype=torch.float64)  # the point lies 4 px from the centre
    tracker = Tracker(model, TrackerSettings(window_influence=0.0))
    state = tracker.start(IMAGE, box)
    assert state.box == pytest.approx(box, abs=1e-12)
    for _ in range(10):
        state = tracker.follow(state, IMAGE)
    assert state.box == pytest.approx(box, abs=1e-4)


@pytest.mark.parametrize("box", [(10, 10, 10, 20), (10, 10, 5, 20), (500, 10, 540, 40), (-50, 0, -10, 20), (0, math.nan, 9, 9)])
def test_a_start_without_a_target_is_refused(box):
    tracker = Tracker(Known(*known_maps(8, 8, (32.0, 32.0))))
    with pytest.raises(ValueError, match="has no area inside the image of 400x300 px"):
        tracker.start(IMAGE, np.array(box, float))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="call model.eval"):
        Tracker(Known(*known_maps(8, 8, (32.0, 32.0))).train())


def test_it_follows_a_colour_and_makes_no_gradients():
    boxes = straight_boxes(25)
    frames = [red_palette()[frame] for frame in red_frames(boxes)]
    model = ColourModel().eval()
    for inference_mode in (True, False):
        tracker = Tracker(model, inference_mode=inference_mode)
        state = tracker.start(frames[0], boxes[0])
        assert state.template.is_inference() == inference_mode and not state.template.requires_grad
        found = [state.box]
        for frame in frames[1:]:
            state = tracker.follow(state, frame)
            found.append(state.box)
        assert overlaps(np.array(found), boxes).min() > 0.7
