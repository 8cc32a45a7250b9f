"""ST-22 and ST-13 on two processes: gradients are means over all pairs, and a bad step is left out everywhere."""

import numpy as np
import pytest
import torch
from dist import run_ranks
from track_run import STEPS, clips, gradients_of, same, train_rank


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return clips(tmp_path_factory.mktemp("clips"))


def test_two_processes_compute_the_gradient_of_one(data):
    """In the first phase and with mining and weights; the norms see no batch. One process with both halves is the judge."""
    starts = (0, 2 * STEPS)
    alone = gradients_of(str(data), {}, starts)
    for both in run_ranks(2, gradients_of, 180, str(data), {}, starts):
        for expected, found in zip(alone, both, strict=True):
            assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
            for name, gradient in expected.items():
                assert np.abs(found[name] - gradient.numpy()).max() <= 5e-6, name


def test_a_bad_step_on_one_process_is_left_out_on_both(data, tmp_path):
    values = {"bad_steps": (2,), "bad_rank": 1, "max_epoch": 1, "pairs_per_epoch": 12}  # not beside an epoch's end
    first, second = run_ranks(2, train_rank, 240, str(data), str(tmp_path), values)
    states = [{step: {k: torch.as_tensor(v) for k, v in s.items()} for step, s in r["after"].items()} for r in (first, second)]
    for rank, own in enumerate(states):
        assert same(own[1], own[2]), rank  # parameters and statistics
        assert not same(own[2], own[3], "head.")
    parameters = [n for n in states[0][3] if "running" not in n and "tracked" not in n]
    assert all(torch.equal(states[0][3][n], states[1][3][n]) for n in parameters)
    assert first["guard"]["skipped"] == second["guard"]["skipped"] == 1
