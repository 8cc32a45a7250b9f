"""The helper that the tests of several processes stand on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from dist import RankFailedError, run_ranks


def total(start):
    value = torch.full((2,), float(start + dist.get_rank()))
    dist.all_reduce(value)
    return {"sum": value, "threads": torch.get_num_threads()}


def fail_on_one(how):
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "exit":
            os._exit(7)
        time.sleep(600)
    dist.barrier()


def test_results_come_back_by_rank():
    answers = run_ranks(2, total, 60, 3)
    assert [a["sum"].tolist() for a in answers] == [[7.0, 7.0]] * 2 and answers[0]["threads"] == 1
    assert run_ranks(1, total, 60, 3)[0]["sum"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", RankFailedError, "boom"),
        ("exit", RankFailedError, "rank 1 ended without a word, exit code 7"),
        ("hang", TimeoutError, "of 2 were not done after 8 s"),
    ],
)
def test_the_first_failure_ends_all(how, error, message):
    start = time.monotonic()
    with pytest.raises(error, match=message):
        run_ranks(2, fail_on_one, 8 if how == "hang" else 60, how)
    assert time.monotonic() - start < 30
