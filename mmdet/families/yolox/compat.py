"""How published YOLOX files name the tensors of this family's models.

Megvii's ``.pth`` and miemiedetection's have one layout, with the same tensors as ours: their ``backbone`` is the neck, which
holds the backbone as ``backbone.backbone``.
"""

from __future__ import annotations

from collections.abc import Set

from mmdet.core.load_rules import ClassRows, Layout, LoadRules, StateDict

_NECK, _BACKBONE = "backbone.", "backbone.backbone."


def our_name(name: str) -> str:
    """Our name of a tensor of the published files."""
    if name.startswith(_BACKBONE):
        return "backbone." + name.removeprefix(_BACKBONE)
    return "neck." + name.removeprefix(_NECK) if name.startswith(_NECK) else name


def _is_published(keys: Set[str]) -> bool:
    return any(key.startswith(_BACKBONE) for key in keys)


def _rename(state: StateDict) -> StateDict:
    return {our_name(name): tensor for name, tensor in state.items()}


LOAD_RULES = LoadRules(
    layouts=(Layout("Megvii YOLOX", _is_published, _rename),),
    class_rows=(ClassRows(r"head\.cls_preds\.\d+\.(weight|bias)"),),
)
