"""The table of speeds: what is measured decides, and the run is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regard.backends import KNOWN, measured
from regard.backends.measured import SHORTEST, speeds

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"
HEADS = {96: 16, 192: 16, 256: 8, 512: 8, 576: 16}  # of gpu_dims.md
PEERS = {"sdpa": ("cuDNN", "memory-efficient"), "flash4": ("FA4",), "triton": ("regard",)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_ours_is_first_except_where_its_causal_backward_is_some_percent_slower(dim: int, causal: bool) -> None:
    for rows in (4096, 9000, 10**6):
        forward, both = (speeds(dim, dim, rows, causal, derivative) for derivative in (False, True))
        assert forward is not None
        assert both is not None
        assert forward.names[0] == "triton"
        slower = causal and (dim, rows >= 16384) in ((64, True), (128, False))
        assert both.names[:2] == (("flash4", "triton") if slower else ("triton", "flash4"))
        assert f"n{4096 if rows < 16384 else 16384}" in forward.because


def test_every_figure_names_a_run_and_backends_that_exist() -> None:
    for figure in measured._DATA["figures"]:
        assert figure["run"] in measured._DATA["runs"]
        for speed in filter(None, (figure["forward"], figure["backward"])):
            assert set(speed) <= set(KNOWN)
            assert {"sdpa", "triton"} <= set(speed)


@pytest.mark.parametrize("figure", measured._DATA["figures"], ids=lambda f: f"{f['dim']}-{f['rows']}-{f['causal']}")
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_every_figure_is_in_a_record_that_its_run_names(figure: dict[str, Any], way: str) -> None:
    for backend, speed in figure[way].items():
        assert speed in recorded(figure, way, PEERS[backend])


def recorded(figure: dict[str, Any], way: str, columns: tuple[str, ...]) -> list[int]:
    """The TFLOP/s of some columns in the first record that the run of a figure names and that has the case."""
    dim, values, rows, causal = figure["dim"], figure["values"], figure["rows"], figure["causal"]
    dims = f"d{dim}" if dim == values else f"d{dim}/{values}"
    case = f"{dims}, n{rows}, {'causal' if causal else 'full'}"
    for name in (f"gpu_{way}", "gpu_dims"):
        if f"{name}.md" in measured._DATA["runs"][figure["run"]]:
            lines = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["rows"]
            if name == "gpu_dims":  # milliseconds, causal
                lines = [x for x in lines if x["case"].startswith(dims) and x["case"].endswith(way)]
                work = HEADS[dim] * rows**2 * (dim + values) * (1 if way == "forward" else 2.5) / 1e9
            else:
                lines, work = [x for x in lines if x["case"] == case], None
            if found := [x[column] for x in lines for column in columns if x.get(column)]:
                return [round(work / x if work else x) for x in found]
    return []


def test_of_torchs_kernels_ours_is_first_for_other_dims() -> None:
    for dim, values, derivative in [(96, 96, True), (192, 128, True), (512, 512, True), (576, 512, False)]:
        found = speeds(dim, values, 8192, True, derivative)
        assert found is not None
        assert found.names.index("triton") < found.names.index("sdpa")


def test_what_was_not_measured_has_no_order() -> None:
    assert speeds(80, 80, 10**6, False, False) is None
    assert speeds(128, 64, 10**6, False, False) is None
    assert speeds(576, 512, 10**6, True, True) is None
    assert speeds(96, 96, 10**6, False, False) is None
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
