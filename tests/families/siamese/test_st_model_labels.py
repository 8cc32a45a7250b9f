"""ST-06 and ST-08: which points are labelled, and which negatives are mined. Random numbers depend on the place in the run."""

import numpy as np
import pytest
import torch

from mmdet.families.siamese.draw import Draw, choose, mix
from mmdet.families.siamese.labels import LabelSettings, inside_ellipse, mine_negatives, phase_one_labels, phase_two_labels
from mmdet.families.siamese.structures import PairBatch
from mmdet.models.points import make_points

POINTS = make_points([(32, 32)], [8]).points  # 4 ... 252 px
SETTINGS = LabelSettings()
DRAWS = 200
AT_128 = (96.0, 96.0, 160.0, 160.0)  # 64 x 64 at the middle of a search crop


def batch_of(box=AT_128, positive=True, distractors=(), count=DRAWS, first=0):
    """``count`` pairs that differ in their position only."""
    most = len(distractors)
    tiny = torch.zeros(count, 3, 8, 8, dtype=torch.uint8)
    return PairBatch(
        tiny,
        tiny,
        torch.tensor([box]).repeat(count, 1),
        torch.full((count,), positive),
        torch.tensor(distractors, dtype=torch.float32).reshape(1, most, 4).repeat(count, 1, 1),
        torch.ones(count, most, dtype=torch.bool),
        [""] * count,
        torch.arange(first, first + count),
    )


def drawn(batch, step=0, seed=0):
    return Draw(seed, step, batch.positions)


def first_phase(batch, **at):
    return phase_one_labels(POINTS, batch, SETTINGS, drawn(batch, **at))


def in_ellipse(box, radius):
    """(N,) bool by the definition, point by point."""
    x1, y1, x2, y2 = box
    rows = [
        ((x - (x1 + x2) / 2) / ((x2 - x1) / radius)) ** 2 + ((y - (y1 + y2) / 2) / ((y2 - y1) / radius)) ** 2 <= 1
        for x, y in POINTS.tolist()
    ]
    return torch.tensor(rows)


# -- random numbers -----------------------------------------------------------------------------------------------------------


