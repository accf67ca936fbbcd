"""A census equals brute force over full matrices, whatever the order, the shards and the interruptions."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, DtypeError, FileError
from regard.models import Census, census
from regard.models.head_census import Corpus, Texts, codec_of
from regard.models.head_census.candidates import Places, Wanted, strongest_keys
from regard.models.head_census.codec import Codec
from regard.models.head_census.exemplars import KEYS, ExemplarSet
from regard.models.head_census.pieces import CLASSES, Pieces
from regard.models.head_census.row_values import BEHAVIOURS
from regard.models.head_census.scales import NAMES, SCALES
from regard.models.loading import load

SPECIAL = 0
WORDS = ["[CLS]", *(f" w{i}" for i in range(1, 9)), "ing", "s", " 7", ",", "\n"]


def pieces(ids: Any) -> list[str]:
    return [WORDS[i] for i in ids]


class Reader(nn.Module):
    """Two layers of torch's attention over tokens, causal or not, with padding; and the same by full matrices."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.causal, self.dim, self.heads = causal, 16, 2
        self.embedding = nn.Embedding(len(WORDS), self.dim)
        self.layers = nn.ModuleList(nn.Linear(self.dim, 3 * self.dim) for _ in range(2))
        nn.init.normal_(self.embedding.weight, std=1.5)

    def _split(self, layer: nn.Module, x: Tensor) -> list[Tensor]:
        parts = layer(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return list(parts)

    def _mask(self, ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        n = ids.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool).tril() if self.causal else torch.ones(n, n, dtype=torch.bool)
        return seen if attention_mask is None else seen & (attention_mask != 0)[:, None, None, :]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            q, k, v = self._split(layer, x)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(input_ids, attention_mask))
            x = x + y.transpose(1, 2).flatten(2)
        return x

    @torch.no_grad()
    def logits(self, ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
        """The logits of each layer (items, heads, N, N), −inf where hidden."""
        x, found = self.embedding(ids), []
        for layer in self.layers:
            q, k, v = self._split(layer, x)
            S = (q.double() @ k.double().mT) / math.sqrt(q.shape[-1])
            S = S.masked_fill(~self._mask(ids, attention_mask), -math.inf)
            found.append(S)
            x = x + (S.softmax(-1) @ v.double()).float().transpose(1, 2).flatten(2)
        return found


def padded_batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(9)
    found = []
    for lengths in ((9, 6, 9), (7, 13)):
        ids = torch.randint(1, len(WORDS), (len(lengths), max(lengths)))
        ids[:, 0] = SPECIAL
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        found.append({"input_ids": ids, "attention_mask": mask.long()})
    return found


def brute_rows(model: Reader, batches: list[dict[str, Tensor]]) -> Iterator[dict[str, Any]]:
    """Every row of every head, with its statistics, one by one."""
    for batch in batches:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        for layer, S in enumerate(model.logits(ids, mask)):
            for item, head, i in np.ndindex(*S.shape[:3]):
                if mask[item, i]:
                    facts = {"layer": layer, "head": head, "position": i, "token": int(ids[item, i])}
                    yield facts | {"length": int(mask[item].sum())} | brute_row(S[item, head, i], ids[item].tolist(), i)


def brute_row(S: Tensor, ids: list[int], i: int) -> dict[str, Any]:
    p = S.softmax(-1)
    visible = int(S.isfinite().sum())
    entropy = float(-(p * p.clamp(min=1e-300).log()).sum())
    copies = [j for j in range(i) if ids[j] == ids[i]]
    after = [j + 1 for j in range(i - 1) if ids[j] == ids[i]]
    key = int(p.argmax())
    away = key not in (0, i - 1, i, i + 1)
    return {
        "entropy": entropy,
        "relative_entropy": entropy / math.log(visible) if visible > 1 else None,
        "effective_keys": math.exp(entropy),
        "max_logit": float(S.max()),
        "first_share": float(p[0]),
        "self_share": float(p[i]),
        "previous_share": float(p[i - 1]) if i else None,
        "saturated_share": float(p.max() > 0.99) if visible > 1 else None,
        "distance": sum(float(p[j]) * abs(i - j) for j in range(len(ids))),
        "concentration": float((p * p).sum()),
        "induction": sum(float(p[j]) for j in after) if after else None,
        "duplicate": sum(float(p[j]) for j in copies) if copies else None,
        "weights": p,
        "active": float(p[key]) if away else 0.0,
        "certain": math.log(visible) - entropy if visible > 1 else None,
    }


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
def test_every_number_equals_brute_force(causal: bool) -> None:
    model, batches = Reader(causal).eval(), padded_batches()
    found = census(model, batches, pieces=pieces, special=[SPECIAL])
    rows = list(brute_rows(model, batches))
    assert found.tokens == sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert [one.head for one in found.heads] == [0, 1, 0, 1]
    for index, one in enumerate(found.heads):
        mine = [row for row in rows if (row["layer"], row["head"]) == divmod(index, model.heads)]
        for scale in SCALES:
            check_summary(one.summaries()[scale.name], [(row[scale.name], row) for row in mine], scale)
        assert one.entropy.count == len(mine)
        for share in one.queries:
            values = [row["active"] for row in mine if row["token"] == share.token]
            assert share.count == len(values)
            assert share.share == pytest.approx(np.mean(values), abs=1e-5)
            assert share.text == WORDS[share.token]


def check_summary(found: Any, values: list[tuple[float | None, dict[str, Any]]], scale: Any) -> None:
    some = [(value, row) for value, row in values if value is not None]
    assert found.count == len(some) == found.counts.sum()
    if not some:
        assert math.isnan(found.mean)
        return
    numbers = np.array([value for value, _ in some])
    assert found.mean == pytest.approx(numbers.mean(), abs=1e-5)
    assert found.smallest == pytest.approx(numbers.min(), abs=1e-5)
    assert found.largest == pytest.approx(numbers.max(), abs=1e-5)
    edges = scale.edges
    for share, decile in zip(np.arange(1, 10) / 10, found.deciles, strict=True):
        exact = np.sort(numbers)[min(len(numbers) - 1, math.ceil(share * len(numbers)) - 1)]
        width = np.interp(exact, edges[:-1], np.diff(edges))
        assert abs(decile - exact) <= 1.01 * width + 1e-5
    classes = Pieces(pieces, [SPECIAL])
    by = {
        "by_position": lambda row: row["position"],
        "by_length": lambda row: row["length"],
        "by_class": lambda row: CLASSES[classes.classes(np.array([row["token"]]))[0]],
    }
    for name, of in by.items():
        curve = getattr(found, name)
        for bucket, mean, count in zip(curve.buckets, curve.means, curve.counts, strict=True):
            mine = [value for value, row in some if in_bucket(of(row), bucket)]
            assert count == len(mine)
            assert mean == pytest.approx(np.mean(mine), abs=1e-5)


def in_bucket(value: int | str, bucket: str) -> bool:
    if isinstance(value, str):
        return value == bucket
    first, _, last = bucket.partition("–")
    return int(first) <= value <= int(last or first)


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
def test_tokens_and_exemplars_equal_brute_force(causal: bool) -> None:
    model, batches = Reader(causal).eval(), padded_batches()
    found = census(model, batches, pieces=pieces, special=[SPECIAL], exemplars=3)
    rows = list(brute_rows(model, batches))
    scores = {"strongest": "active", "certain": "certain", "induction": "induction", "duplicate": "duplicate"}
    scores |= {"distant": "distance", "spread": "entropy"}
    for index, one in enumerate(found.heads):
        layer, head = divmod(index, model.heads)
        mine = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
        received = {share.token: share.share for share in one.keys}
        expected = brute_received(model, batches, layer, head)
        assert received.keys() == {token for token, weight in expected.items() if weight > 0}
        for token, share in received.items():
            assert share == pytest.approx(expected[token], abs=1e-5)
        for behaviour, name in scores.items():
            kept = found.exemplars(layer, head, behaviour)
            values = sorted((row[name] for row in mine if row[name]), reverse=True)
            assert kept[0].score == pytest.approx(values[0], abs=1e-5)
            assert [e.score for e in kept] == sorted((e.score for e in kept), reverse=True)
            best = next(row for row in mine if row[name] == values[0])
            assert kept[0].position == best["position"]
            assert kept[0].tokens[kept[0].place] == best["token"]
            top = best["weights"].topk(len(kept[0].keys))
            torch.testing.assert_close(
                torch.tensor([k.weight for k in kept[0].keys]).double(), top.values, atol=1e-5, rtol=0
            )
            assert kept[0].keys[0].position == int(top.indices[0])
        assert len(found.exemplars(layer, head, "sample")) == 3
    places = [[(e.document, e.position) for e in found.exemplars(*divmod(i, 2), "sample")] for i in range(4)]
    assert all(one == places[0] for one in places)


def brute_received(model: Reader, batches: list[dict[str, Tensor]], layer: int, head: int) -> dict[int, float]:
    totals: dict[int, float] = {}
    for batch in batches:
        ids, mask = batch["input_ids"], batch["attention_mask"] != 0
        P = model.logits(ids, batch["attention_mask"])[layer].softmax(-1)[:, head]  # (items, N, N)
        weight = (P * mask[:, :, None]).sum(1)
        for token, share in zip(ids[mask].tolist(), weight[mask].tolist(), strict=True):
            totals[token] = totals.get(token, 0.0) + share
    whole = sum(totals.values())
    return {token: share / whole for token, share in totals.items()}


TEXT = "the first citizen spoke of corn, and the second citizen spoke of kings. "


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, Codec]:
    torch.manual_seed(4)
    model = regard.models.builtin.Model(dim=32, layers=2, heads=2, window=16).eval()
    return model, codec_of(load("builtin-untrained"))


