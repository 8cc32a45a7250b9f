"""How processes find each other."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mmdet.core import failure
from mmdet.core.launch import unused_part


def join(store, world):
    """The parts that all ranks of one start get, by rank."""
    parts = [None] * world
    threads = [threading.Thread(target=lambda r=r: parts.__setitem__(r, unused_part(store, r, world))) for r in range(world)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(20)
    assert None not in parts
    return parts


@pytest.mark.parametrize("world", [2, 4])
def test_every_start_has_a_part_of_the_store_of_its_own(world):
    store = dist.HashStore()  # torchrun --max-restarts keeps its store
    for _ in range(3):
        parts = join(store, world)
        assert not any(part.check(["failure"]) for part in parts)
        parts[0].set("failure", "x")
        assert all(part.check(["failure"]) for part in parts)


def test_a_start_whose_last_rank_never_came_leaves_nothing_in_the_way():
    store = dist.HashStore()
    store.set("greeting/1", "somebody who is gone")
    parts = join(store, 3)
    parts[2].set("key", "x")
    assert parts[1].check(["key"])


def test_a_process_that_ends_has_no_thread_in_native_code():
    """Python would abort it: exit code 134 of a run that was done."""
    watch = failure._Watch(dist.HashStore(), 0)
    assert watch._thread.is_alive()
    watch.rest()
    assert not watch._thread.is_alive() and watch.deadline == float("inf")


def test_a_rank_that_hears_of_a_failure_waits_until_it_is_told(monkeypatch):
    """The launcher stops all processes once one has ended: also the one that is about to tell what was wrong."""
    words = iter([None, None, 0])
    monkeypatch.setattr(failure, "_watch", SimpleNamespace(other=lambda: next(words)))
    assert not failure.announce(failure.RankError(0, "ValueError: x", ""))
    assert next(words, "used up") == "used up"
    assert not failure.announce(failure.RankError(0, "Stopped: SIGTERM", "", signal=15))  # asks nothing: nothing will be told
