"""Errors that a user can act on: the command lines print their message, without a traceback, and end with their exit code."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong. The message names the thing, the value, what was expected and what to do."""

    exit_code = 2


class UsageError(UserError, ValueError):
    """A wrong flag, field or combination of them."""


class CheckpointError(UserError, ValueError):
    """A checkpoint file that cannot be used as asked."""


class NonFiniteError(UserError, FloatingPointError):
    """A loss or gradient became NaN or infinite."""

    exit_code = 3