def corpus(codec: Codec, texts: Any = None, **options: int) -> Corpus:
    texts = Texts([f"{i} {TEXT * (1 + i % 3)}" for i in range(6)] if texts is None else texts)
    settings: dict[str, Any] = {"length": 24, "overlap": 5, "batch_tokens": 96, "most": None} | options
    return Corpus(texts, codec, **settings)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.models.head_census.corpus._POOL", 100)


def same_arrays(a: Census, b: Census) -> None:
    one, other = a.state.arrays(), b.state.arrays()
    assert one.keys() == other.keys()
    for name, x in one.items():
        if name != "json":
            assert np.array_equal(x, other[name], equal_nan=True), name
    assert a.state.texts == b.state.texts
    assert a.state.names == b.state.names
    assert (a.tokens, a.state.facts.documents) == (b.tokens, b.state.facts.documents)


def test_shards_merged_in_any_order_are_one_run_bit_for_bit(small: tuple[nn.Module, Codec]) -> None:
    model, codec = small
    whole = census(model, corpus(codec))
    shards = [census(model, corpus(codec), shard=(i, 3)) for i in range(3)]
    assert all(0 < shard.tokens < whole.tokens for shard in shards)
    same_arrays(shards[2].merge(shards[0]).merge(shards[1]), whole)
    same_arrays(shards[1].merge(shards[2].merge(shards[0])), whole)
    with pytest.raises(ArgumentError, match="both censuses counted"):
        shards[0].merge(shards[0])


