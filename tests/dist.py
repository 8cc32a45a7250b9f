"""Real processes for tests: ``run_ranks(2, work, 60, argument)`` runs ``work(argument)`` on both ranks of a gloo group."""

import contextlib
import datetime
import faulthandler
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT = 60.0  # s that a rank waits for another one


class RankFailedError(AssertionError):
    """The first rank that failed, with its traceback."""


def run_ranks(ranks: int, work, timeout: float, *args) -> list:
    """What ``work(*args)`` returns on each rank, by rank; tensors come back as NumPy arrays.

    ``work`` is a function of a module, since the processes are spawned; it finds the process group made, also for one rank, and
    one thread. Nobody outlives ``timeout`` seconds, or the first failure, which is raised here.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = (Path(folder) / "store").as_uri()
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(rank, ranks, store, timeout, theirs, work, args), daemon=True)
            process.start()
            theirs.close()
            stack.callback(_end, process)
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, processes, time.monotonic() + timeout, timeout)


def _collect(pipes, processes, deadline: float, timeout: float) -> list:
    answers, failures = {}, []
    while len(answers) + len(failures) < len(pipes):
        ready = wait([p for i, p in enumerate(pipes) if i not in answers], max(deadline - time.monotonic(), 0))
        if not ready:
            missing = [i for i in range(len(pipes)) if i not in answers]
            raise TimeoutError(f"ranks {missing} of {len(pipes)} were not done after {timeout} s")
        for rank in map(pipes.index, ready):
            failure = _receive(rank, pipes[rank], processes[rank], answers)
            if failure is not None:
                failures.append(failure)
        if failures:  # ranks that lost this one fail a moment later, and may have been heard first
            late = [i for i in range(len(pipes)) if i not in answers and pipes[i] not in ready and pipes[i].poll(0.5)]
            failures += filter(None, (_receive(i, pipes[i], processes[i], answers) for i in late))
            raise RankFailedError(min(failures)[1])
    return [answers[rank] for rank in range(len(pipes))]


def _receive(rank: int, pipe, process, answers: dict) -> tuple[float, str] | None:
    """Notes the answer of a rank, or returns when it failed and why."""
    try:
        good, moment, answer = pipe.recv()
    except EOFError:
        process.join(10)
        return time.monotonic() - 10, f"rank {rank} ended without a word, exit code {process.exitcode}"
    if not good:
        return moment, f"rank {rank} failed:\n{answer}"
    answers[rank] = answer
    return None


def _end(process) -> None:
    process.join(0 if process.exitcode is None and sys.exc_info()[0] else 10)
    process.kill()
    process.join()


def _run_rank(rank: int, ranks: int, store: str, timeout: float, pipe, work, args) -> None:
    faulthandler.dump_traceback_later(max(timeout - 2, 1))  # where it hangs
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # needs no name that resolves
    limit = datetime.timedelta(seconds=GROUP_TIMEOUT)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
        pipe.send((True, 0.0, _plain(work(*args))))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, time.monotonic(), traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()


def _plain(value):
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.float().numpy() if value.dtype == torch.bfloat16 else np.array(value.numpy())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value
