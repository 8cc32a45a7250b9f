"""How published PP-YOLOE files name the tensors of this family's models.

Two layouts exist besides our own, with the same tensors: miemiedetection's ``.pth`` (``yolo_head.`` where we say ``head.``) and
PaddleDetection's ``.pdparams`` (the same, with Paddle's names of the running statistics, and without the norms' batch counters,
which the loader does not ask for).
"""

from __future__ import annotations

from collections.abc import Set

from mmdet.core.load_rules import ClassRows, Layout, LoadRules, StateDict

_FOREIGN_HEAD = "yolo_head."
_STATISTICS = {"._mean": ".running_mean", "._variance": ".running_var"}  # Paddle's endings and torch's


def torch_name(name: str) -> str:
    """The torch-style name of a PaddleDetection tensor (what miemiedetection calls it)."""
    for theirs, ours in _STATISTICS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def our_name(name: str) -> str:
    """Our name of a miemiedetection tensor."""
    return "head." + name.removeprefix(_FOREIGN_HEAD) if name.startswith(_FOREIGN_HEAD) else name


def _has_paddle_statistics(keys: Set[str]) -> bool:
    return any(key.endswith(tuple(_STATISTICS)) for key in keys)


def _is_miemie(keys: Set[str]) -> bool:
    return any(key.startswith(_FOREIGN_HEAD) for key in keys) and not _has_paddle_statistics(keys)


def _is_paddle(keys: Set[str]) -> bool:
    return any(key.startswith(_FOREIGN_HEAD) for key in keys) and _has_paddle_statistics(keys)


def _rename_miemie(state: StateDict) -> StateDict:
    return {our_name(name): tensor for name, tensor in state.items()}


def _rename_paddle(state: StateDict) -> StateDict:
    return {our_name(torch_name(name)): tensor for name, tensor in state.items()}


LOAD_RULES = LoadRules(
    layouts=(
        Layout("miemiedetection", _is_miemie, _rename_miemie),
        Layout("PaddleDetection", _is_paddle, _rename_paddle),
    ),
    class_rows=(ClassRows(r"head\.pred_cls\.\d+\.(weight|bias)"),),
    # The bins of the distance distribution and the points of the evaluation size: computed here, never loaded.
    constants=(r"(yolo_)?head\.(proj|proj_conv\.weight|anchor_points|stride_tensor)",),
)
