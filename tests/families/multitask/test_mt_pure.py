"""MT-01, MT-02, MT-12, MT-14: layout, weights, schedules and sampling as pure functions."""

import math
from collections import Counter

import numpy as np
import pytest

from mmdet.core import schedules
from mmdet.errors import UsageError
from mmdet.families.multitask.groups import OwnerMap, Unit, build_task_groups, place_shards
from mmdet.families.multitask.sampler import MODES, GivenIterationSampler
from mmdet.families.multitask.task import TaskSpec, check_specs, task_weights


def spec(name, shards=1, weight=1.0, share=None, **more):
    share = {"backbone": 0, "neck": 0} if share is None else share
    return TaskSpec(name, "classification", data=None, batch_size=2, head=list, shards=shards, weight=weight, share=share, **more)


def specs_of(shards=(1, 2, 1), backbones=(0, 0, 1)):
    rows = zip("abc", shards, backbones, strict=True)
    return [spec(name, count, share={"backbone": share}) for name, count, share in rows]


# -- MT-01 ------------------------------------------------------------------------------------------------------------------


def test_ranks_become_tasks_as_the_reference_lays_them_out():
    groups = build_task_groups(specs_of(), 4)
    assert groups.task_ranks == ((0,), (1, 2), (3,)) and groups.roots == (0, 1, 3)
    assert groups.components["backbone/0"] == (0, 1, 2) and groups.components["backbone/1"] == (3,)
    assert groups.components["head/b"] == (1, 2) and groups.shards == (1, 2, 1)
    for world, ranks in ((8, [(0, 1), (2, 3, 4, 5), (6, 7)]), (16, [tuple(range(4)), tuple(range(4, 12)), tuple(range(12, 16))])):
        groups = build_task_groups(specs_of(), world)
        assert list(groups.task_ranks) == ranks and groups.shards == tuple(world // 4 * s for s in (1, 2, 1))
        assert all(len(units) == 1 for units in groups.placement)


def test_a_number_of_processes_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match=r"6 processes.*\[1, 2, 1\].*1 to 4 processes or a multiple of 4"):
        build_task_groups(specs_of(), 6)


def test_fewer_processes_take_contiguous_shards():
    assert place_shards([1, 2, 1], 1) == [[Unit(0, 0), Unit(1, 0), Unit(1, 1), Unit(2, 0)]]
    assert place_shards([1, 2, 1], 2) == [[Unit(0, 0), Unit(1, 0)], [Unit(1, 1), Unit(2, 0)]]
    assert [len(units) for units in place_shards([1, 2, 1], 3)] == [1, 1, 2]
    groups = build_task_groups(specs_of(), 2)
    assert groups.task_ranks == ((0,), (0, 1), (1,)) and groups.components["backbone/0"] == (0, 1)
    assert groups.units_of("backbone/0", 0) == 2 and groups.units_of("backbone/0", 1) == 1


@pytest.mark.parametrize("world", range(1, 9))
def test_every_unit_is_on_exactly_one_rank(world):
    shards = [3, 1, 4]
    units = [u for rank in place_shards(shards, world) for u in rank]
    assert units == [Unit(t, s) for t, count in enumerate(shards) for s in range(count)]


def test_non_contiguous_shares():
    groups = build_task_groups(specs_of((1, 2, 1), (0, 1, 0)), 4)
    assert groups.components["backbone/0"] == (0, 3) and groups.components["backbone/1"] == (1, 2)


def test_names_have_one_owner():
    specs = [spec("a", share={"backbone": 0, "neck": 0, "head": 7}), spec("b", share={"backbone": 0, "head": 7}), spec("c")]
    owner = OwnerMap(specs)
    assert owner["backbones.0.stem.weight"] == "backbone/0" and owner["necks.0.x"] == "neck/0"
    assert owner["heads.a.fc.bias"] == "head/a" and owner["heads.c.fc.bias"] == "head/c"
    assert owner["criteria.b.margin"] == "task/b" and owner["own.c.weight"] == "task/c"
    with pytest.raises(KeyError, match="belongs to no component"):
        owner["heads.b.fc.bias"]  # b has a's head


# -- MT-02 ------------------------------------------------------------------------------------------------------------------


def test_weights_add_up_to_one():
    specs = [spec(n, weight=w) for n, w in zip("abc", (572, 300, 128), strict=True)]
    weights = task_weights(specs)
    assert abs(sum(weights) - 1) < 1e-12 and weights[0] == pytest.approx(0.572, abs=1e-15)
    assert task_weights(specs, normalize=False) == [572, 300, 128]


