"""The error for anything wrong in the user's data."""

from mmdet.errors import UserError


class DataError(UserError, ValueError):
    """Something in an annotation file or an image is wrong: names the file, the thing, its value and what to do."""
