"""Findings: every rule finds its pattern in heads built by hand, and nothing in random heads."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.compat.compiled import OperatorMode
from regard.errors import ArgumentError, DtypeError
from regard.masks import Mask
from regard.models import findings, record
from regard.models.findings import (
    RULES,
    Collapsed,
    Duplicate,
    Finding,
    Induction,
    LargeLogits,
    Place,
    Positional,
    Rule,
    Saturated,
    Sink,
    Uniform,
    find,
    induction,
    sampling,
)
from regard.models.seen import Seen
from regard.models.watch import watch

N, H = 32, 4
TOKENS = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[: N // 2].repeat(2)[None]


class Fixed(nn.Module):
    """Attention whose queries and keys are given, so that its weights are known; each logit is q·k."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool = False, mask: Tensor | None = None) -> None:
        super().__init__()
        self.q, self.k, self.causal, self.mask = q, k, causal, mask

    def forward(self) -> Tensor:
        v = torch.zeros(*self.k.shape[:-1], 2)
        return F.scaled_dot_product_attention(self.q, self.k, v, self.mask, is_causal=self.causal, scale=1.0)


class Model(nn.Module):
    """Several layers, one after the other."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, input_ids: Tensor | None = None) -> None:
        for layer in self.layers.values():
            layer()


def watched(tokens: Tensor | None = TOKENS, **layers: nn.Module) -> Seen:
    model = Model(**layers)
    with watch(model) as seen:
        model() if tokens is None else model(tokens)
    return seen


def random(heads: int = H, n: int = N, m: int = N, seed: int = 0, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Queries (batch, heads, n, D) and keys (batch, heads, m, D) whose logits are drawn from about N(0, 1)."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, heads, length, 64, generator=draw) for length in (n, m))
    return q / 8.0, k


def aimed(targets: Tensor, strength: float | Tensor, seed: int = 0, at: int = 1, **shape: int) -> Fixed:
    """Random heads, except head `at`: its row i has the logit `strength` with key targets[i], and 0 with others."""
    q, k = random(seed=seed, **shape)
    n = k.shape[2]
    q, k = F.pad(q, (0, n)), F.pad(k, (0, n))
    q[:, at], k[:, at] = 0.0, 0.0
    q[:, at, torch.arange(len(targets)), 64 + targets] = torch.as_tensor(strength, dtype=torch.float32)
    k[:, at, torch.arange(n), 64 + torch.arange(n)] = 1.0
    return Fixed(q, k)


def scattered(n: int = N) -> Tensor:
    """One target per row, without a pattern."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(3))


def previous(offset: int = -1, n: int = N) -> Tensor:
    return (torch.arange(n) + offset).clamp(0, n - 1)