def test_shared_parts_have_one_setting():
    same = {"backbone": 0, "head": 0}
    with pytest.raises(UsageError, match="'a' and 'b' share head/a but give different lr_mults"):
        check_specs([spec("a", share=same, lr_mult=2.0), spec("b", share=same)])
    with pytest.raises(UsageError, match="share backbone/0 but give different backbones"):
        check_specs([spec("a", backbone=list), spec("b")])
    with pytest.raises(UsageError, match="share neck/0 but have different backbones"):
        check_specs([spec("a", share={"backbone": 0, "neck": 0}), spec("b", share={"backbone": 1, "neck": 0})])
    with pytest.raises(UsageError, match="'a' is given 2 times"):
        check_specs([spec("a"), spec("a")])
    with pytest.raises(UsageError, match="every weight is 0"):
        check_specs([spec("a", weight=0)])
    check_specs([spec("a", weight=0), spec("b")])


@pytest.mark.parametrize(
    "wrong",
    [{"name": "a.b"}, {"kind": "segmentation"}, {"weight": -1}, {"shards": 0}, {"batch_size": 0}, {"share": {"spine": 0}}]
    + [{"share": {"neck": 0}}, {"sampling": "fifo"}, {"kind": "detection"}, {"seed": -1}, {"lr_mult": 0}],
)
def test_a_wrong_value_is_named(wrong):
    values = {"name": "a", "kind": "classification", "data": None, "batch_size": 1, "head": list, **wrong}
    with pytest.raises(UsageError, match="task '.*': (" + next(iter(wrong)) + "|criterion)="):
        TaskSpec(**values)


# -- MT-12 ------------------------------------------------------------------------------------------------------------------

