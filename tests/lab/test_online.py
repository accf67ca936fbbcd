"""Online: the softmax in blocks, the memory it takes, and the bytes it moves."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard
from regard import lab
from regard.lab.online import MACHINES, Online, _attend_tiled, _attend_with_matrix, _Traffic, peak_bytes

SMALL = {"lengths": (512, 1024, 2048), "rows": (1, 512), "keys": 2048, "dim": 32}


@pytest.fixture(scope="module")
def found() -> lab.Experiment:
    return lab.run("online", **SMALL)


def test_the_claim_holds(found: lab.Experiment) -> None:
    assert found.verdict


@pytest.mark.parametrize("wrong", [{"rescaled": False}, {"reads": "once"}], ids=str)
def test_a_wrong_claim_is_refuted(wrong: dict[str, object]) -> None:
    assert not lab.run("online", **SMALL, **wrong).verdict


def test_a_matrix_is_not_linear(found: lab.Experiment) -> None:
    assert not replace(found.study, linear="matrix").holds(found.rows)


def test_the_running_maximum_only_rises_and_ends_at_the_largest(found: lab.Experiment) -> None:
    trace = [row for row in found.rows if "block" in row]
    running = [row["running max"] for row in trace]
    assert running == sorted(running)
    assert running[-1] == max(row["its max"] for row in trace)
    assert any(row["past scaled by"] < 1 for row in trace)


def test_the_matrix_takes_at_least_its_scores_and_the_others_less(found: lab.Experiment) -> None:
    for row in [row for row in found.rows if "n" in row][1:]:
        assert row["matrix, MiB"] >= 4 * row["n"] ** 2 / 2**20
        assert row["chunked, MiB"] < row["matrix, MiB"]


def test_k_and_v_are_read_once_per_block_of_queries() -> None:
    q, k, v = torch.randn(8, 4), torch.randn(12, 4), torch.randn(12, 4)
    counts = []
    for rows in (8, 4, 2):
        traffic = _Traffic()
        output = _attend_tiled(q, k, v, rows, 5, traffic)
        torch.testing.assert_close(output, torch.softmax(q @ k.T / 2, -1) @ v)
        counts.append(traffic.bytes)
    assert counts == [4 * (2 * 32 + blocks * 2 * 48) for blocks in (1, 2, 4)]


def test_the_matrix_goes_to_memory_and_back_twice() -> None:
    q, k, v = torch.randn(8, 4), torch.randn(12, 4), torch.randn(12, 4)
    traffic = _Traffic()
    torch.testing.assert_close(_attend_with_matrix(q, k, v, traffic), torch.softmax(q @ k.T / 2, -1) @ v)
    assert traffic.bytes == 4 * (2 * 32 + 2 * 48 + 4 * 96)


def test_a_block_of_one_query_does_about_one_flop_per_byte_in_bfloat16(found: lab.Experiment) -> None:
    first = next(row for row in found.rows if row.get("query rows") == 1)
    assert first["tiled, FLOP/byte"] == pytest.approx(1.0, abs=0.01)
    assert first["tiled waits for"] == "memory"
    assert Online(machine="H200").ridge == pytest.approx(206, abs=1)
    assert all(math.isfinite(flops / bandwidth) for flops, bandwidth in MACHINES.values())


def test_peak_bytes_counts_what_lives_at_once() -> None:
    before = dict(os.environ)
    assert peak_bytes(lambda: [torch.zeros(1000).sum() for _ in range(5)]) < 5000
    assert peak_bytes(lambda: [torch.zeros(1000) for _ in range(5)]) == 20_000
    assert dict(os.environ) == before


def test_the_profiler_is_silent() -> None:
    script = "from regard.lab.online import peak_bytes; import torch; print(peak_bytes(lambda: torch.zeros(1000)))"
    env = {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parent.parent)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    assert (done.stdout, done.stderr) == ("4000\n", "")


def test_the_figure_draws(found: lab.Experiment) -> None:
    assert len(found.figure().axes) == 3
