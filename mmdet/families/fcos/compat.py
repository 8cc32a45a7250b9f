"""How published FCOS files name the tensors of this family's models.

Three layouts exist besides our own: PaddleDetection's ``.pdparams``, miemiedetection's ``.pth`` (whose norms may be a scale and
shift alone) and torchvision's ``fcos_resnet50_fpn``. Our backbone has PaddleDetection's names, with torch's of the statistics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

import torch

from mmdet.core.load_rules import ClassRows, Layout, LoadRules, StateDict
from mmdet.models.resnet import block_name

NORM_EPS = 1e-5
# COCO's category ids that are no category, up to 90; torchvision's class rows are category ids.
_COCO_GAPS = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_COCO_ROWS = 91

# Each is applied to what the ones before it left.
_PADDLE = (
    (r"\._mean$", ".running_mean"),
    (r"\._variance$", ".running_var"),
    (r"^neck\.fpn_inner_res(\d)_sum(_lateral)?\.", lambda m: f"neck.lateral.{int(m[1]) - 3}."),
    (r"^neck\.fpn_res(\d)_sum\.", lambda m: f"neck.output.{int(m[1]) - 3}."),
    (r"^neck\.fpn_([67])\.", lambda m: f"neck.extra.{int(m[1]) - 6}."),
    (r"^fcos_head\.fcos_feat\.fcos_head_(cls|reg)_tower_conv_(\d)\.", r"head.\1_convs.\2."),
    (r"\.conv\.conv_offset\.", ".conv_offset."),
    (r"\.conv\.conv_dcn\.", ".conv."),
    (r"^fcos_head\.fcos_head_(cls|reg)\.", r"head.\1_pred."),
    (r"^fcos_head\.fcos_head_centerness\.", "head.ctn_pred."),
    (r"^fcos_head\.p(\d)_feat\.scale_reg$", lambda m: f"head.scales.{int(m[1]) - 3}"),
)
_TOWERS = {"classification": "cls_convs", "regression": "reg_convs"}  # torchvision's heads
_BRANCHES = {"1": "branch2a", "2": "branch2b", "3": "branch2c", "4": "short"}  # miemiedetection's conv1 to conv4 of a block


def _block(stage: int, number: str) -> str:
    """The name of a block of ResNet-50."""
    return f"res{stage}.{block_name(stage, int(number), 0)}"


MIEMIE = (
    (r"\.(bn|af|gn)\.", ".norm."),
    (r"(^|\.)stage1_conv1_1\.", r"\1conv1.conv1."),
    (r"(^|\.)stage(\d)_(\d+)\.conv(\d)\.", lambda m: f"{m[1]}{_block(int(m[2]), m[3])}.{_BRANCHES[m[4]]}."),
    (r"^fpn\.fpn_inner_convs\.(\d)\.conv\.", lambda m: f"neck.lateral.{2 - int(m[1])}."),
    (r"^fpn\.fpn_convs\.(\d)\.conv\.", lambda m: f"neck.output.{2 - int(m[1])}."),
    (r"^fpn\.extra_convs\.(\d)\.conv\.", r"neck.extra.\1."),
    (r"^head\.(cls|reg|ctn)_pred\.conv\.", r"head.\1_pred."),
)
_TORCHVISION = (
    (r"^backbone\.body\.", "backbone."),
    (r"(^|\.)layer(\d)\.(\d+)\.conv(\d)\.", lambda m: f"{m[1]}{_block(int(m[2]) + 1, m[3])}.{_BRANCHES[m[4]]}.conv."),
    (r"(^|\.)layer(\d)\.(\d+)\.bn(\d)\.", lambda m: f"{m[1]}{_block(int(m[2]) + 1, m[3])}.{_BRANCHES[m[4]]}.norm."),
    (r"(^|\.)layer(\d)\.(\d+)\.downsample\.0\.", lambda m: f"{m[1]}{_block(int(m[2]) + 1, m[3])}.short.conv."),
    (r"(^|\.)layer(\d)\.(\d+)\.downsample\.1\.", lambda m: f"{m[1]}{_block(int(m[2]) + 1, m[3])}.short.norm."),
    (r"^(backbone\.)?conv1\.weight$", r"\1conv1.conv1.conv.weight"),
    (r"^(backbone\.)?bn1\.", r"\1conv1.conv1.norm."),
    (r"^backbone\.fpn\.inner_blocks\.(\d)\.(0\.)?", r"neck.lateral.\1."),
    (r"^backbone\.fpn\.layer_blocks\.(\d)\.(0\.)?", r"neck.output.\1."),
    (r"^backbone\.fpn\.extra_blocks\.p([67])\.", lambda m: f"neck.extra.{int(m[1]) - 6}."),
    (r"^head\.classification_head\.cls_logits\.", "head.cls_pred."),
    (r"^head\.regression_head\.bbox_reg\.", "head.reg_pred."),
    (r"^head\.regression_head\.bbox_ctrness\.", "head.ctn_pred."),
    (
        r"^head\.(classification|regression)_head\.conv\.(\d+)\.",  # convolution, norm, ReLU, four times
        lambda m: f"head.{_TOWERS[m[1]]}.{int(m[2]) // 3}.{'norm' if int(m[2]) % 3 else 'conv'}.",
    ),
)


def renamed(name: str, rules: tuple[tuple[str, str | Callable], ...]) -> str:
    """``name`` after every rule."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def our_name(name: str) -> str:
    """Our name of a PaddleDetection tensor."""
    return renamed(name, _PADDLE)


