"""Checkpoints, as the rest of the house uses them: files (``files``), the weights in them (``weights``, ``pdparams``), and how
these get into a model (``loading``)."""

from mmdet.core.entries import is_trained_here
from mmdet.core.files import link_atomic, read_checkpoint, require_file, save_atomic
from mmdet.core.loading import LoadReport, load_backbone, load_pretrained
from mmdet.core.weights import LoadOptions, open_weights

__all__ = [
    "LoadOptions",
    "LoadReport",
    "is_trained_here",
    "link_atomic",
    "load_backbone",
    "load_pretrained",
    "open_weights",
    "read_checkpoint",
    "require_file",
    "save_atomic",
]
