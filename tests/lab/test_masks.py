"""Masks: all are shown, their density is counted, and few tiles take little time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard.masks
from regard import lab
from regard.lab import masks
from regard.lab.masks import gallery

SMALL = {"length": 1024, "chunk": 128, "heads": 8, "rounds": 6}  # the shortest of six runs of some ms each


@pytest.fixture(scope="module")
def found() -> lab.Experiment:
    return lab.run("masks", **SMALL)


def test_the_claim_holds(found: lab.Experiment) -> None:
    assert found.verdict


def test_a_pass_over_the_whole_matrix_saves_nothing() -> None:
    wrong = lab.run("masks", length=512, chunk=128, backend="reference")
    assert not wrong.verdict


def test_a_density_that_is_not_the_share_of_pairs_is_refuted(found: lab.Experiment) -> None:
    wrong = [{**row, "density": 0.9 * row["density"]} for row in found.rows]
    assert not found.study.holds(wrong)


def test_every_mask_has_a_picture() -> None:
    text = Path(str(masks.__file__)).read_text(encoding="utf-8")
    body = text[text.index("    return {") :]
    factories = set(regard.masks.__all__) - {"Mask"}
    assert all(f" {name}(" in body for name in factories)


def test_densities_are_those_of_closed_forms(found: lab.Experiment) -> None:
    n = SMALL["length"]
    density = {row["mask"]: row["density"] for row in found.rows}
    assert density["everything"] == 1
    assert density["causal"] == pytest.approx((n + 1) / (2 * n))
    assert density["padding"] == 5 / 8
    assert density["blocks"] == pytest.approx(1 / 8)
    assert density["strided"] == pytest.approx(1 / 4)
    assert density["packed"] == pytest.approx(1 / 4 + 1 / 16 + 1 / 64 + 1 / 64)


def test_the_masks_are_the_same_each_time_and_torch_keeps_its_threads(found: lab.Experiment) -> None:
    before = torch.get_num_threads()
    assert [row["mask"] for row in found.rows] == list(gallery(32))
    assert torch.equal(gallery(32)["dense, at random"].dense(32, 32), gallery(32)["dense, at random"].dense(32, 32))
    with masks.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_figure_draws(found: lab.Experiment) -> None:
    assert len(found.figure().axes) == len(found.rows) + 1