def _starts(*prefixes: str) -> Callable[[Set[str]], bool]:
    return lambda keys: any(key.startswith(prefixes) for key in keys)


def _from_paddle(state: StateDict) -> StateDict:
    return {our_name(name): tensor for name, tensor in state.items()}


def _from_miemie(state: StateDict) -> StateDict:
    """Scales of the levels are coarse first there. A norm without statistics gets those that change nothing."""
    result = {renamed(name, MIEMIE): tensor for name, tensor in state.items()}
    scales = [name for name in state if re.match(r"head\.scales_on_reg\.\d+$", name)]
    for name in scales:
        result[f"head.scales.{len(scales) - 1 - int(name.rpartition('.')[2])}"] = result.pop(name)
    for name, tensor in state.items():
        if name.endswith(".af.weight"):
            norm = renamed(name, MIEMIE).removesuffix("weight")
            result[f"{norm}running_mean"] = torch.zeros_like(tensor)
            result[f"{norm}running_var"] = torch.full_like(tensor, 1 - NORM_EPS)
    return result


def _from_torchvision(state: StateDict) -> StateDict:
    """The same detector in our terms: of the class rows those of COCO's 80 categories; distances from our points, half a stride
    right of and below torchvision's; factor 1 on every level, where torchvision has none."""
    result = {renamed(name, _TORCHVISION): tensor for name, tensor in state.items()}
    for name in ("head.cls_pred.weight", "head.cls_pred.bias"):
        if name in result and len(result[name]) == _COCO_ROWS:
            result[name] = result[name][[i for i in range(_COCO_ROWS) if i not in _COCO_GAPS]]
    bias = "head.reg_pred.bias"
    if bias in result:
        result[bias] = result[bias] + result[bias].new_tensor([0.5, 0.5, -0.5, -0.5])
        result.update({f"head.scales.{i}": result[bias].new_ones(1) for i in range(5)})
    return result


LOAD_RULES = LoadRules(
    layouts=(
        Layout("PaddleDetection", _starts("fcos_head."), _from_paddle),
        Layout("miemiedetection", _starts("head.scales_on_reg."), _from_miemie),
        Layout("torchvision", _starts("head.classification_head."), _from_torchvision),
    ),
    class_rows=(ClassRows(r"head\.cls_pred\.(weight|bias)"),),
)