def followers() -> Tensor:
    """In the second half, the token after the same one in the first; before it, scattered targets."""
    return torch.cat([scattered()[: N // 2], torch.arange(N // 2) + 1])


def halved() -> Tensor:
    """A large logit in 5 of 8 rows, and 0 in the rest."""
    return torch.where(torch.arange(N) % 8 < 5, 40.0, 0.0)


def doubled() -> Fixed:
    q, k = random()
    q[:, 3], k[:, 3] = q[:, 1] * 1.001, k[:, 1]
    return Fixed(q, k)


def peaked(logit: float) -> Fixed:
    layer = aimed(scattered(), 1.0)
    layer.q[:, 1, 7] *= logit
    return layer


CASES: dict[str, tuple[Rule, Fixed, str]] = {
    "logits": (
        LargeLogits(),
        peaked(150.0),
        "the largest logit is 150 (in bfloat16, numbers of that size are 1 apart)",
    ),
    "very large logits": (
        LargeLogits(),
        peaked(1500.0),
        "the largest logit is 1500 (in bfloat16, numbers of that size are 8 apart)",
    ),
    "not a number": (LargeLogits(), peaked(math.nan), "the logits are not finite"),
    "collapsed": (
        Collapsed(),
        aimed(scattered(), 40.0),
        "the entropy has collapsed to 0.00 nats: a row attends to 1.0 keys",
    ),
    "saturated": (
        Saturated(),
        aimed(scattered(), halved()),
        "saturated: one key has all the weight in 0.62 of the rows, and hardly any gradient passes",
    ),
    "uniform": (
        Uniform(),
        aimed(scattered(), 0.0),
        "dead head: attends to every key alike, with 1.000 of the entropy of uniform attention",
    ),
    "sink": (
        Sink(),
        aimed(torch.zeros(N, dtype=torch.long), 6.0),
        "attention sink: 0.93 of the weight goes to the first token",
    ),
    "sink at the end": (
        Sink(),
        aimed(torch.full((N,), N - 1), 6.0),
        "attention sink: 0.93 of the weight goes to the last token",
    ),
    "sink within": (
        Sink(),
        aimed(torch.full((N,), 5), 4.0),
        "attention sink: 0.64 of the weight goes to the token at position 5",
    ),
    "previous": (
        Positional(),
        aimed(previous(), 5.0),
        "attends to the previous token in 1.00 of the rows, with 0.83 of their weight",
    ),
    "self": (
        Positional(),
        aimed(previous(0), 5.0),
        "attends to its own position in 1.00 of the rows, with 0.83 of their weight",
    ),
    "next": (
        Positional(),
        aimed(previous(1), 5.0),
        "attends to the next token in 1.00 of the rows, with 0.83 of their weight",
    ),
    "offset": (
        Positional(),
        aimed(previous(-4), 5.0),
        "attends to the token 4 before in 1.00 of the rows, with 0.83 of their weight",
    ),
    "induction": (
        Induction(),
        aimed(followers(), 5.0),
        "induction head: attends to the token after an earlier copy of the current one, with 0.83 of its weight "
        "where uniform attention gives 0.03",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_rule_finds_its_pattern_and_names_the_layer_and_the_head(case: tuple[Rule, Fixed, str]) -> None:
    rule, layer, says = case
    (found,) = find(watched(a=Fixed(*random()), b=layer), [rule])
    assert found.text == str(found) == f"L1 H1: {says}"
    assert found.places == (Place("layers.b", (1,)),)
    assert (found.rule, found.layer, found.heads) == (rule.name, "layers.b", (1,))
    assert found.level in ("problem", "notable")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_all_rules_together_say_no_more_than_that(case: tuple[Rule, Fixed, str]) -> None:
    rule, layer, _ = case
    assert [(one.rule, one.heads) for one in find(watched(a=Fixed(*random()), b=layer))] == [(rule.name, (1,))]


def test_a_rule_finds_two_heads_that_are_alike() -> None:
    seen = watched(a=Fixed(*random()), b=doubled())
    (found,) = find(seen)
    assert found.text == "L1 H1 = H3: duplicates: the same weights except for 0.000 of them"
    assert 0.0 < found.value < 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_random_heads_give_no_finding(seed: int) -> None:
    causal = Fixed(*random(seed=seed, batch=2), causal=True)
    cross = Fixed(*random(seed=seed, n=9, batch=2))
    short = Fixed(*random(seed=seed, n=3, m=3), causal=True)
    tokens = TOKENS.repeat(2, 1)
    assert find(watched(tokens, a=Fixed(*random(seed=seed, batch=2)), b=causal, c=cross, d=short)) == []


@pytest.mark.parametrize("n", [0, 1, 2])
def test_sequences_that_are_too_short_give_no_finding(n: int) -> None:
    q, k = random(n=n, m=n)
    assert find(watched(None, a=Fixed(q, k), b=Fixed(q, k, causal=True))) == []


def test_every_file_of_rules_is_in_the_list_once() -> None:
    folder = Path(findings.__file__).parent
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "base", "sampling"))
    assert sorted(rule.__module__.rpartition(".")[2] for rule in map(type, RULES)) == names
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert {rule.name for rule, *_ in CASES.values()} | {"duplicate"} == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_frozen_data_with_a_source_and_thresholds_that_are_explained(rule: Rule) -> None:
    kind = type(rule)
    assert rule == kind()
    assert kind.__doc__ is not None
    assert re.search(r"\b(19|20)\d\d\b", kind.__doc__), "the year of a paper"
    for field in dataclasses.fields(rule):
        assert f"`{field.name}`" in kind.__doc__
        for wrong in (0.0, -1.0, math.nan, "0.5", True, *([1.5] if field.name in rule.shares else [])):
            with pytest.raises(ArgumentError, match=rf"^{kind.__name__}: {field.name} must be a number above 0"):
                kind(**{field.name: wrong})
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field.name, 0.5)


def shifted(value: float, up: bool) -> float:
    return value * (1 + 1e-6) if up else value * (1 - 1e-6)


# The threshold that decides, the layer, and whether a head must be above the threshold or below it.
LIMITS: dict[str, tuple[type[Rule], str, Fixed, bool]] = {
    "logits": (LargeLogits, "notable", peaked(150.0), True),
    "collapsed": (Collapsed, "entropy", aimed(scattered(), 9.0), False),
    "saturated": (Saturated, "share", aimed(scattered(), halved()), True),
    "uniform": (Uniform, "relative", aimed(scattered(), 0.5), True),
    "sink": (Sink, "share", aimed(torch.zeros(N, dtype=torch.long), 6.0), True),
    "sink within": (Sink, "share", aimed(torch.full((N,), 5), 4.0), True),
    "positional": (Positional, "share", aimed(torch.cat([previous()[:30], torch.tensor([3, 5])]), 5.0), True),
    "duplicate": (Duplicate, "distance", doubled(), False),
    "induction": (Induction, "share", aimed(followers(), 5.0), True),
}


@pytest.mark.parametrize("case", LIMITS.values(), ids=LIMITS.keys())
def test_a_threshold_decides_exactly_at_its_value(case: tuple[type[Rule], str, Fixed, bool]) -> None:
    kind, threshold, layer, above = case
    seen = watched(a=Fixed(*random()), b=layer)
    (found,) = find(seen, [kind(**{threshold: 1e-6})] if above else [kind()])
    inside, outside = (kind(**{threshold: shifted(found.value, up)}) for up in (not above, above))
    assert [one.value for one in find(seen, [inside])] == [found.value]
    assert find(seen, [outside]) == []


SILENT: dict[str, tuple[Rule, Fixed]] = {
    "relative entropy above": (Collapsed(relative=0.001), aimed(scattered(), 9.0)),
    "saturated, but collapsed": (Saturated(), aimed(scattered(), 40.0)),
    "a sink that uniform attention gives too": (Sink(times=55.0), aimed(torch.full((N,), 5), 4.0)),
    "the first token, as in any healthy model": (Sink(), aimed(torch.zeros(N, dtype=torch.long), 5.2)),
    "a sink in too few rows": (Sink(rows=33), aimed(torch.full((N,), 5), 4.0)),
    "saturated, but by position": (Saturated(), aimed(previous(), halved())),
    "saturated, but at rest": (Saturated(), aimed(torch.zeros(N, dtype=torch.long), halved())),
    "collapsed, but by position": (Collapsed(), aimed(previous(), 40.0)),
    "collapsed, but at rest": (Collapsed(), aimed(torch.zeros(N, dtype=torch.long), 40.0)),
    "uniform as far as a long text shows": (Uniform(nats=0.001), aimed(scattered(), 0.5)),
    "induction from a few tokens": (Induction(kinds=17), aimed(followers(), 5.0)),
    "by position, but faint": (Positional(weight=0.85), aimed(previous(), 5.0)),
    "by position in too few rows": (Positional(rows=32), aimed(previous(), 5.0)),
    "by position, but far": (Positional(reach=0.9), aimed(previous(-4), 5.0)),
    "collapsed in too few rows": (Collapsed(rows=33), aimed(scattered(), 40.0)),
    "saturated in too few rows": (Saturated(rows=33), aimed(scattered(), halved())),
    "uniform in too few rows": (Uniform(rows=33), aimed(scattered(), 0.0)),
    "induction that uniform attention gives too": (Induction(times=28.0), aimed(followers(), 5.0)),
    "induction in too few rows": (Induction(least=17), aimed(followers(), 5.0)),
    "previous token, no induction": (Induction(), aimed(previous(), 5.0)),
    "alike in too few rows": (Duplicate(least=33), doubled()),
    "alike, but plain": (Duplicate(plain=0.01), doubled()),
    "alike, but uniform": (Duplicate(relative=0.8), doubled()),
}


@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT.keys())
def test_the_other_thresholds_decide_too(case: tuple[Rule, Fixed]) -> None:
    rule, layer = case
    assert find(watched(a=Fixed(*random()), b=layer), [rule]) == []


def test_problems_come_first_then_the_order_of_the_rules_then_the_strongest() -> None:
    layers = {
        "sink": aimed(torch.full((N,), 5), 4.0),
        "stronger": aimed(torch.full((N,), 6), 5.0),
        "large": peaked(150.0),
        "huge": peaked(1500.0),
    }
    found = find(watched(**layers))
    assert [one.layer.removeprefix("layers.") for one in found] == ["huge", "large", "stronger", "sink"]
    assert [one.level for one in found] == ["problem"] + ["notable"] * 3
    assert [one.rule for one in find(watched(**layers), [Sink(), LargeLogits()])] == [
        "logits",
        "sink",
        "sink",
        "logits",
    ]


def test_heads_with_one_finding_are_named_together() -> None:
    layer, other = aimed(previous(), 4.0), aimed(previous(), 5.0, at=2)
    layer.q[:, 2], layer.k[:, 2] = other.q[:, 2], other.k[:, 2]
    layers = {"a": layer, "b": Fixed(*random()), "c": aimed(previous(), 6.0, at=3)}
    found = find(watched(**layers))
    assert [one.text for one in found] == [
        "L0 H1, 2; L2 H3: attends to the previous token in 1.00 of the rows, with 0.64 to 0.93 of their weight"
    ]
    assert (found[0].layer, found[0].heads) == ("layers.a", (1, 2))
    assert found[0].places == (Place("layers.a", (1, 2)), Place("layers.c", (3,)))
    assert str(found) == repr(found)
    assert " ".join(str(found).split()) == f"· {found[0].text} L0: layers.a L1: layers.b L2: layers.c"
    assert max(map(len, str(found).splitlines())) <= 100
    (found,) = find(watched(a=Fixed(torch.zeros(1, 3, N, 4), torch.zeros(1, 3, N, 4))))
    assert found.text.startswith("L0, all 3 heads: ")
    assert str(find(watched(None, a=Fixed(*random())))) == "no rule found anything wrong or notable"


def test_a_sink_at_a_special_token_must_be_stronger_and_is_named() -> None:
    seen = watched(a=aimed(torch.full((N,), 5), 4.0))
    for text, says in ((" cat", "the token at position 5, 'cat'"), ("[SEP]", None), ("<|im_end|>", None)):
        seen.texts = ["a"] * 5 + [text] + ["b"] * (N - 6)
        assert [one.text.partition("goes to ")[2] for one in find(seen, [Sink()])] == ([says] if says else [])
        assert len(find(seen, [Sink(expected=20.0)])) == 1
    seen = watched(a=aimed(torch.zeros(N, dtype=torch.long), 6.0))
    seen.texts = ["[CLS]"] + ["b"] * (N - 1)
    assert find(seen, [Sink()])[0].text.endswith("0.93 of the weight goes to the first token, [CLS]")


def test_a_sink_of_several_items_is_named_by_its_text_if_they_share_it() -> None:
    seen = watched(a=aimed(torch.full((N,), 5), 4.0))
    for texts, says in (([" cat", " cat"], "position 5, 'cat'"), ([" cat", " dog"], "position 5")):
        seen.texts = [["a"] * 5 + [text] + ["b"] * (N - 6) for text in texts]
        assert find(seen, [Sink()])[0].text.endswith(says)


def test_a_model_whose_heads_all_rest_on_the_first_token_names_the_strongest() -> None:
    layers = {f"l{i}": aimed(torch.zeros(N, dtype=torch.long), 6.0 + i / 10) for i in range(4)}
    for layer in layers.values():
        layer.q[:], layer.k[:] = layer.q[:, 1:2], layer.k[:, 1:2]
    (found,) = find(watched(**layers), [Sink()])
    assert [place.layer for place in found.places] == ["layers.l3"]
    assert found.text.endswith("the first token; 12 more heads do so less strongly")


def test_the_first_layer_has_no_induction_heads() -> None:
    assert find(watched(a=aimed(followers(), 5.0), b=Fixed(*random())), [Induction()]) == []


def test_a_collapse_of_half_a_layer_is_a_problem() -> None:
    layer, other = aimed(scattered(), 40.0), aimed(scattered().flip(0), 40.0, at=2)
    assert [one.level for one in find(watched(a=layer), [Collapsed()])] == ["notable"]
    layer.q[:, 2], layer.k[:, 2] = other.q[:, 2], other.k[:, 2]
    assert [one.level for one in find(watched(a=layer), [Collapsed()])] == ["problem"]
    assert [one.level for one in find(watched(a=layer), [Collapsed(part=0.51)])] == ["notable"]
    for target, levels in ((0, []), (5, ["problem"])):  # at rest on the first token, or stuck at another one
        layer, other = (aimed(torch.full((N,), target), 40.0, at=at) for at in (1, 2))
        layer.q[:, 2], layer.k[:, 2] = other.q[:, 2], other.k[:, 2]
        assert [one.level for one in find(watched(a=layer), [Collapsed()])] == levels


def test_logits_that_are_infinite_or_very_large_are_problems() -> None:
    levels = [find(watched(a=peaked(x)), [LargeLogits()])[0].level for x in (101.0, 1001.0, math.inf, math.nan)]
    assert levels == ["notable", "problem", "problem", "problem"]


def test_a_sink_at_another_position_in_each_item_is_one_finding() -> None:
    layer = aimed(torch.zeros(N, dtype=torch.long), 4.0, batch=2)
    layer.k[1, 1] = layer.k[1, 1].roll(7, 0)
    (found,) = find(watched(None, a=layer), [Sink()])
    assert found.text.endswith("attention sink: 0.64 of the weight goes to one key of each sequence")


def test_the_first_token_of_a_short_causal_sequence_is_not_a_sink() -> None:
    seen = watched(None, a=Fixed(torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4), causal=True))
    assert find(seen, [Sink(share=0.3, rows=6)]) == []
    assert len(find(seen, [Sink(share=0.3, expected=1.0, rows=6)])) == 1