BASE, PEAK, WARM, MAX = 1e-5, 1e-3, 1500, 104816
POINTS = (0, WARM // 2, WARM - 1, WARM, (WARM + MAX) // 2, MAX)


def rise(it):
    return BASE + (PEAK - BASE) * it / WARM


def closed_forms():
    """Name -> (curve, formula of A8)."""
    progress = lambda it: (it - WARM) / (MAX - WARM)  # noqa: E731
    steps, mults = (20000, 80000), (0.1, 0.5)
    decay = lambda it: (0.1 if it >= 20000 else 1.0) * (0.5 if it >= 80000 else 1.0)  # noqa: E731
    half = lambda x: (1 + math.cos(math.pi * x)) / 2  # noqa: E731
    ramp = lambda it: min(0.01 + 0.99 * it / WARM, 1.0)  # noqa: E731
    freeze = 3000
    later = lambda it: rise(it - freeze) if it - freeze < WARM else PEAK * half((it - freeze - WARM) / (MAX - freeze - WARM))  # noqa: E731
    args = (BASE, PEAK, WARM)
    return {
        "step": (schedules.step_lr(*args, steps, mults), lambda it: rise(it) if it < WARM else PEAK * decay(it)),
        "cosine": (
            schedules.cosine_lr(*args, MAX, 1e-6),
            lambda it: rise(it) if it < WARM else 1e-6 + (PEAK - 1e-6) * half(progress(it)),
        ),
        "linear": (
            schedules.linear_lr(*args, MAX, 1e-6),
            lambda it: rise(it) if it < WARM else 1e-6 + (PEAK - 1e-6) * (1 - progress(it)),
        ),
        "hold": (schedules.hold_then_cosine_lr(*args, MAX, freeze), lambda it: PEAK if it < freeze else later(it)),
        "dual": (
            schedules.hold_then_cosine_lr(*args, MAX, freeze, first="cosine"),
            lambda it: PEAK * half(it / freeze) if it < freeze else later(it),
        ),
        "warmup_cosine": (schedules.warmup_times_cosine_lr(PEAK, MAX, WARM, 0.01), lambda it: ramp(it) * PEAK * half(it / MAX)),
        "warmup_poly": (
            schedules.warmup_times_poly_lr(PEAK, MAX, 0.9, WARM, 0.01),
            lambda it: ramp(it) * PEAK * (1 - it / MAX) ** 0.9,
        ),
    }


@pytest.mark.parametrize("name", list(closed_forms()))
def test_schedules_follow_their_closed_forms(name):
    curve, formula = closed_forms()[name]
    for it in (*POINTS, 1, 2999, 3000, 3000 + WARM, 20000, 80000):
        assert curve(it) == pytest.approx(formula(it), rel=1e-9, abs=1e-18), it


def test_the_releases_numbers():
    curve = schedules.cosine_lr(BASE, PEAK, WARM, MAX)
    wanted = {0: 1e-5, 750: 5.05e-4, 1500: 1e-3, 53158: 5.0e-4, 104816: 0.0}
    assert all(curve(it) == pytest.approx(lr, rel=1e-9, abs=1e-15) for it, lr in wanted.items())


def test_without_warm_up_the_peak_is_the_base():
    assert schedules.cosine_lr(0.1, 5.0, 0, 100)(0) == 0.1 and schedules.step_lr(0.1, 5.0, 0, (), ())(50) == 0.1
    assert schedules.warmup_times_cosine_lr(0.2, 100, 10, 0.5, "constant")(5) == pytest.approx(
        0.1 * (1 + math.cos(math.pi / 20)) / 2
    )


# -- MT-14 ------------------------------------------------------------------------------------------------------------------

LABELS = [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2]


def sampler(mode, n=11, iters=12, batch=2, world=2, rank=0, start=0, seed=3, labels=LABELS):
    return GivenIterationSampler(n, iters, batch, world, rank, seed, start, mode, labels, images_per_class=2)


@pytest.mark.parametrize("mode", MODES)
def test_resuming_is_skipping(mode):
    full = list(sampler(mode))
    assert len(full) == len(sampler(mode)) == 24 and set(full) <= set(range(11))
    for k in range(13):
        resumed = sampler(mode, start=k)
        assert list(resumed) == full[k * 2 :] and len(resumed) == 24 - 2 * k
    again = sampler(mode)
    assert again.batch(7).tolist() == full[14:16] and again.batch(1).tolist() == full[2:4]  # in any order
    assert list(sampler(mode, seed=4)) != full and list(sampler(mode, rank=1)) != full


def test_epoch_shuffle_deals_each_index_once_per_epoch():
    ranks = [list(GivenIterationSampler(10, 15, 1, 2, r, seed=5)) for r in range(2)]
    for epoch in range(3):
        assert sorted(i for r in ranks for i in r[5 * epoch : 5 * epoch + 5]) == list(range(10))
    assert ranks[0][:5] != ranks[0][5:10]


def test_global_shuffle_counts_as_the_reference_does():
    counts = Counter(i for r in range(2) for i in GivenIterationSampler(10, 6, 2, 2, r, seed=8, mode="global_shuffle"))
    assert counts == {i: 3 if i < 4 else 2 for i in range(10)}


def test_a_data_set_larger_than_the_run_is_not_cut():
    """The reference only ever saw the first images."""
    seen = [i for r in range(2) for i in GivenIterationSampler(100, 75, 2, 2, r)]
    assert Counter(seen) == dict.fromkeys(range(100), 3)
    part = [i for r in range(2) for i in GivenIterationSampler(100, 2, 2, 2, r, mode="global_shuffle")]
    assert len(set(part)) == 8 and max(part) > 7


def test_per_rank_walks_the_whole_data_set_on_every_rank():
    for rank in range(2):
        order = list(sampler("per_rank", iters=11, rank=rank))
        assert sorted(order[:11]) == sorted(order[11:]) == list(range(11))


def test_class_modes_balance_classes():
    labels = np.array([0] * 90 + [1] * 10)
    uniform = [labels[i] for i in GivenIterationSampler(100, 500, 4, 1, 0, 0, 0, "class_uniform", labels)]
    assert 0.45 < np.mean(uniform) < 0.55
    balanced = sampler("class_balanced", iters=200, world=1)
    assert balanced.period == 5 + 4 + 4  # 11 samples in 3 classes: the mean is 4 (rounded up)
    counts = Counter(LABELS[i] for i in list(balanced)[: 13 * 10])
    assert counts == {0: 50, 1: 40, 2: 40} and set(balanced) == set(range(11))
    chunks = sampler("class_chunks", iters=200, world=1)
    pairs = np.array(list(chunks)).reshape(-1, 2)
    assert chunks.period == 6 + 2 + 4 and all(LABELS[a] == LABELS[b] for a, b in pairs) and set(pairs.ravel()) == set(range(11))


def test_modes_that_need_classes_say_so():
    with pytest.raises(UsageError, match="'class_chunks' needs one class per sample"):
        GivenIterationSampler(5, 5, 1, mode="class_chunks")
    with pytest.raises(UsageError, match="'fifo': expected one of epoch_shuffle"):
        GivenIterationSampler(5, 5, 1, mode="fifo")
