"""The trainer. Names are imported on first use, since experiments import parts of this package and the Trainer imports them."""

from typing import Any

_HOMES = {"Trainer": "trainer", "RunOptions": "run", "load_pretrained": "checkpoint", "read_checkpoint": "checkpoint"}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
