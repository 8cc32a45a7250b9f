"""How published files name the tensors of this family's backbone."""

from __future__ import annotations

import re
from collections.abc import Set

from mmdet.core.load_rules import Layout, LoadRules, StateDict

_BRANCHES = {"rbr_dense": "conv1", "rbr_1x1": "conv2", "rbr_identity": "identity"}
_BRANCH = re.compile(r"\.(rbr_dense|rbr_1x1|rbr_identity)\.")
_FIRST_STAGE = re.compile(r"^((?:backbone\.)?stage0)\.(?=conv|identity)")  # a single block there, a sequence of one here


def _published(keys: Set[str]) -> bool:
    return any(_BRANCH.search(f".{key}") for key in keys)


def _rename(tensors: StateDict) -> StateDict:
    renamed = {_BRANCH.sub(lambda m: f".{_BRANCHES[m[1]]}.", name): value for name, value in tensors.items()}
    return {_FIRST_STAGE.sub(r"\1.0.", name): value for name, value in renamed.items()}


# The files that the authors of RepVGG published (arXiv 2101.03697), in their form for training.
LOAD_RULES = LoadRules(layouts=(Layout("RepVGG", _published, _rename),))
