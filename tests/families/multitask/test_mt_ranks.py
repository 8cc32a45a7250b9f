"""MT-03 to MT-08, MT-10, MT-15, MT-24 and case X04: four processes do what one does."""

import pytest
import torch
from dist import run_ranks
from mt_ranks import VARIANTS, case_x04, four_ranks, gradients_of, linear_task, packed, run_variants
from mt_toy import largest_difference, make_data

from mmdet.families.multitask.groups import build_task_groups

BOUNDS = {name: 1e-12 if name.endswith("64") else 5e-5 for name in VARIANTS}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("mt"))


@pytest.fixture(scope="module")
def alone(data):
    return run_variants(data, list(VARIANTS))


@pytest.fixture(scope="module")
def ranks(data):
    return run_ranks(4, four_ranks, 240, data)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_four_processes_do_what_one_does(alone, ranks, variant):
    """MT-06, MT-07: weights, batch-norm statistics (MT-10), EMA and optimizer buffers after 20 steps."""
    one, four = alone[variant], ranks[0]["variants"][variant]
    bound = BOUNDS[variant]
    found = {part: largest_difference(one[part], four[part]) for part in ("model", "ema", "optimizer")}
    largest = max(float(v.abs().max()) for v in one["optimizer"].values())
    found["optimizer"] /= max(largest, 1.0) * (1 if bound < 1e-6 else 20)  # momentum: gradients are large, and rougher in float32
    assert all(value <= bound for value in found.values()), found
    start = run_difference(one, four)
    assert start > 1e-3  # something was learnt


def run_difference(one, four):
    return max(abs(a["loss/detA"] - one["scalars"][0]["loss/detA"]) for a in one["scalars"])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_shared_parameters_are_equal_bit_for_bit(ranks, variant):
    """MT-08, MT-15: before anything is brought together; and afterwards everything is."""
    found = [rank["variants"][variant]["before"] for rank in ranks]
    assert len({f["backbones"] for f in found}) == 1
    assert len({f["necks"] for f in found[:3]}) == 1  # the last rank's task has no neck
    assert len({rank["variants"][variant]["after"] for rank in ranks}) == 1


def test_clipping_was_active_and_a_rank_dependent_threshold_is_noticed(ranks):
    for name in ("adamw64", "adamw32", "global64"):
        steps = ranks[0]["variants"][name]["norms"]
        assert all(s["all" if name == "global64" else "backbone"] > 0.05 for s in steps)
    assert ranks[1]["wrong rule"] > 1e-6  # 0 with the right one; rank 1 trains the task of two shards


def test_running_statistics_differ_before_they_are_averaged(ranks):
    """MT-10; the parity afterwards is part of the first test."""
    first, other = (ranks[r]["variants"]["sgd64"]["before"]["running"] for r in (0, 3))
    assert largest_difference(first, other) > 1e-4


def test_logged_values_are_means_over_shards(alone, ranks):
    """MT-22: every rank knows them, and they are those of one process."""
    for rank in ranks:
        for one, four in zip(alone["sgd64"]["scalars"], rank["variants"]["sgd64"]["scalars"], strict=True):
            assert set(one) == set(four) and {"loss/detA", "loss/detB", "top1/cls", "grad_norm/backbone"} <= set(one)
            assert all(abs(one[k] - four[k]) <= 1e-6 * max(1, abs(one[k])) for k in one), (one, four)


@pytest.mark.parametrize("number", [0, 1])
def test_groups_have_the_members_of_the_layout(ranks, number):
    """MT-03."""
    specs = [linear_task(n, b, s) for n, s, b in zip("abc", (1, 2, 1), ((0, 0, 1), (0, 1, 0))[number], strict=True)]
    groups = build_task_groups(specs, 4)
    for rank, found in enumerate(ranks):
        members = found["members"][number]
        assert members == {key: list(groups.components[key]) for key in groups.owned(rank)}
    assert groups.components["backbone/0"] == ((0, 1, 2), (0, 3))[number]


