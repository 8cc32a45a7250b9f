"""Prints the fault matrix at the end of the session."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import table  # noqa: E402


def pytest_terminal_summary(terminalreporter):
    if table.rows:
        terminalreporter.section("fault matrix")
        terminalreporter.write_line(table.render().strip("\n"))