def padded(layer: Fixed, looking: bool) -> Seen:
    """The layer with 16 more positions that no row sees; their own rows see nothing, or every real key."""
    real = torch.arange(N + 16) < N
    q, k = (F.pad(x, (0, 0, 0, 16)) for x in (layer.q, layer.k))
    mask = real.expand(N + 16, -1) if looking else real[:, None] & real
    first = Fixed(*random(n=N + 16, m=N + 16), mask=mask)
    return watched(F.pad(TOKENS, (0, 16)), a=first, b=Fixed(q, k, mask=mask))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("not a number", "next")])
def test_padding_that_sees_nothing_changes_no_finding(name: str) -> None:
    rule, layer, _ = CASES[name]
    (found,) = find(padded(layer, looking=False))
    assert (found.rule, found.heads) == (rule.name, (1,))
    assert found.value == pytest.approx(find(watched(a=Fixed(*random()), b=layer))[0].value, rel=1e-4)


def test_padding_rows_that_see_real_keys_do_not_count_as_repeats() -> None:
    (found,) = find(padded(aimed(followers(), 5.0), looking=True), [Induction()])
    alone = find(watched(a=Fixed(*random()), b=aimed(followers(), 5.0)), [Induction()])
    assert found.value == pytest.approx(alone[0].value, rel=1e-4)