def test_each_token_is_counted_once_however_windows_overlap(small: tuple[nn.Module, Codec]) -> None:
    model, codec = small
    texts = [TEXT * 3, TEXT]
    tokens = sum(len(codec.encode(text)) for text in texts)
    assert census(model, corpus(codec, texts, overlap=5)).tokens == tokens
    assert census(model, corpus(codec, texts, overlap=0)).tokens == tokens


def test_a_killed_census_goes_on_and_equals_an_unbroken_one(small: tuple[nn.Module, Codec], tmp_path: Path) -> None:
    model, codec = small
    place = tmp_path / "deep" / ".census"
    calls = []

    def killed(tokens: int, position: int) -> None:
        calls.append(tokens)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        census(model, corpus(codec), checkpoint=place, every=0.0, tell=killed)
    assert [path.name for path in place.parent.iterdir()] == [".census"]
    told: list[int] = []
    resumed = census(model, corpus(codec), checkpoint=place, tell=lambda tokens, _: told.append(tokens))
    assert told[0] == told[1] == calls[1]  # the first groups are not counted again
    same_arrays(resumed, census(model, corpus(codec)))
    with pytest.raises(FileError, match="checkpoint of another census"):
        census(model, corpus(codec, overlap=3), checkpoint=place)
    place.write_bytes(place.read_bytes()[:1000])
    with pytest.raises(FileError, match="not a census, or is damaged"):
        census(model, corpus(codec), checkpoint=place)


def test_plain_batches_are_sharded_too() -> None:
    model, batches = Reader().eval(), padded_batches()
    whole = census(model, batches)
    merged = census(model, batches, shard=(1, 2)).merge(census(model, iter(batches), shard=(0, 2)))
    same_arrays(merged, whole)


