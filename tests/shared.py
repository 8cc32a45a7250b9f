"""Where the reference values and photographs lie, for tests that skip without them."""

import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
needs_shared = pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason="reference values (../shared) are not in this clone")


def name_seeded():
    """The module that makes weights from parameter names."""
    sys.path.insert(0, str(SHARED / "golden"))
    try:
        import name_seeded
    finally:
        sys.path.pop(0)
    return name_seeded
