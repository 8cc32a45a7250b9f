"""Two real processes: every image counts once, metrics are equal on both, and an error on one ends both."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from perfect import PerfectModel, PlainLoader
from toy import make_toy

from mmdet.data.coco import CocoDataset, find_coco
from mmdet.evaluators import CocoEvaluator, RankError, compute_on_main, gather_from_ranks


def judge_share(source, indices, model=None, **options) -> CocoEvaluator:
    evaluator = CocoEvaluator(PlainLoader(source, 1, indices), source.categories, **options)
    evaluator.evaluation = evaluator.evaluate(model or PerfectModel(source))
    return evaluator


def message_of(work) -> str:
    """Type and message of the exception that ``work`` must raise."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fail_on(rank: int, message: str):
    if dist.get_rank() == rank:
        raise ValueError(message)
    return f"fine on {dist.get_rank()}"


def run_rank(rank: int, folder: str, port: int, answers) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    source = CocoDataset(*find_coco(folder, "val"))
    out = {}
    for name, shares in {"strided": ([0, 2], [1]), "repeated": ([0, 2], [1, 0]), "all on one": ([0, 1, 2], [])}.items():
        evaluator = judge_share(source, shares[rank])
        ids = [d["image_id"] for d in evaluator.detections]
        out[name] = (evaluator.evaluation.metrics["AP"], ids, len(evaluator.evaluation.samples))
    boom = PerfectModel(source, lambda image_id, found: fail_on(1, f"boom at {image_id}") and found)
    out["missing"] = message_of(lambda: judge_share(source, ([0], [1])[rank]))
    out["in the model"] = message_of(lambda: judge_share(source, ([0, 2], [1])[rank], boom))
    out["in judging"] = message_of(lambda: judge_share(source, ([0, 2], [1])[rank], max_dets=0))
    out["gathered"] = gather_from_ranks(lambda: fail_on(2, ""))
    out["on main"] = compute_on_main(lambda: dist.get_rank())
    answers.put((rank, out))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = make_toy(tmp_path_factory.mktemp("toy"), 3, 1)
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = 20000 + os.getpid() % 20000
    started = time.monotonic()
    ranks = [context.Process(target=run_rank, args=(rank, str(folder), port, queue), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        collected = dict(queue.get(timeout=90) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    collected["seconds"] = time.monotonic() - started
    return collected


@pytest.mark.parametrize("shares", ["strided", "repeated", "all on one"])
def test_x03_three_images_on_two_ranks_count_once_each(answers, shares):
    for rank in (0, 1):
        ap, ids, samples = answers[rank][shares]
        assert ap == pytest.approx(1.0)
        assert ids == [1, 2, 3]
        assert samples == (3 if rank == 0 else 0)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_x03_one_rank(tmp_path, batch_size):
    source = CocoDataset(*find_coco(make_toy(tmp_path, 3, 1), "val"))
    evaluator = CocoEvaluator(PlainLoader(source, batch_size), source.categories)
    assert evaluator.evaluate(PerfectModel(source)).metrics["AP"] == pytest.approx(1.0)
    assert [d["image_id"] for d in evaluator.detections] == [1, 2, 3]


def test_an_image_that_no_rank_saw_is_an_error_on_both(answers):
    for rank in (0, 1):
        assert answers[rank]["missing"] == "RuntimeError: 1 of 3 images were not evaluated on any rank"


def test_an_error_on_one_rank_is_raised_on_both(answers):
    assert answers[1]["in the model"] == "ValueError: boom at 2"
    assert answers[0]["in the model"] == "RankError: rank 1 failed: ValueError: boom at 2"
    assert answers[0]["in judging"] == "ValueError: max_dets is 0; expected at least 1"
    assert answers[1]["in judging"] == "RankError: rank 0 failed: ValueError: max_dets is 0; expected at least 1"
    assert answers["seconds"] < 60


def test_results_of_ranks_reach_all(answers):
    for rank in (0, 1):
        assert answers[rank]["gathered"] == ["fine on 0", "fine on 1"]
        assert answers[rank]["on main"] == 0


def test_one_process_needs_no_group():
    assert gather_from_ranks(lambda: 3) == [3]
    assert compute_on_main(lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        gather_from_ranks(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compute_on_main(lambda: 1 / 0)
    assert RankError(3, "x", "trace").rank == 3
