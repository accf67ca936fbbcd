"""How the reports of compute-sanitizer are read; the tool itself runs on a GPU."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

from gpu import sanitized
from regard.kernels.hopper import tile_scheduler


def line_in(function: str) -> int:
    """The last line of a function of `tile_scheduler`."""
    lines, first = inspect.getsourcelines(getattr(tile_scheduler, function).fn)
    return first + len(lines) - 1


def test_a_report_of_races_names_pairs_of_functions() -> None:
    log = f"""========= Error: Race reported between Read access at f+0xd660 in tile_scheduler.py:{line_in("read_info")}
=========     and Write access at forward+0xcb20 in tile_scheduler.py:{line_in("write_info")} [32 hazards]
=========     and Write access at forward+0x1c4c0 in tile_scheduler.py:{line_in("work_tile")} [32 hazards]
========= \n========= Error: Race reported between Read access at forward+0x10
=========     and Write access at forward+0x20 in elsewhere.py:7 [4 hazards]
========= \n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
    assert sanitized.reported(log) == 2
    tile_info, other, nowhere = sanitized.races(log)
    assert tile_info == {"tile_scheduler.read_info", "tile_scheduler.write_info"}
    assert other == {"tile_scheduler.read_info", "tile_scheduler.work_tile"}
    assert nowhere == {"forward+0x10", "elsewhere.py:7"}
    assert tile_info in sanitized.KNOWN
    assert other not in sanitized.KNOWN
    assert nowhere not in sanitized.KNOWN


def test_what_was_counted_is_read_and_a_run_that_broke_off_is_no_clean_one() -> None:
    assert sanitized.reported("========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitized.reported("========= ERROR SUMMARY: 12 errors\n") == 12
    assert sanitized.reported("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == 0
    assert sanitized.reported("========= Error: process didn't terminate successfully\n") == -1


def test_what_is_known_of_races_is_in_the_kernels() -> None:
    for name in set().union(*sanitized.KNOWN):
        file, function = name.split(".")
        assert f"def {function}(" in (sanitized.CHIP / f"{file}.py").read_text(encoding="utf-8")
