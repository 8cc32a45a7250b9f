"""What a criterion makes of predictions that are no numbers."""

import re

import torch


def assert_spoilt(out, pattern: str, predictions) -> None:
    """Every loss is NaN, the reason matches ``pattern``, and backward still reaches each of ``predictions``, as the exchange of
    gradients between processes needs."""
    assert all(torch.isnan(value) for value in out.losses.values()) and torch.isnan(out.total)
    assert re.search(pattern, out.nonfinite), out.nonfinite
    torch.autograd.grad(out.total, tuple(predictions))
