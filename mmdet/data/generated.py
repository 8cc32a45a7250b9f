"""What generated data sets share: draws that are the same on every machine, and a folder that is written once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmdet.data.errors import DataError


class Draws:
    """Numbers from the raw 64-bit stream of PCG64, which no version of NumPy changes."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def array(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        """int64 array of ``shape``, values in [low, high)."""
        raw = self._bits.random_raw(int(np.prod(shape))) >> np.uint64(32)
        return ((raw * np.uint64(high - low)) >> np.uint64(32)).astype(np.int64).reshape(shape) + low

    def integer(self, low: int, high: int) -> int:
        return low + ((int(self._bits.random_raw()) >> 32) * (high - low) >> 32)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.integer(0, 1 << 24) / (1 << 24)

    def choice(self, values):
        return values[self.integer(0, len(values))]


def write_once(
    directory: str | Path,
    marker: str,
    facts: Mapping[str, Any],
    digest: Callable[[Path], str],
    write: Callable[[Path], None],
    what: str,
) -> Path:
    """Has ``write(folder)`` make the data set that ``facts`` (plain values) describe, unless it is there. Returns ``directory``.

    A complete set with the same facts and the same ``digest(folder)`` is left as it is; a damaged or different one is replaced.
    Several processes may call it at once: the set appears by one rename. ``marker`` names the file that holds the facts.

    Raises:
        DataError: the directory holds files that are not ``what``.
    """
    folder = Path(directory)
    if _is_complete(folder, marker, facts, digest):
        return folder
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise DataError(f"{folder} holds files that are not {what}: name an empty or new directory")
    building = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write(building)
    (building / marker).write_text(json.dumps({**facts, "digest": digest(building)}))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        building.rename(folder)
    except OSError:
        shutil.rmtree(building)
        if not _is_complete(folder, marker, facts, digest):  # not another process's finished set
            raise
    return folder


def _is_complete(folder: Path, marker: str, facts: Mapping[str, Any], digest: Callable[[Path], str]) -> bool:
    try:
        return json.loads((folder / marker).read_text()) == {**facts, "digest": digest(folder)}
    except (OSError, ValueError):
        return False
