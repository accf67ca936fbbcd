"""Seen: computed once, read many times, and shown with tokens that fit."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from models.test_watch import GPT_DIM, Attention, Gpt
from regard.errors import ArgumentError, DtypeError
from regard.models import inspection, loading

ROOT = Path(__file__).parents[2]


def test_findings_and_a_look_share_one_search_for_the_strongest_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    top = regard.Observation.top
    monkeypatch.setattr(regard.Observation, "top", lambda self, k: asked.append(k) or top(self, k))
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (1, 40))
    with regard.watch(model) as seen:
        model(ids)
    first = seen.findings()
    told: list[str] = []
    look = seen.look(tell=told.append)
    assert seen.findings() == first
    assert asked == [16, 16]  # a layer each
    assert told == seen.layers
    torch.testing.assert_close(look.layers[1].heads[0].map, seen["blocks.1.attn"].map(40, 40)[0, 0])


def test_findings_are_computed_again_after_another_call_and_for_other_tokens() -> None:
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (1, 40))
    told: list[str] = []
    with regard.watch(model) as seen:
        model(ids)
        seen.findings(tell=told.append)
        assert told == [rule.name for rule in regard.models.findings.RULES]
        seen.findings(tell=told.append)
        assert len(told) == len(regard.models.findings.RULES)
        before = seen.strongest("blocks.0.attn")
        model(ids + 1 - ids.clamp(max=1))
        assert not torch.equal(seen.strongest("blocks.0.attn")[0], before[0])
        seen.findings(tell=told.append)
        assert len(told) == 2 * len(regard.models.findings.RULES)
    seen.tokens = None
    seen.findings(tell=told.append)
    assert len(told) == 3 * len(regard.models.findings.RULES)
    with regard.watch(nn.Module()) as seen:  # no tokens, now and then
        regard.attention(*torch.randn(3, 1, 2, 12, 4).unbind())
        seen.findings()
        regard.attention(*torch.randn(3, 1, 2, 12, 4).unbind())
        seen.findings(tell=told.append)
    assert len(told) == 4 * len(regard.models.findings.RULES)


def test_long_texts_keep_only_the_strongest_keys_that_a_report_can_hold() -> None:
    with regard.watch(nn.Module()) as seen:
        regard.attention(torch.randn(1, 300, 1000, 1), *torch.randn(2, 1, 300, 8, 1).unbind())
    assert seen.strongest("")[0].shape == (1, 300, 1000, 3)
    assert seen.look().layers[0].heads[0].strongest[1].shape == (1000, 3)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("twelve char.", "list of strings. Got str"),
        (7, "list of strings. Got int"),
        (torch.arange(12), "list of strings. Got Tensor at index 0"),
        (["a"] * 11 + [3], "list of strings. Got int at index 11"),
        (["a"] * 11, "one per query or one per key of a layer, 12. Got 11"),
        ([], "Got 0; without tokens"),
    ],
)
def test_tokens_that_are_not_strings_or_do_not_fit_are_refused(tokens: object, says: str) -> None:
    with regard.watch(nn.Module()) as seen:
        regard.attention(*torch.randn(3, 1, 2, 12, 4).unbind())
    with pytest.raises(ArgumentError) as error:
        seen.look(tokens=tokens)  # type: ignore[arg-type]
    assert str(error.value).startswith("look: tokens must be ")
    assert says in str(error.value)
    assert seen.look(tokens=iter("twelve char.")).layers[0].keys[0] == "t"
    assert seen.look(tokens=tuple("twelve char.")).layers[0].queries[11] == "."


def test_texts_of_a_batch_are_shown_for_the_item_that_is_asked_for(tmp_path: Path) -> None:
    with regard.watch(nn.Module()) as seen:
        regard.attention(*torch.randn(3, 2, 2, 12, 4).unbind())
    seen.texts = [list("abcdefghijkl"), list("ABCDEFGHIJKL")]
    assert [seen.look(item=i).layers[0].keys[3] for i in (0, 1)] == ["d", "D"]
    assert seen.look(item=1).facts["batch item"] == "1 of 0 to 1; statistics are means over all"
    pages = [seen.save(tmp_path / f"{i}.html", item=i).read_text("utf-8") for i in (0, 1)]
    assert pages[0] != pages[1]
    maps = [seen.look(item=i).layers[0].heads[1].map for i in (0, 1)]
    torch.testing.assert_close(maps[1], seen[""].weights()[1, 1])
    assert not torch.equal(*maps)
    seen.texts = list("abcdefghijkl")
    assert seen.look(item=1).layers[0].keys[3] == "d"
    with pytest.raises(ArgumentError, match=r"^look: item must be from 0 to 1, an index into the batch\. Got 2\."):
        seen.save(tmp_path / "2.html", item=2)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([["a"] * 12] * 3, "one list or one per batch item, 2. Got 3 lists"),
        ([["a"] * 12, ["a"] * 11], "one per query or one per key of a layer, 12. Got 11; without texts"),
        (["a"] * 11, "one per query or one per key of a layer, 12. Got 11; without texts"),
        ([["a"] * 12, [3] * 12], "one such list per batch item. Got int; decode"),
        ([["a"] * 12, None], "one such list per batch item. Got NoneType"),
        (torch.arange(12), "Got Tensor"),
        ("twelve char.", "Got str"),
        (7, "Got int"),
    ],
)
def test_texts_that_do_not_fit_are_refused(texts: Any, says: str) -> None:
    with regard.watch(nn.Module()) as seen:
        regard.attention(*torch.randn(3, 2, 2, 12, 4).unbind())
    seen.texts = texts
    with pytest.raises(ArgumentError) as error:
        seen.look(item=1)
    assert str(error.value).startswith("Seen: texts must be ")
    assert says in str(error.value)
    seen.texts = None
    assert seen.look(item=1).layers[0].keys[3] == "3"


def test_heads_without_finite_logits_have_no_numbers_and_are_not_duplicates() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 32, 8).unbind()
    q[:, 1:3] = torch.nan
    with regard.watch(nn.Module()) as seen:
        regard.attention(q, k, v, mask=regard.causal())
    for head in seen.heads:
        assert {math.isnan(x) for x in head.numbers().values()} == {head.head in (1, 2)}
    assert [(one.rule, one.heads) for one in seen.findings()] == [("logits", (1, 2))]
    lines = str(seen.table()).splitlines()
    assert [line.count("–") for line in lines] == [0, 0, 10, 10, 0, 0]
    means, _ = str(seen.table(by_layer=True)).splitlines()[1:]
    assert means.count("–") == 10


def test_a_call_without_queries_or_keys_is_named() -> None:
    model = Gpt()
    with regard.watch(model) as seen:
        model(torch.zeros(1, 0, dtype=torch.int64))
        model(torch.zeros(1, 3, dtype=torch.int64))
    assert set(seen.missed) == {"blocks.0.attn", "blocks.1.attn"} == set(seen.layers)
    assert "(1, 4, 0, 0) as (batch, heads, queries, keys)" in seen.missed["blocks.0.attn"]
    assert seen.look().facts["calls not seen in"] == "blocks.0.attn, blocks.1.attn"


class SelfAttention(nn.Module):
    """Attention by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class WholeAttention(nn.Module):
    """Attention followed by a projection, as many models nest them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(GPT_DIM, GPT_DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


@pytest.mark.parametrize("training", [False, True])
def test_attention_by_hand_is_named_and_what_was_seen_is_not(training: bool) -> None:
    fused = nn.TransformerEncoderLayer(GPT_DIM, 2, dropout=0.1, batch_first=True)
    model = nn.Sequential(WholeAttention(SelfAttention()), WholeAttention(Attention()), fused).train(training)
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, GPT_DIM))
    assert seen.layers == ["1.inner", "2.self_attn"]
    assert list(seen.missed) == ["0.inner"]
    assert "by hand" in seen.missed["0.inner"]
    with regard.watch(model[0].inner) as seen:
        model(torch.randn(1, 5, GPT_DIM))
    assert list(seen.missed) == [""]


def test_if_nothing_was_seen_the_reason_is_given() -> None:
    with regard.watch(nn.Linear(2, 2)) as seen:
        pass
    assert seen.missed == {"": "it was not called inside the with block"}
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no attention was seen in the model"), regard.watch(model) as seen:
        model(torch.zeros(1, 2))
    assert "made no attention call" in seen.missed[""]
    with pytest.raises(ZeroDivisionError), regard.watch(model) as seen:  # the error says what went wrong
        raise ZeroDivisionError
    assert not seen.missed


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_misuse_of_watch_is_refused() -> None:
    model: Any = Gpt()
    for wrong, says in ((nn.Linear, "the class Linear"), (torch.jit.script(nn.Linear(2, 2)), "TorchScript")):
        with pytest.raises(DtypeError, match=says):
            regard.watch(wrong)
    with pytest.raises(DtypeError, match="tell must be a function"):
        regard.watch(model, 3)  # type: ignore[arg-type]
    unused: Any = regard.watch(model)
    with pytest.raises(AttributeError, match=r"with regard\.watch"):
        unused.heads
    with unused as seen, pytest.raises(ArgumentError, match="entered only once"), unused:
        pass
    with pytest.raises(ArgumentError, match="entered only once"), unused:
        pass
    with pytest.raises(ArgumentError, match="did the model run"):
        seen["blocks.0.attn"]
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert not seen.calls  # nothing is left behind
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_short_text_is_shown_weight_by_weight_and_a_long_one_by_means() -> None:
    with regard.watch(torch.nn.Module()) as seen:
        regard.attention(*torch.randn(3, 2, 2, 256, 8, generator=torch.Generator().manual_seed(0)).unbind())
    torch.testing.assert_close(seen.look(item=1).layers[0].heads[1].map, seen[""].weights()[1, 1])
    with regard.watch(torch.nn.Module()) as longer:
        regard.attention(*torch.randn(3, 1, 1, 300, 8, generator=torch.Generator().manual_seed(0)).unbind())
    assert longer.look().layers[0].heads[0].map.shape == (256, 256)


def test_a_report_of_a_text_that_fits_no_layer_has_positions() -> None:
    loaded = loading.load(None)
    reading = loaded.tokenize("to be or not to be")
    seen = inspection.inspect(loaded, reading)
    told: list[str] = []
    assert inspection.build_look(loaded, reading, seen, told.append).layers[0].queries == reading.pieces
    assert told == seen.layers
    longer, seen.texts = replace(reading, pieces=[*reading.pieces, "more"]), None
    assert inspection.build_look(loaded, longer, seen).layers[0].queries[:2] == ["0", "1"]


def test_a_layer_is_given_by_its_name_or_its_place() -> None:
    model = Gpt()
    with regard.watch(model) as seen:
        model(torch.zeros(1, 9, dtype=torch.int64))
    assert seen[1] is seen[-1] is seen["blocks.1.attn"]
    assert list(seen) == seen.layers
    assert torch.equal(seen.map(0), seen.map("blocks.0.attn"))
    assert {row[0] for row in seen.table(layer=1).rows} == {"blocks.1.attn"}
    for wrong in (2, True, 1.0):
        with pytest.raises(ArgumentError, match=r"a layer is its name, or its place, from 0 to 1\. Got"):
            seen[wrong]  # type: ignore[index]
    with pytest.raises(ArgumentError, match="table: sort must be a statistic: entropy, "):
        seen.table(sort="width")
    order = [row[2]["entropy"] for row in seen.table(sort="entropy").rows]
    assert order == sorted(order, reverse=True)


def named_in_the_docs() -> list[str]:
    """Every `regard.models.x` and `regard.report.x` that a page of the docs names in code, except in the API index."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*pages, ROOT / "README.md"])
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))
    return sorted(set(re.findall(r"\bregard\.(?:models|report)\.\w+", code)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name is looked up in a process of its own, by fork")
def test_what_the_docs_name_is_reached_after_import_regard_alone() -> None:
    names = sorted({*named_in_the_docs(), "regard.report.page", "regard.models.callbacks"})
    assert len(names) > 4
    script = """
import os, sys, torch, regard  # torch takes seconds, so it is there for all; of regard each imports its own part
for name in sys.argv[1:]:
    if os.fork() == 0:
        eval(name), eval(name.rpartition(".")[0])
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=True, env=env)
    assert not done.stdout, f"not reached: {done.stdout.split()}"


def test_a_name_that_is_not_there_is_an_attribute_error_and_dir_lists_what_is() -> None:
    assert {"page", "look", "atlas"} <= set(dir(regard.report))
    assert {"callbacks", "loading", "watch"} <= set(dir(regard.models))
    for package in (regard, regard.models, regard.report):
        with pytest.raises(AttributeError, match="nothing"):
            package.nothing
