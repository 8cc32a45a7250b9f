"""Devices and processes."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import sys
import time

import torch
import torch.distributed as dist
from loguru import logger

from mmdet.core import failure
from mmdet.errors import UsageError

_JOIN = datetime.timedelta(minutes=30)  # how long processes wait for each other


def choose_device(name: str = "auto") -> torch.device:
    """``auto`` is CUDA (this process's own GPU), else Apple's MPS, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is available here; use --device cpu or --device auto")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UsageError("--device mps: Apple's MPS is not available here; use --device cpu or --device auto")
    if name not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or mps")
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"


def usable_amp(amp: str, device: torch.device) -> str:
    """The precision that works on the device: fp16, with its scaled gradients, needs CUDA."""
    if amp == "fp16" and device.type != "cuda":
        logger.warning(f"amp=fp16 works on CUDA only: on {device.type} the forward pass is in float32 (amp=bf16 works here)")
        return "off"
    return amp


def init_process_group(device: torch.device) -> None:
    """Joins the processes that ``torchrun`` started; a single process needs nothing."""
    world = os.environ.get("WORLD_SIZE", "1")
    if int(world) > 1 and not dist.is_initialized():
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UsageError(
                f"WORLD_SIZE={world} in the environment means {world} processes, but {', '.join(missing)} not: start them "
                f"with -d {world} or `torchrun --nproc-per-node={world} SCRIPT ...`, or unset WORLD_SIZE for a single process"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        store, rank, size = next(dist.rendezvous("env://"))
        store = unused_part(store, rank, size)
        failure.start_watch(dist.PrefixStore("job", store), rank)
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=_JOIN)


def unused_part(store: dist.Store, rank: int, world: int) -> dist.Store:
    """A part of the store that no earlier start wrote to: ``torchrun --max-restarts`` keeps the store, and in it the addresses
    and the failure of processes that are gone. All ranks call it and get the same part, which rank 0 names.

    Its launcher's count of restarts would not do: each machine has its own. So every rank greets with a word of its own, to which
    only the rank 0 of this start can answer.
    """
    name = secrets.token_hex(8)
    if rank > 0:
        store.set(f"greeting/{rank}", name)
        store.wait([f"answer/{name}"], _JOIN)
        name = store.get(f"answer/{name}").decode()
        store.set(f"{name}/joined/{rank}", "1")
    missing, end = set(range(1, world)) if rank == 0 else set(), time.monotonic() + _JOIN.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{name}/joined/{other}"]):
                missing.discard(other)
            elif store.check([f"greeting/{other}"]):  # perhaps of an earlier start: it is looked at again
                store.set(f"answer/{store.get(f'greeting/{other}').decode()}", name)
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {', '.join(map(str, sorted(missing)))} of {world} did not join within {_JOIN}")
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


def relaunch(devices: int, script: str, argv: list[str]) -> int | None:
    """Starts ``devices`` processes of this command through torch's own launcher, waits for them and returns the exit code.

    Returns None, having done nothing, when one process is wanted or this already is one of several.
    """
    if devices <= 1 or "LOCAL_RANK" in os.environ:
        return None
    if devices > torch.cuda.device_count() > 0:
        raise UsageError(f"-d {devices}: this machine has {torch.cuda.device_count()} CUDA devices")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # SIGUSR1 is how clusters announce that time is up; torch's launcher hands on what it is told to.
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes say what was wrong
    try:
        torchrun(["--standalone", f"--nproc-per-node={devices}", *_forwarded_signals(), script, *argv])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # a negative one is the signal that killed it
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _forwarded_signals() -> list[str]:
    """The flag of newer launchers, which goes over the environment variable that older ones read."""
    from torch.distributed.run import get_args_parser

    flags = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    return ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"] if "--signals-to-handle" in flags else []


def strip_local_rank(argv: list[str]) -> list[str]:
    """Without the ``--local_rank=N`` that old launchers append; its value goes to the environment."""
    kept = []
    for word in argv:
        if word.startswith(("--local_rank=", "--local-rank=")):
            rank = word.split("=", 1)[1]
            if not rank.isdecimal():
                raise UsageError(f"{word}: expected the number of a process, from 0")
            os.environ.setdefault("LOCAL_RANK", rank)
        else:
            kept.append(word)
    return kept


def script_path() -> str:
    return os.path.abspath(sys.argv[0])
