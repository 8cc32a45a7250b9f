"""Batches on the device, copied while the previous step computes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from mmdet.data.structures import Batch


class Prefetcher(Iterator):
    """Iterates over ``batches`` with every tensor on ``device``.

    On CUDA the next batch is copied on a side stream (the copy overlaps if the memory is pinned); elsewhere it is moved when
    asked for. ``data_time``: seconds that the last ``next`` waited for ``batches``. An error of ``batches`` is raised in place
    of the batch that failed, not of the one before it.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device | str) -> None:
        self._batches = iter(batches)
        self.device = torch.device(device)
        self.data_time = 0.0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._ready: Batch | None = None
        self._error: BaseException | None = None
        self._started = False

    def __next__(self) -> Batch:
        self.data_time = 0.0
        if self._stream is None:
            return self._fetch().to(self.device)
        if not self._started:
            self._started = True
            self._preload()
        if self._error is not None:
            raise self._error
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        batch = self._ready
        batch.record_stream(current)  # it was allocated on the side stream
        self._preload()
        return batch

    def _fetch(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.data_time += time.perf_counter() - start

    def _preload(self) -> None:
        try:
            batch = self._fetch()
        except Exception as error:  # StopIteration too: the batch before it still has to be handed out
            self._ready, self._error = None, error
            return
        with torch.cuda.stream(self._stream):
            self._ready = batch.to(self.device, non_blocking=True)
