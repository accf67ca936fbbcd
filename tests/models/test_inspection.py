"""Inspecting a model: what a report says about the run, and what an atlas learns about its heads."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch

from regard.models import inspection, loading


def test_a_look_says_what_was_inspected_and_with_which_versions() -> None:
    loaded = loading.load(None)
    text = loaded.tokenize("to be or not to be").first(4)
    look = inspection.build_look(loaded, text, inspection.inspect(loaded, text))
    assert look.title == "builtin"
    assert look.facts["model type"] == "Model"
    assert look.facts["tokens"] == f"4 of {text.given}, the last {text.given - 4} are left out"
    assert f"torch {torch.__version__}" in look.facts["versions"]
    assert "regard " in look.facts["versions"]
    assert look.facts["date"] == date.today().isoformat()


def test_a_model_in_a_folder_is_called_by_its_name_not_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-bert" / "checkpoint-500"
    folder.mkdir(parents=True)
    loaded = replace(loading.load(None), name=str(folder))
    assert loaded.title == "tiny-bert/checkpoint-500"
    assert inspection.new_atlas(loaded, loaded.tokenize("to be")).title == "tiny-bert/checkpoint-500"
    assert replace(loaded, name="org/name").title == "org/name"


def test_an_atlas_learns_about_its_heads_after_the_model_has_read() -> None:
    loaded = loading.load(None)
    text = loaded.tokenize("the first citizen spoke of corn and the first citizen spoke of kings " * 3)
    atlas = inspection.new_atlas(loaded, text)
    assert not atlas.known_heads()["complete"]
    inspection.fill_atlas(atlas, loaded, text)
    known, seen = atlas.known_heads(), inspection.inspect(loaded, text)
    assert known["complete"]
    assert [len(heads) for heads in known["layers"]] == [8] * 4
    names = [about["name"] for about in known["statistics"]]
    for head in seen.heads:
        given = known["layers"][seen.layers.index(head.layer)][head.head]["values"]
        assert given[names.index("entropy")] == pytest.approx(head.entropy, rel=1e-5)
    assert {remark["rule"] for remark in known["remarks"]} == {finding.rule for finding in seen.findings()}
    layer, head = known["first"]
    assert any(remark["layer"] == layer and head in remark["heads"] for remark in known["remarks"])
    assert atlas.report is not None
    assert '"atlas":"./"' in atlas.report()
    atlas.close()