def test_the_hash_is_its_source_s():
    """lowbias32 in plain integers, and no two of 100,000 numbers collide."""

    def by_hand(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    numbers = torch.cat([torch.arange(99_990), 2**32 - 1 - torch.arange(10)])
    assert mix(numbers).tolist() == [by_hand(n) for n in numbers.tolist()]
    assert len(set(mix(numbers).tolist())) == len(numbers)


def test_keys_are_uniform_and_integers_reach_their_bounds():
    draw = Draw(3, 7, torch.arange(64))
    keys = draw.keys(0, (1024,)).double() / 2**32
    assert keys.min() >= 0 and keys.max() < 1 and abs(keys.mean() - 0.5) < 0.005
    counts = np.histogram(keys.numpy(), 16, (0, 1))[0] / keys.numel() * 16
    assert np.abs(counts - 1).max() < 0.07  # 4.5 standard deviations
    lagged = torch.corrcoef(torch.stack([keys[:-1].flatten(), keys[1:].flatten()]))[0, 1]
    assert abs(lagged) < 0.02
    values = draw.integers(1, 9, 12, (50,))
    assert values.shape == (64, 50) and sorted(set(values.flatten().tolist())) == [9, 10, 11, 12]


def test_streams_steps_seeds_and_positions_differ():
    at = torch.arange(4)
    keys = [Draw(s, t, at).keys(k, (5,)) for s, t, k in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len({tuple(row.tolist()) for k in keys for row in k}) == 16


def test_numbers_belong_to_positions_not_to_batches():
    """So labels are the same for any number of ranks and micro-batches."""
    whole = batch_of()
    labels = first_phase(whole, step=5)
    parts = [first_phase(part, step=5) for part in whole.split(4)]
    assert torch.equal(labels, torch.cat(parts))
    assert torch.equal(labels, first_phase(whole, step=5)) and not torch.equal(labels, first_phase(whole, step=6))


def test_choose_takes_the_smallest_keys():
    mask = torch.tensor([[True, False, True, True], [False, False, False, True]])
    chosen = choose(mask, torch.tensor([2, 3]), torch.tensor([[9, 1, 4, 7], [0, 0, 0, 0]]))
    assert chosen.tolist() == [[False, False, True, True], [False, False, False, True]]


# -- ellipses -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "inner", "outer"),
    [(AT_128, 12, 52), ((64.0, 64.0, 192.0, 192.0), 52, 208), ((120.0, 120.0, 136.0, 136.0), 0, None)],
)
def test_points_in_ellipses(box, inner, outer):
    boxes = torch.tensor([box])
    assert inside_ellipse(POINTS, boxes, 4).sum() == inner
    assert outer is None or (
        inside_ellipse(POINTS, boxes, 2).sum() == outer and (~inside_ellipse(POINTS, boxes, 2)).sum() == 1024 - outer
    )
    for radius in (2, 3, 4):
        assert torch.equal(inside_ellipse(POINTS, boxes, radius)[0], in_ellipse(box, radius))


def test_a_box_without_area_holds_no_point():
    boxes = torch.tensor([[4.0, 4, 4, 4], [4, 4, 4, 60], [60, 60, 4, 4]])
    assert not inside_ellipse(POINTS, boxes, 2).any()


# -- the first phase ----------------------------------------------------------------------------------------------------------


def test_positive_pairs():
    labels = first_phase(batch_of())
    assert set(labels.unique().tolist()) == {-1, 0, 1}
    pos, neg = (labels == 1).sum(1), (labels == 0).sum(1)
    assert (pos == 12).all()  # as many as there are: fewer than 14
    assert neg.min() == 43 and neg.max() == 53 and len(neg.unique()) == 11
    assert not (labels == 1)[:, ~in_ellipse(AT_128, 4)].any() and not (labels == 0)[:, in_ellipse(AT_128, 2)].any()
    wide = first_phase(batch_of((64.0, 64.0, 192.0, 192.0)))
    pos = (wide == 1).sum(1)
    assert pos.min() == 14 and pos.max() == 18
    assert (wide == 1).any(0).sum() == 52  # every one of them is drawn some time


def test_the_nearest_point_is_positive_where_none_is_inside():
    labels = first_phase(batch_of((120.0, 120.0, 136.0, 136.0)))
    assert ((labels == 1).sum(1) == 1).all()
    places = POINTS[(labels[0] == 1)]
    assert ((places - 128).abs() == 4).all()
    outside = first_phase(batch_of((300.0, 100.0, 310.0, 110.0), count=2))
    assert POINTS[outside[0] == 1].tolist() == [[252.0, 108.0]] or POINTS[outside[0] == 1].tolist() == [[252.0, 100.0]]


def test_distractors_are_negative():
    other = (16.0, 16.0, 80.0, 80.0)
    labels = first_phase(batch_of(distractors=[other]))
    on_other = in_ellipse(other, 3)
    there, elsewhere = (labels[:, on_other] == 0).sum(1), (labels[:, ~on_other] == 0).sum(1)
    assert there.min() >= 9 and there.max() <= 12 + 16 and elsewhere.max() <= 16
    total = (labels == 0).sum(1)
    assert total.min() >= 12 + 9 - 9 and total.max() <= 12 + 16 and ((labels == 1).sum(1) == 12).all()


def test_the_target_wins_over_a_distractor_on_it():
    labels = first_phase(batch_of(distractors=[AT_128]))
    assert ((labels == 1).sum(1) == 12).all()


def test_distractors_that_are_padding_do_not_count():
    batch = batch_of(distractors=[(16.0, 16.0, 80.0, 80.0)])
    batch.distractor_valid[:] = False
    assert torch.equal(first_phase(batch), first_phase(batch_of()))


def test_negative_pairs():
    labels = first_phase(batch_of(positive=False))
    here = in_ellipse(AT_128, 2)
    inside, outside = (labels[:, here] == 0).sum(1), (labels[:, ~here] == 0).sum(1)
    assert inside.min() == 12 and inside.max() == 20 and (outside == 19).all() and not (labels == 1).any()


# -- the second phase ---------------------------------------------------------------------------------------------------------


def test_second_phase_before_mining():
    labels = phase_two_labels(POINTS, (batch := batch_of()), SETTINGS, drawn(batch))
    assert ((labels == 1).sum(1) == 12).all() and ((labels == 0).sum(1) == 40).all()
    assert (labels[:, ~in_ellipse(AT_128, 2)] == -1).all()  # no 0 outside
    wide = batch_of((64.0, 64.0, 192.0, 192.0))
    assert ((phase_two_labels(POINTS, wide, SETTINGS, drawn(wide)) == 1).sum(1) == 16).all()
    negative = batch_of(positive=False)
    assert (phase_two_labels(POINTS, negative, SETTINGS, drawn(negative)) == -1).all()


def mined(batch, scores, overlaps, seed=0):
    draw = drawn(batch, seed=seed)
    before = phase_two_labels(POINTS, batch, SETTINGS, draw)
    return before, mine_negatives(before, scores, overlaps, batch.positive, SETTINGS, draw)


@pytest.mark.parametrize("positive", [True, False])
def test_mined_negatives(positive):
    batch = batch_of(positive=positive)
    generator = torch.Generator().manual_seed(0)
    scores, overlaps = torch.rand(DRAWS, 1024, generator=generator), 0.3 * torch.rand(DRAWS, 1024, generator=generator)
    before, after = mined(batch, scores, overlaps)
    assert set(after.unique().tolist()) <= {-1, 0, 1}
    assert torch.equal(before == 1, after == 1)
    negative = after == 0
    assert (before[negative] == -1).all()  # outside of the target only
    if positive:
        assert (overlaps[negative] < 0.10).all()
    counts, hard = negative.sum(1), (negative & (scores >= 0.30)).sum(1)
    assert counts.min() >= 28 and counts.max() <= 52 and hard.min() >= 28
    assert torch.equal(after, mined(batch, scores, overlaps)[1])
    assert not torch.equal(after, mined(batch, scores, overlaps, seed=1)[1])


def test_without_hard_negatives_the_easy_ones_are_few():
    batch = batch_of()
    _, after = mined(batch, torch.full((DRAWS, 1024), 0.1), torch.zeros(DRAWS, 1024))
    counts = (after == 0).sum(1)
    assert counts.min() == 14 and counts.max() == 18


def test_hard_negatives_are_confident_and_beside_the_target():
    """Only four points qualify: they are all taken, whatever is drawn beside them."""
    batch = batch_of()
    scores, overlaps = torch.zeros(DRAWS, 1024), torch.zeros(DRAWS, 1024)
    scores[:, [0, 1, 2, 3]] = torch.tensor([0.30, 0.9, 0.9, 0.29])
    overlaps[:, 2] = 0.10
    _, after = mined(batch, scores, overlaps)
    assert (after[:, [0, 1]] == 0).all() and (after[:, 2] == -1).all() and (after[:, 3] == -1).any()


def test_points_inside_are_never_mined_however_small_their_overlap():
    """The reference takes them: its rule for easy negatives holds inside the target too."""
    batch = batch_of()
    overlaps = torch.full((DRAWS, 1024), 0.8)
    _, after = mined(batch, torch.ones(DRAWS, 1024), overlaps)
    assert not (after == 0).any()
    _, after = mined(batch, torch.ones(DRAWS, 1024), torch.zeros(DRAWS, 1024))
    assert not (after == 0)[:, in_ellipse(AT_128, 2)].any()


def test_predictions_that_are_no_numbers_break_nothing():
    batch = batch_of(count=4)
    nan = torch.full((4, 1024), torch.nan)
    before, after = mined(batch, nan, nan)
    assert torch.equal(before == 1, after == 1) and not (after == 0).any()