def test_rows_that_see_one_key_give_no_finding() -> None:
    assert find(watched(a=Fixed(*random(), mask=torch.eye(N, dtype=torch.bool)))) == []
    assert find(watched(a=Fixed(*random(), mask=torch.eye(N, dtype=torch.bool).roll(1, 0)))) == []


@pytest.mark.parametrize(
    "tokens",
    [None, torch.arange(N)[None], TOKENS[:, : N - 1], TOKENS.repeat(2, 1), torch.zeros(1, N, dtype=torch.long)],
    ids=["none", "no repeats", "another length", "another batch", "all the same"],
)
def test_without_repeated_tokens_that_fit_there_is_no_induction(tokens: Tensor | None) -> None:
    assert find(watched(tokens, a=Fixed(*random()), b=aimed(followers(), 5.0)), [Induction()]) == []


def test_induction_sums_over_all_earlier_positions_and_leaves_out_hidden_keys() -> None:
    tokens = torch.arange(8).repeat(4)[None]
    targets = torch.cat([scattered()[:24] % 24, torch.arange(8) + 9])
    layer = aimed(targets, 5.0)
    layer.q[:, 1, 24:] += layer.q[:, 1, 24:].roll(-8, -1)  # two of the three places that followed
    (found,) = find(watched(tokens, a=Fixed(*random()), b=layer), [Induction(share=0.1)])
    weights = (layer.q[0, 1] @ layer.k[0, 1].T).softmax(-1)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    after = (tokens[0][:, None] == tokens[0].roll(1)[None]) & (j >= 1) & (j < i)
    assert found.value == pytest.approx(float((weights * after).sum(-1)[8:].mean()), rel=1e-5)
    hidden = torch.ones(N, N, dtype=torch.bool)
    hidden[24:, 8:16] = False
    unseen = watched(tokens, a=Fixed(*random()), b=Fixed(layer.q, layer.k, mask=hidden))
    (found,) = find(unseen, [Induction(share=0.1)])
    weights = (layer.q[0, 1] @ layer.k[0, 1].T).masked_fill(~hidden, -torch.inf).softmax(-1)
    assert found.value == pytest.approx(float((weights * after).sum(-1)[8:].mean()), rel=1e-5)


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(7) & regard.causal()])
@pytest.mark.parametrize("batch_size", [1, 1 << 22])
def test_a_few_followers_are_summed_as_whole_rows_are(
    mask: Mask | None, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_BATCH_SIZE", batch_size)
    q, k, v = torch.randn(2, 4, N, 8), torch.randn(2, 2, N, 8), torch.randn(2, 2, N, 3)
    q[1, 3, 9] = torch.nan
    calls = [regard.observe(q, k, v, mask=mask, sink=sink) for sink in (None, torch.randn(4))]
    rows = torch.arange(3, N, 2)
    tokens = torch.randint(0, 40, (2, N), generator=torch.Generator().manual_seed(0))
    follows, found = induction._followers(tokens, rows), []
    assert follows.any()
    for least in (1, follows.numel() + 1):
        monkeypatch.setattr(induction, "_SPARSE", least)
        found.append(induction._on_followers(calls, follows, rows))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_token_does_not_count_as_its_own_follower() -> None:
    tokens = (torch.arange(N) // 3)[None]  # a a a b b b …: the third of each comes after the first
    rule, first = Induction(least=8), Fixed(*random())
    assert find(watched(tokens, a=first, b=aimed(previous(0), 5.0)), [rule]) == []
    assert find(watched(tokens, a=first, b=aimed(previous(), 5.0)), [rule]) == []  # a match, but by position
    third = torch.where(torch.arange(N) % 3 == 2, previous(), scattered())
    (found,) = find(watched(tokens, a=first, b=aimed(third, 5.0)), [rule])
    assert found.value == pytest.approx(0.827, abs=1e-3)


def test_what_is_read_back_does_not_grow_with_layers_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(OperatorMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.name() in ("aten::_local_scalar_dense", "aten::nonzero")
            return func(*args, **(kwargs or {}))

    def reads(layers: int, heads: int) -> tuple[int, int]:
        """How often single numbers are read, and how often all layers are read back together."""
        q, k = torch.randn(2, 1, heads, N, 8)
        seen, transfers = watched(TOKENS, **{f"l{i}": Fixed(q, k, causal=True) for i in range(layers)}), []
        for module in (record, *(sys.modules[rule.__module__] for rule in RULES)):
            if hasattr(module, "on_host"):
                monkeypatch.setattr(module, "on_host", lambda x: (transfers.append(len(x)), x)[1])
        for layer in seen.layers:
            seen[layer].visible  # which the strips of a CPU count with numbers that they read
        with Reads() as mode:
            seen.heads
            find(seen, [LargeLogits(), Sink(), Positional(), Saturated(), Uniform(), Collapsed()])
        single = mode.count
        find(seen, [Duplicate(), Induction()])
        assert all(count % layers == 0 or count % (layers - 1) == 0 for count in transfers)  # induction leaves out one
        return single, len(transfers)

    assert reads(2, 2) == reads(5, 2) == reads(2, 7) == (0, 8)


def test_small_row_batches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Fixed(*random())
    seen = [watched(TOKENS, a=doubled()), watched(TOKENS, a=first, b=aimed(followers(), 5.0))]
    rules = [Duplicate(), Induction()]
    whole = [(one.text, one.value) for x in seen for one in find(x, rules)]
    monkeypatch.setattr(sampling, "_BATCH_SIZE", 1)
    assert len(whole) == 2
    for (text, value), one in zip(whole, (one for x in seen for one in find(x, rules)), strict=True):
        assert (one.text, one.value) == (text, pytest.approx(value, rel=1e-4))


def test_sampled_rows_are_evenly_spaced_and_always_the_same() -> None:
    seen = watched(TOKENS, a=Fixed(*random()), b=aimed(followers(), 5.0))
    few = [find(seen, [Induction(least=8, rows=8)]), find(seen, [Induction(least=8, rows=8)])]
    assert few[0] == few[1] != []
    assert find(seen, [Induction(least=8, rows=7)]) == []  # fewer than it must have
    assert sampling.evenly_spaced(torch.arange(100), 5).tolist() == [0, 24, 49, 74, 99]
    assert sampling.evenly_spaced(torch.arange(100), 1).tolist() == [0]
    assert sampling.evenly_spaced(torch.arange(3), 8).tolist() == [0, 1, 2]


@pytest.mark.parametrize("strength", [0.0, 9.0])
@pytest.mark.parametrize(
    "targets", [torch.zeros(N, dtype=torch.long), previous(), previous(0)], ids=["first", "previous", "self"]
)
def test_heads_that_hardly_depend_on_content_are_not_duplicates(targets: Tensor, strength: float) -> None:
    layer, other = aimed(targets, strength), aimed(targets, strength, at=3)
    layer.q[:, 3], layer.k[:, 3] = other.q[:, 3], other.k[:, 3]
    assert find(watched(a=layer), [Duplicate()]) == []


def test_three_heads_that_are_alike_are_one_group_and_two_others_another() -> None:
    q, k = random(heads=6)
    for copy, of in ((2, 0), (5, 0), (4, 1)):
        q[:, copy], k[:, copy] = q[:, of], k[:, of]
    found = find(watched(a=Fixed(q, k, causal=True)), [Duplicate()])
    assert [place.heads for one in found for place in one.places] == [(0, 2, 5), (1, 4)]
    assert found[0].text.startswith("L0 H0 = H2 = H5; L0 H1 = H4: duplicates")


def test_what_is_not_a_rule_is_refused() -> None:
    seen: Any = watched(None, a=Fixed(*random()))
    with pytest.raises(DtypeError, match=r"^findings: rules must be rules, such as Sink\(share=0\.5\)\. Got <class"):
        find(seen, [Sink])  # type: ignore[list-item]
    for given in (3, Sink()):
        with pytest.raises(
            DtypeError, match=r"^findings: rules must be a list of rules, such as \[Sink\(share=0\.5\)\]\."
        ):
            find(seen, given)  # type: ignore[arg-type]


def test_a_custom_rule_is_applied_like_the_others() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wide(Rule):
        name = "wide"
        heads: int = 3

        def judge(self, seen: Seen) -> Any:
            for layer in seen.layers:
                count = seen[layer].lse.shape[-2]
                if count >= self.heads:
                    yield Finding(self.name, "notable", f"{count} heads", layer, tuple(range(count)), count)

    assert [str(one) for one in watched(None, a=Fixed(*random())).findings(rules=[Wide()])] == ["4 heads"]


def test_random_heads_and_untrained_models_are_not_notable_and_a_healthy_one_hardly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Path(__file__).parents[2] / "scripts" / "calibrate_findings.py"
    spec = importlib.util.spec_from_file_location("calibrate_findings", script)
    assert spec is not None
    assert spec.loader is not None
    calibrate = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, calibrate)  # where dataclasses look for it
    spec.loader.exec_module(calibrate)
    found = calibrate.counts(calibrate.random_heads(1, (16, 64)))
    found |= calibrate.counts(calibrate.random_models(1, calibrate.SIZES[:1]))
    heads, named = (sum(getattr(count, name) for count in found.values()) for name in ("heads", "any"))
    assert heads == 800
    assert named <= heads / 200
    trained = calibrate.counts(calibrate.trained_models(1))
    assert trained["built-in model"].named["positional"] > 0
    assert trained["built-in model"].named["induction"] > 0
    assert trained["built-in model, untrained"].any == 0
    assert 0 < trained["all-MiniLM-L6-v2"].any <= trained["all-MiniLM-L6-v2"].heads / 10


def test_findings_of_a_model_without_attention_say_that_none_was_seen() -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="no attention was seen"), regard.watch(model) as seen:
        model(torch.zeros(2, 3))
    assert repr(seen.findings()).startswith("no attention was seen: call the model inside")
    assert "no attention was seen" in seen.findings()._repr_html_()
