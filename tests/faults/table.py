"""The fault matrix: a test that injects a fault records what came of it, and all rows are printed when the session ends."""

from typing import NamedTuple

from mmdet.core.summary import plain_table

LIMIT = 60.0  # s in which whatever happens has ended


class Row(NamedTuple):
    fault: str
    happens: str
    exit_code: int
    seconds: float  # from the fault, or from the command that meets it, to the end of the process
    lost: str


rows: list[Row] = []


def record(row: Row) -> None:
    """Adds a row of the table; a fault that takes longer than ``LIMIT`` to end fails its test."""
    rows.append(row)
    assert row.seconds < LIMIT, f"{row.fault}: it took {row.seconds:.0f} s to end"


def render() -> str:
    columns = ["fault", "what happens", "exit", "s", "lost"]
    return plain_table("", columns, [[r.fault, r.happens, r.exit_code, f"{r.seconds:.1f}", r.lost] for r in rows])
