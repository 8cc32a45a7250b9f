"""Figures of tracking against hand-made cases: ST-16, and VOT's run with resets."""

import math

import numpy as np
import pytest

from mmdet.families.siamese.track_metrics import (
    PRECISION_AT,
    RELATIVE_AT,
    accuracy_robustness,
    average_overlap,
    got10k_overlaps,
    one_pass,
    overlaps,
    run_with_resets,
)

TRUTH = np.tile([10.0, 20, 50, 60], (20, 1)) + np.arange(20)[:, None]
ALL = np.ones(20, bool)


def test_overlaps_by_hand():
    a = np.array([[0.0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 10], [5, 5, 5, 9], [0, 0, 4, 4]])
    b = np.array([[0.0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10], [5, 5, 5, 9], [4, 4, 0, 0]])
    assert overlaps(a, b) == pytest.approx([1, 1 / 3, 0, 0, 0])


def test_a_perfect_tracker():
    curves = one_pass(TRUTH, TRUTH, ALL)
    assert curves.auc == pytest.approx(20 / 21, abs=1e-12) and round(curves.auc, 5) == 0.95238
    assert (curves.precision == 1).all() and (curves.normalized == 1).all()
    assert average_overlap(got10k_overlaps(TRUTH, TRUTH, ALL, (200, 200))) == {"AO": 1.0, "SR50": 1.0, "SR75": 1.0}


def test_a_constant_overlap_of_three_quarters():
    found = TRUTH.copy()
    found[:, 2] -= 10  # 30 of 40 px
    assert overlaps(found, TRUTH) == pytest.approx(np.full(20, 0.75))
    assert round(one_pass(found, TRUTH, ALL).auc, 5) == 0.71429


@pytest.mark.parametrize(("distance", "counts"), [(20.0, 1.0), (20.01, 0.0)])
def test_twenty_px_count_and_a_hair_more_does_not(distance, counts):
    found = TRUTH + np.array([distance, 0, distance, 0])
    assert one_pass(found, TRUTH, ALL).precision[PRECISION_AT] == counts


def test_normalised_precision_by_axis():
    truth = np.tile([0.0, 0, 100, 10], (4, 1))
    shift = np.array([[20.0, 0], [0, 2], [0, 2.01], [15, 1.5]])  # 0.2, 0.2, 0.201 and sqrt(0.15^2 + 0.15^2) = 0.212 sides
    curves = one_pass(truth + np.tile(shift, 2), truth, np.ones(4, bool))
    assert curves.normalized[RELATIVE_AT] == 0.5 and curves.normalized[22] == 1.0


def test_frames_without_area_fail_and_absent_ones_are_left_out():
    truth = TRUTH[:4].copy()
    truth[1, 2] = truth[1, 0]  # no width
    present = np.array([True, True, True, False])
    curves = one_pass(np.where(np.isfinite(truth), truth, 0), truth, present)
    assert curves.auc == pytest.approx(20 / 21 * 2 / 3) and curves.precision[50] == pytest.approx(2 / 3)
    assert np.isnan(one_pass(truth, truth, np.zeros(4, bool)).auc)


def test_got10k_on_five_frames():
    """Frame 0 never counts, frame 3 is covered; overlaps 1, 0.5 (not above 0.5) and 0.8."""
    truth = np.tile([0.0, 0, 10, 10], (5, 1))
    found = np.array([[50.0, 50, 60, 60], [0, 0, 10, 10], [0, 0, 10, 5], [50, 50, 60, 60], [0, 0, 10, 8]])
    counted = np.array([True, True, True, False, True])
    result = average_overlap(got10k_overlaps(found, truth, counted, (100, 100)))
    assert result == pytest.approx({"AO": (1 + 0.5 + 0.8) / 3, "SR50": 2 / 3, "SR75": 2 / 3})
    assert counted[0]


def test_got10k_clips_both_boxes_to_the_image():
    truth = np.array([[0.0, 0, 1, 1], [-10, 0, 10, 10]])
    found = np.array([[0.0, 0, 1, 1], [-50, 0, 10, 10]])
    assert got10k_overlaps(found, truth, np.ones(2, bool), (100, 100)) == pytest.approx([1.0])


def test_nothing_to_judge_is_nan():
    assert all(math.isnan(v) for v in average_overlap(np.zeros(0)).values())


# -- VOT ----------------------------------------------------------------------------------------------------------------------


def reset_run(found, truth):
    """A tracker that says ``found[frame]``, and remembers where it was started."""
    return run_with_resets(lambda frame: frame, lambda state, frame: (state, found[frame]), truth)


def test_a_tracker_that_never_loses_is_started_once():
    truth = np.tile([0.0, 0, 10, 10], (30, 1))
    found = truth + np.array([0, 0, 0, -5.0])
    run = reset_run(found, truth)
    assert run.starts == [0] and run.failures == [] and np.isnan(run.overlap[0])
    assert run.accuracy() == pytest.approx(0.5) and np.isfinite(run.overlap[1:]).all()


def test_failures_start_again_five_frames_later_and_burn_in_does_not_count():
    truth = np.tile([0.0, 0, 10, 10], (40, 1))
    found = np.tile([0.0, 0, 10, 5], (40, 1))  # 0.5 ...
    found[1:10] = [0, 0, 10, 10]  # ... but 1 in the first burn-in
    found[12] = [50, 50, 60, 60]  # lost
    found[27:] = [0, 0, 10, 8]  # 0.8 from where the second burn-in is over
    run = reset_run(found, truth)
    assert run.starts == [0, 17] and run.failures == [12]
    assert np.isnan(run.overlap[12:18]).all()
    assert run.accuracy() == pytest.approx((2 * 0.5 + 13 * 0.8) / 15)  # frames 10, 11 and 27 to 39
    result = accuracy_robustness([run, reset_run(truth, truth)])
    assert result["accuracy"] == pytest.approx(((2 * 0.5 + 13 * 0.8) / 15 + 1) / 2)
    assert result["failures"] == 1 and result["failures_per_100"] == pytest.approx(100 / 80)


def test_a_failure_near_the_end_is_not_started_again():
    truth = np.tile([0.0, 0, 10, 10], (15, 1))
    found = truth.copy()
    found[12] += 100
    run = reset_run(found, truth)
    assert run.starts == [0] and run.failures == [12] and math.isfinite(run.accuracy())