def test_the_start_is_that_of_the_first_rank_of_each_group(ranks):
    """MT-04."""
    starts = [rank["start"] for rank in ranks]
    assert [s["backbones.0.w"] for s in starts[:3]] == [0.0] * 3 and starts[3]["backbones.1.w"] == 3.0
    assert starts[0]["heads.a.h"] == 100 and [s["heads.b.h"] for s in starts[1:3]] == [101, 101] and starts[3]["heads.c.h"] == 103


def test_a_rank_that_differs_is_named_on_all_ranks(ranks):
    """MT-05."""
    for rank in ranks:
        (layer, setting), seconds = rank["odd"]
        assert "component backbone/0 is not the same on all its ranks: rank 2 has 'backbones.0.extra.bias (2,)" in layer
        assert "the tasks and settings is not the same" in setting and "seed=" in setting
        assert seconds < 10


def test_case_x04(ranks):
    """Mean per task, then the weighted sum: 22 with weights 1 and 1, 11 with weights that add up to 1."""
    alone = case_x04()
    for rank in ranks:
        assert rank["x04"]["summed"]["backbones.0.w"] == 22.0 and rank["x04"]["mean"]["backbones.0.w"] == 11.0
        assert abs(rank["x04"]["end"]["backbones.0.w"] - alone["end"]["backbones.0.w"]) < 1e-12
    heads = [(rank["x04"]["end"]["heads.a.h"], rank["x04"]["end"]["heads.b.h"]) for rank in ranks]
    assert heads[0] == heads[1] and heads[2] == heads[3] and heads[0][0] != heads[2][0] and heads[0][1] != heads[2][1]
    assert heads[0][0] == pytest.approx(alone["end"]["heads.a.h"], abs=1e-12)
    assert heads[2][1] == pytest.approx(alone["end"]["heads.b.h"], abs=1e-12)


def test_parameters_without_a_gradient_anywhere_stay_without(ranks):
    alone = [rank["unused"] for rank in ranks]
    assert all(r["backbones.0.nobody"] is None for r in alone)
    assert all(r["backbones.0.only_a"] == 2.0 for r in alone)  # the other ranks' share is zero
    assert alone[0]["backbones.0.w"] == 2.0 + 9.0 and alone[0]["heads.b.h"] is None and alone[3]["heads.b.h"] == 9.0


def test_an_overflow_on_one_rank_is_one_on_all(ranks):
    assert all(rank["overflow"] == [True, False] for rank in ranks)


def test_top1_over_ranks(ranks):
    """MT-24."""
    assert [rank["top1"][0] for rank in ranks] == [75.0, 25.0, 75.0, 25.0]
    assert all(rank["top1"][1] == pytest.approx(50.0, abs=1e-9) for rank in ranks)


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_fewer_processes_than_shards(data, world):
    """Ranks with several shards, of several tasks, and not equally many."""
    truth = run_variants(data, ["sgd64", "global64", "adamw64"], steps=6)
    found = run_ranks(world, packed, 120, data)
    for name, one in truth.items():
        for part in ("model", "ema", "optimizer"):
            assert largest_difference(one[part], found[0][name][part]) <= 1e-12, (name, part)
        assert len({rank[name]["before"]["backbones"] for rank in found}) == 1
        assert len({rank[name]["after"] for rank in found}) == 1


def test_gradients_in_one_process_follow_the_formula():
    specs = [linear_task("a", shards=2, weight=3.0), linear_task("b", weight=1.0)]
    found = gradients_of(specs, {(0, 0): 1, (0, 1): 3, (1, 0): 10}, True)
    assert found["backbones.0.w"] == pytest.approx(0.75 * 2 + 0.25 * 10)
    assert found["heads.a.h"] == pytest.approx(0.75 * 2) and found["heads.b.h"] == pytest.approx(0.25 * 10)
    assert torch.get_num_threads() == 1
