"""Short names of layers, and the legend that gives each path once."""

from __future__ import annotations

from regard.report.labels import layer_label, layer_legend, runs


def test_a_legend_has_one_line_per_kind_of_path() -> None:
    encoder = [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(3)]
    decoder = [f"decoder.block.{i}.layer.{j}.{name}" for i in range(2) for j, name in enumerate(("Self", "Cross"))]
    assert layer_legend([*encoder, *decoder]) == [
        "L0–2: encoder.block.*.layer.0.SelfAttention",
        "L3, 5: decoder.block.{0, 1}.layer.0.Self",
        "L4, 6: decoder.block.{0, 1}.layer.1.Cross",
    ]
    assert layer_legend(["a.0.b.0", "a.1.b.1"]) == ["L0: a.0.b.0", "L1: a.1.b.1"]  # two numbers differ
    assert layer_legend([""]) == ["L0: the model itself"]
    assert layer_legend(["same", "same#"]) == ["L0: same", "L1: same#"]
    assert layer_legend([]) == []


def test_a_legend_of_many_unlike_names_is_cut_and_says_so() -> None:
    names = [f"{chr(97 + i)}.attn" for i in range(20)]
    assert layer_legend(names)[-2:] == ["L10: k.attn", "and 9 more"]
    assert len(layer_legend(names)) == 12


def test_names_from_outside_are_escaped() -> None:
    assert layer_legend(["x\x1b[31m"]) == ["L0: x\\x1b[31m"]
    assert layer_label("x\x1b[31m", []) == "x\\x1b[31m"


def test_runs_of_numbers() -> None:
    assert runs([]) == ""
    assert runs(range(12)) == "0–11"
    assert runs([3, 1]) == "1, 3"
