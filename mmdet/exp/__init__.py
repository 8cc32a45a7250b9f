"""Experiments: what is trained, on what, and how."""

from mmdet.exp.base import Exp
from mmdet.exp.fields import Size
from mmdet.exp.load import exp_of_checkpoint, exp_state, get_exp

__all__ = ["Exp", "Size", "exp_of_checkpoint", "exp_state", "get_exp"]
