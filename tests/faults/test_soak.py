"""Killed and resumed equals uninterrupted, with two ranks; the long form is ``tests/soak.py``."""

import pytest
from soak import soak


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    assert soak(tmp_path, steps=40, kills=2, save_every=3) == 0.0