def test_a_saved_census_is_read_back_and_its_folder_is_written_at_once(
    small: tuple[nn.Module, Codec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, codec = small
    found = census(model, corpus(codec, ["<script>alert(1)</script> & more, </script> again"] * 2))
    folder = found.save(tmp_path / "out")
    same_arrays(census.load(folder), found)  # type: ignore[attr-defined]
    heads = json.loads((folder / "heads.json").read_text())
    assert [row["head"] for row in heads] == [0, 1, 0, 1]
    pages = [*folder.glob("heads/*.html"), folder / "index.html"]
    assert len(pages) == 5
    assert all(page.read_text().count("</script>") == 2 for page in pages)
    with pytest.raises(FileError, match="already holds a census"):
        found.save(folder)
    monkeypatch.setattr("regard.models.head_census.folder.write_state", broken_write)
    with pytest.raises(FileError, match="cannot be written: no room"):
        found.save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def broken_write(*_: object) -> None:
    raise OSError("no room")


class Broken(Reader):
    """One head of the first layer has logits that are not finite."""

    def _split(self, layer: nn.Module, x: Tensor) -> list[Tensor]:
        q, k, v = super()._split(layer, x)
        if layer is self.layers[0]:
            q = q.clone()
            q[:, 1] = math.nan
        return [q, k, v.nan_to_num(0.0)]


def test_a_head_that_is_not_finite_is_said_and_the_others_are_counted() -> None:
    from regard.models.head_census.view import remarks

    found = census(Broken().eval(), [torch.randint(1, 9, (1, 6))])
    assert remarks(found)[0] == "L0 H1: the logits are not finite in 6 of 6 rows"
    assert math.isnan(found.heads[1].entropy.mean)
    assert found.heads[0].entropy.count == 6
    found.groups()


def test_bad_input_gets_one_clear_sentence(small: tuple[nn.Module, Codec], tmp_path: Path) -> None:
    model, codec = small
    for texts, says in (([], "the texts are empty"), (["  "], "the texts are empty"), (["a"], "more than one key")):
        with pytest.raises(ArgumentError, match=says):
            census(model, corpus(codec, texts))
    with pytest.raises(ArgumentError, match="no attention was seen in 'Linear'"):
        census(nn.Linear(4, 4), [torch.zeros(1, 4)])
    with pytest.raises(DtypeError, match="batches must be an iterable"):
        census(model, torch.zeros(2, 3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"shard must be \(i, n\)"):
        census(model, [], shard=(2, 2))
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\n" * 3 + b"\xff")
    with pytest.raises(FileError, match="byte 15 is 0xff"):
        census(model, corpus(codec, bad))
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(ArgumentError, match="line 2 has no 'text'; it has 'body'"):
        list(Texts(lines))
    lines.write_text("{\n")
    with pytest.raises(FileError, match="line 1 is not JSON"):
        list(Texts(lines))


def test_texts_come_from_files_folders_and_lines(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.jsonl").write_text('{"text": "first"}\n\n"also first"\n')
    assert [(d.name, d.text) for d in Texts(tmp_path)] == [
        ("a/c.jsonl:1", "first"),
        ("a/c.jsonl:3", "also first"),
        ("b.txt", "second"),
    ]
    long = "word " * 100_000
    (tmp_path / "long.txt").write_text(long)
    parts = [document.text for document in Texts(tmp_path / "long.txt")]
    assert len(parts) > 2
    assert "".join(parts) == long


def test_equal_contexts_take_one_place() -> None:
    found = census(load("builtin-untrained").model, [torch.tensor([[5, 6, 7, 8] * 12])], exemplars=6)
    kept = found.exemplars(1, 0, "distant")
    contexts = [e.tokens[e.place - 3 : e.place + 1] for e in kept]
    assert len(set(contexts)) == len(contexts)
    assert len(kept) == 6  # four turns of the cycle, and beginnings


def test_a_merged_set_of_exemplars_is_the_best_of_both() -> None:
    drawn = np.random.default_rng(3)
    parts = []
    for source in range(3):
        one = ExemplarSet.of_heads(2, 4)
        one.score[:] = drawn.integers(0, 5, one.score.shape)
        one.context[:] = drawn.integers(0, 9, one.score.shape)
        one.source[:] = source
        one.row[:] = np.arange(4)
        parts.append(one)
    empty = ExemplarSet.of_heads(2, 4)
    a = empty.merged(parts[0]).merged(parts[1]).merged(parts[2])
    b = empty.merged(parts[2]).merged(parts[1].merged(empty).merged(parts[0]))
    for (name, x), (_, y) in zip(a.parts(), b.parts(), strict=True):
        assert np.array_equal(x, y), name


def test_groups_name_what_heads_of_the_built_in_model_do_and_a_comparison_finds_who_moved(tmp_path: Path) -> None:
    trained, untrained = load(None), load("builtin-untrained")
    codec = codec_of(trained)
    texts = [TEXT * 12]
    found, before = (
        census(one.model, corpus(codec, texts, length=200, batch_tokens=200)) for one in (trained, untrained)
    )
    groups = {group.name: group for group in found.groups()}
    induction = groups["induction: the token after an earlier copy"]
    assert {layer for layer, _ in induction.places} == {"blocks.3.attention"}
    assert induction.words in ("clear", "fair")
    assert sum(len(group.places) for group in groups.values()) == 32
    difference = before.diff(found)
    assert difference.heads[0].distance > 0.5 > difference.heads[-1].distance
    assert found.diff(found).heads[0].distance == 0.0
    from regard.models.head_census.folder import save_comparison

    page = save_comparison(difference, tmp_path / "moved") / "index.html"
    assert "Two censuses compared" in page.read_text()


def test_the_names_of_the_statistics_are_the_fields_of_a_record() -> None:
    found = census(Reader().eval(), [torch.randint(1, 9, (1, 6))])
    assert tuple(found.heads[0].summaries()) == NAMES
    assert {"sample", "certain"} <= {e.behaviour for e in found.exemplars(0, 0)} <= set(BEHAVIOURS)
    assert found.head(1, 1).layer == found.layers[1]
    with pytest.raises(ArgumentError, match="from 0 to 1"):
        found.exemplars(5, 0)
    assert regard.models.census is census


def test_texts_come_from_saved_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, list[dict[str, str]]] = {"train": [{"text": "one"}, {"text": "two"}]}
    stand_in = ModuleType("datasets")
    stand_in.__spec__ = ModuleSpec("datasets", None)
    monkeypatch.setattr(stand_in, "load_from_disk", lambda path: parts, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert [document.text for document in Texts(tmp_path)] == ["one", "two"]
    parts["test"] = []
    with pytest.raises(
        ArgumentError, match=r"several data sets, 'train', 'test'\. Give one of them, such as '.*train'"
    ):
        Texts(tmp_path)
    with pytest.raises(
        ArgumentError, match=r"several parts, 'train', 'test'\. Give one of them, such as texts\['train'"
    ):
        Texts(parts)
    monkeypatch.setattr(stand_in, "load_from_disk", lambda path: Path(path, "data.arrow").read_bytes())
    with pytest.raises(FileError, match=r"cannot be read as a data set: .*No such file"):
        Texts(tmp_path)


def test_a_data_frame_gives_texts_and_shows_one_row_per_head(small: tuple[nn.Module, Codec], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    model, codec = small
    texts = pandas.DataFrame({"text": ["one two three, one two three"] * 2, "id": [1, 2]})
    with pytest.raises(ArgumentError, match="no column 'body'; it has 'text', 'id'"):
        Texts(texts, "body")
    found = census(model, Corpus(Texts(texts), codec, 16, 2, 64))
    frame = found.to_pandas()
    assert list(frame.columns[:5]) == ["layer", "head", "group", "entropy", "entropy_p10"]
    assert frame.groupby("layer").size().tolist() == [2, 2]
    assert frame["entropy"].tolist() == [head.entropy.mean for head in found.heads]
    pandas.testing.assert_frame_equal(Census.load(found.save(tmp_path / "out")).to_pandas(), frame)


@pytest.mark.parametrize("kind", ["batch", "heads", "both", "none", "bias"])
def test_the_strongest_keys_of_rows_are_those_of_the_whole_matrix(kind: str) -> None:
    drawn = torch.Generator().manual_seed(5)
    q, k = torch.randn(3, 4, 40, 16, generator=drawn), torch.randn(3, 2, 40, 16, generator=drawn)
    shapes = {"batch": (3, 1, 40, 40), "heads": (1, 4, 40, 40), "both": (3, 4, 40, 40)}
    options = {"mask": torch.rand(shapes[kind], generator=drawn) > 0.4} if kind in shapes else {}
    if kind == "bias":
        options = {"bias": torch.randn(3, 4, 40, 40, generator=drawn)}
    seen = regard.observe(q, k, k, **options)
    wanted = np.stack([torch.randint(0, size, (30,), generator=drawn).numpy() for size in (4, 3, 40)])
    at = Places(wanted[0], wanted[1], wanted[2], torch.from_numpy(wanted))
    weights, keys = strongest_keys([Wanted(seen, at.part(part), False) for part in (slice(0, 20), slice(20, 30))])
    true = seen.weights()[wanted[1], wanted[0], wanted[2]].topk(KEYS)
    torch.testing.assert_close(weights, true.values)
    assert torch.equal(keys, true.indices)


def test_no_activation_is_kept_for_a_gradient() -> None:
    model, kept = Reader(), []
    model.layers[0].register_forward_hook(lambda module, given, out: kept.append(out.requires_grad))
    with torch.inference_mode():
        census(model, [torch.randint(1, 9, (2, 12))])
    census(model, [torch.randint(1, 9, (2, 12))])
    assert kept == [False, False]
