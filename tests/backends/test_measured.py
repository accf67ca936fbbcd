"""The table of speeds: what is measured decides, and the run is named."""

from __future__ import annotations

import pytest

from regard.backends import KNOWN, measured
from regard.backends.measured import SHORTEST, speeds


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_ours_is_first_with_and_without_a_derivative(dim: int, causal: bool) -> None:
    for rows in (4096, 9000, 10**6):
        forward, both = (speeds(dim, dim, rows, causal, derivative) for derivative in (False, True))
        assert forward is not None
        assert both is not None
        assert forward.names[0] == "triton"
        assert both.names[0] == "triton"
        assert "flash4" in both.names
        assert f"n{4096 if rows < 16384 else 16384}" in forward.because


def test_every_figure_names_a_run_and_backends_that_exist() -> None:
    for figure in measured._DATA["figures"]:
        assert figure["run"] in measured._DATA["runs"]
        for speed in (figure["forward"], figure["backward"]):
            assert set(speed) <= set(KNOWN)
            assert {"sdpa", "triton"} <= set(speed)
            assert all(value > 0 for value in speed.values())


def test_what_was_not_measured_has_no_order() -> None:
    assert speeds(80, 80, 10**6, False, False) is None
    assert speeds(128, 64, 10**6, False, False) is None
    assert speeds(128, 128, SHORTEST - 1, False, False) is None


def test_a_new_figure_changes_the_order_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    new = {"run": "mine", "dim": 32, "values": 32, "rows": 4096, "causal": True}
    new |= {"forward": {"sdpa": 300, "triton": 295}, "backward": {"sdpa": 300, "triton": 100}}
    monkeypatch.setattr(measured, "_DATA", {"runs": {"mine": "a run of mine"}, "figures": [new]})
    speeds.cache_clear()
    try:
        forward, both = (speeds(32, 32, 5000, True, derivative) for derivative in (False, True))
    finally:
        speeds.cache_clear()
    assert forward is not None
    assert both is not None
    assert forward.names == ("triton", "sdpa")  # as good as equal: ours
    assert both.names == ("sdpa", "triton")
    assert "triton 295, sdpa 300 (a run of mine)" in forward.because
