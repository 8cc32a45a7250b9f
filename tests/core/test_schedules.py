"""The quadratic warm-up with a cosine and a flat end, against the reference curve and by hand."""

import json

import pytest
from shared import SHARED, needs_shared

from mmdet.core.schedules import quadratic_warmup_cosine


@needs_shared
@pytest.mark.parametrize("peer", ["yolox", "miemie"])
def test_reference_curve(peer):
    curves = json.loads((SHARED / f"golden/pure/lr.{peer}.json").read_text())["scalars"]
    ((_, points),) = [item for item in curves.items() if item[0].startswith("yoloxwarmcos")]
    factor = quadratic_warmup_cosine(500, 30_000, 1_500, lowest=0.05)
    for step, rate in points:
        assert 0.01 * factor(step) == pytest.approx(rate, rel=1e-9, abs=1e-15)


def test_by_hand():
    factor = quadratic_warmup_cosine(10, 110, 20, lowest=0.1, start=0.2)
    assert [factor(s) for s in (0, 5, 10, 50, 89, 90, 109, 500)] == pytest.approx(
        [0.2, 0.4, 1.0, 0.55, 0.1 + 0.9 * 0.000385, 0.1, 0.1, 0.1], abs=1e-6
    )


def test_a_run_that_ends_inside_its_warm_up_and_one_without_any():
    short = quadratic_warmup_cosine(10, 6, 2)
    assert [short(s) for s in (0, 5, 9, 10)] == pytest.approx([0, 0.25, 0.81, 0])
    none = quadratic_warmup_cosine(0, 10, 0, lowest=0.5)
    assert none(0) == 1 and none(10) == 0.5 and quadratic_warmup_cosine(0, 5, 5, lowest=0.3)(0) == 0.3
