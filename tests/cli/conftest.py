"""What the tests of the command line share: on a slow machine, too, they read no lines of progress."""

from __future__ import annotations

import pytest

from regard.cli import output


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_SECONDS_BETWEEN_LINES", 3600.0)
