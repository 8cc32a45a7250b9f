"""How published PP-YOLO and PP-YOLOv2 files name the tensors of this family's models.

Two layouts exist besides our own, with the same tensors: miemiedetection's ``.pth`` (``neck.yolo_block_0``) and
PaddleDetection's ``.pdparams`` (``neck.yolo_block.0``, Paddle's names of the running statistics, and without the norms' batch
counters, which the loader does not ask for). The backbone's names are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Set

from mmdet.core.load_rules import ClassRows, Layout, LoadRules, StateDict

_STATISTICS = {"._mean": ".running_mean", "._variance": ".running_var"}  # Paddle's endings and torch's
_LISTS = {  # a numbered module of the files -> the list that holds it here
    "yolo_block": "blocks",
    "yolo_transition": "transitions",
    "fpn": "fpn",
    "fpn_transition": "fpn_transitions",
    "pan": "pan",
    "pan_transition": "pan_transitions",
    "yolo_output": "outputs",
}
_NUMBERED = re.compile(r"^(neck|yolo_head)\.(\w+?)[._](\d+)\.")
_PAIR = re.compile(r"\.conv_module\.(\d)\.(\d)\.")


def our_name(name: str) -> str:
    """Our name of a tensor of either layout; a name that is neither's comes back as it is."""
    for theirs, ours in _STATISTICS.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
    found = _NUMBERED.match(name)
    if found and found[2] in _LISTS:
        part = "head" if found[1] == "yolo_head" else "neck"
        name = f"{part}.{_LISTS[found[2]]}.{found[3]}.{name[found.end() :]}"
        name = _PAIR.sub(r".conv_module.\1_\2.", name.replace(".batch_norm.", ".bn."))
    return name


def _has_paddle_statistics(keys: Set[str]) -> bool:
    return any(key.endswith(tuple(_STATISTICS)) for key in keys)


def _is_miemie(keys: Set[str]) -> bool:
    return any(key.startswith("yolo_head.yolo_output") for key in keys) and not _has_paddle_statistics(keys)


def _is_paddle(keys: Set[str]) -> bool:
    return any(key.startswith("yolo_head.yolo_output") for key in keys) and _has_paddle_statistics(keys)


def _rename(state: StateDict) -> StateDict:
    return {our_name(name): tensor for name, tensor in state.items()}


def load_rules(num_anchors: int, iou_aware: bool) -> LoadRules:
    """For heads of ``num_anchors`` per level: x, y, w, h, object and the classes of each anchor, after one IoU channel each."""
    rows = ClassRows(
        r"head\.outputs\.\d+\.(weight|bias)", groups=num_anchors, per_group_extra=5, lead=num_anchors if iou_aware else 0
    )
    return LoadRules(
        layouts=(Layout("miemiedetection", _is_miemie, _rename), Layout("PaddleDetection", _is_paddle, _rename)),
        class_rows=(rows,),
    )
