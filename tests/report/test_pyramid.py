"""The pyramid: every tile of every level is the mean of what `weights()` gives, for any mask, bias and score."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.biases import Bias
from regard.errors import ArgumentError, ChangedError, DtypeError
from regard.observation import Observation
from regard.report import pyramid as module
from regard.report.pyramid import SIDE, Pyramid


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def observed(n: int, m: int, heads: int = 1, keys: int = 1, batch: int = 1, dim: int = 8, **how: Any) -> Observation:
    q, k = drawn(batch, heads, n, dim, seed=1) * 2, drawn(batch, keys, m, dim, seed=2)
    return regard.observe(q, k, k[..., :2], backend="chunked", **how)


def pooled(weights: Tensor, level: int) -> Tensor:
    """Means over cells of 2^level × 2^level pairs, in float64."""
    down, across = (np.arange(0, size, 1 << level) for size in weights.shape)
    total = np.add.reduceat(np.add.reduceat(weights.double().numpy(), down, 0), across, 1)
    height, width = (np.diff(edges, append=size) for edges, size in zip((down, across), weights.shape, strict=True))
    return torch.from_numpy(total / (height[:, None] * width))


def whole(pyramid: Pyramid, level: int) -> Tensor:
    """All tiles of a level side by side."""
    height, width = (range(0, size, SIDE) for size in pyramid.shape(level))
    rows = [torch.cat([pyramid.tile(level, r, c) for c in range(len(width))], 1) for r in range(len(height))]
    return torch.cat(rows)


def matches(pyramid: Pyramid, weights: Tensor, first: int = 0) -> None:
    """Check every level from `first` on against the weights, once the coarse ones are known."""
    while pyramid.advance():
        pass
    for level in range(first, pyramid.top + 1):
        found, truth = whole(pyramid, level), pooled(weights, level)
        assert found.dtype == torch.float32
        assert found.shape == truth.shape == pyramid.shape(level)
        assert bool(((found - truth).abs() <= 2e-5 * truth + 1e-9).all())  # NaN is not


class Ramp(Bias):
    """A user-defined bias: one step per head."""

    tensors = (torch.tensor([0.1, -0.2]),)
    heads = 2

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return tensors[0][:, None, None] * (i[:, None] - j).sign()

    def to(self, device: torch.device | str) -> Ramp:
        return self


MASKS = {
    "none": None,
    "causal": regard.causal(),
    "causal with an offset": regard.causal(offset=40),
    "a window": regard.window(70),
    "a window and global tokens": regard.window(30, right=5) | regard.global_tokens([0, 300]),
    "blocks": regard.blocks(100),
    "strided": regard.strided(3) & regard.causal(),
    "a predicate": regard.predicate(lambda b, h, i, j: (i * 7 + j * (h + 1) + b) % 5 > 1),
    "padding": regard.padding([555, 300]),
    "dense, one per head": regard.dense(torch.rand(2, 2, 601, 555, generator=torch.Generator().manual_seed(5)) < 0.7),
    "nothing": ~regard.everything(),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_level_is_the_mean_of_the_weights_under_every_mask(name: str) -> None:
    seen = observed(601, 555, heads=2, batch=2, mask=MASKS[name])
    matches(Pyramid(seen, 1, 1), seen.weights()[1, 1])


HOW: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.tensor([0.5, 3.0])},
    "scale": {"scale": torch.tensor([0.1, 2.0])},
    "bias": {"bias": drawn(1, 2, 270, 330, seed=7)},
    "a bias that hides": {"bias": torch.where(drawn(270, 330, seed=7) > 0, 0.0, -torch.inf)},
    "bias of the keys": {"bias": drawn(2, 1, 1, 330, seed=7)},
    "alibi": {"bias": regard.biases.alibi(torch.tensor([0.5, 0.01]))},
    "relative": {"bias": regard.biases.relative(drawn(2, 9, seed=8))},
    "relative, all heads alike": {"bias": regard.biases.relative(drawn(9, seed=8)), "mask": regard.causal()},
    "a user-defined bias": {"bias": Ramp()},
    "temperature": {"score": regard.scores.Temperature(heads=2)},
    "cosine": {"score": regard.scores.Cosine(0.2)},
    "gaussian": {"score": regard.scores.Gaussian(1.5), "mask": regard.causal()},
    "bilinear": {"score": regard.scores.Bilinear(8, 8, heads=2)},
    "additive": {
        "score": regard.scores.Additive(8, 8, hidden=4),
        "bias": regard.biases.alibi(torch.tensor([0.5, 0.01])),
    },
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("name", HOW)
def test_every_level_is_the_mean_of_the_weights_for_every_option(name: str) -> None:
    seen = observed(270, 330, heads=2, batch=2, **HOW[name])
    for item, head in ((0, 1), (1, 0)):
        matches(Pyramid(seen, item, head), seen.weights()[item, head].detach())


def test_heads_that_share_keys_read_their_own() -> None:
    seen = observed(300, 257, heads=6, keys=3)
    for head in (0, 3, 5):
        matches(Pyramid(seen, head=head), seen.weights()[0, head])


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
def test_any_number_of_leading_dimensions(lead: tuple[int, ...]) -> None:
    q, k = drawn(*lead, 40, 8), drawn(*lead, 50, 8, seed=1)
    mask = regard.padding([50, 20]) if len(lead) == 3 else None
    seen = regard.observe(q, k, k, mask=mask, backend="chunked")
    items = 1 if not lead else 3 if len(lead) == 1 else 6
    flat = seen.weights().reshape(items, -1, 40, 50)
    for item in range(items):
        matches(Pyramid(seen, item, flat.shape[1] - 1), flat[item, -1])


@pytest.mark.parametrize(("n", "m"), [(1, 1), (256, 256), (257, 256), (1, 5000), (4500, 3), (513, 2050)])
@pytest.mark.parametrize("mask", [None, regard.causal()], ids=["all", "causal"])
def test_lengths_that_fit_no_tile_and_maps_that_are_long_on_one_side(n: int, m: int, mask: Any) -> None:
    seen = observed(n, m, mask=mask)
    matches(Pyramid(seen), seen.weights()[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_give_float32_tiles_of_the_exact_weights(dtype: torch.dtype) -> None:
    q, k = drawn(1, 1, 90, 8).to(dtype), drawn(1, 1, 80, 8, seed=1).to(dtype)
    truth = regard.observe(q.double(), k.double(), k.double()).weights()[0, 0]
    matches(Pyramid(regard.observe(q, k, k, backend="chunked")), truth)


def test_large_logits_keep_their_digits() -> None:
    q, k = drawn(1, 1, 60, 8) * 300, drawn(1, 1, 50, 8, seed=1) * 30
    truth = regard.observe(q.double(), k.double(), k.double()).weights()[0, 0]
    found = Pyramid(regard.observe(q, k, k, backend="chunked")).tile(0, 0, 0)
    torch.testing.assert_close(found.double(), truth, rtol=2e-2, atol=1e-3)


def test_hidden_keys_leave_no_trace_even_if_they_are_nan() -> None:
    q, k = drawn(1, 1, 300, 8), drawn(1, 1, 300, 8, seed=1)
    k[..., 280:, :] = torch.nan
    seen = regard.observe(q, k, k, mask=regard.prefix(280), backend="chunked")
    matches(Pyramid(seen), seen.weights()[0, 0])


@pytest.mark.parametrize(
    "mask", [None, regard.causal(), regard.window(200, right=100)], ids=["all", "causal", "window"]
)
def test_the_coarse_levels_of_a_long_map_are_exact_too(mask: Any) -> None:
    seen = observed(1100, 2101, mask=mask)
    pyramid = Pyramid(seen)
    assert pyramid.top == pyramid.base == 4
    matches(pyramid, seen.weights()[0, 0], first=2)


def test_coarse_levels_pool_the_levels_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DIRECT_LEVEL", 0)
    seen = observed(1301, 1100, mask=regard.causal())
    pyramid = Pyramid(seen)
    assert (pyramid.base, pyramid.top) == (1, 3)
    matches(pyramid, seen.weights()[0, 0])


def test_a_base_level_that_would_be_too_large_is_a_coarser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DIRECT_LEVEL", 0)
    monkeypatch.setattr(module, "_MAX_BASE_CELLS", 400 * 400)
    seen = observed(1301, 1100)
    pyramid = Pyramid(seen)
    assert (pyramid.base, pyramid.top) == (2, 3)
    matches(pyramid, seen.weights()[0, 0])


def test_rows_that_are_not_yet_known_are_nan_and_those_that_are_stay() -> None:
    seen = observed(2100, 2100, mask=regard.causal())
    truth = pooled(seen.weights()[0, 0], 4)
    pyramid = Pyramid(seen)
    assert pyramid.progress == 0.0
    assert pyramid.known == 0
    assert pyramid.tile(4, 0, 0).isnan().all()
    assert not pyramid.tile(3, 1, 0).isnan().any()
    before = 0.0
    while pyramid.advance():
        tile, rows = pyramid.tile(4, 0, 0), -(-pyramid.known // 16)
        assert tile[rows:].isnan().all()
        torch.testing.assert_close(tile[:rows].double(), truth[:rows], rtol=2e-5, atol=1e-9)
        assert pyramid.progress > before
        before = pyramid.progress
    assert pyramid.progress == 1.0


def test_an_interrupted_strip_is_computed_again() -> None:
    seen = observed(2100, 2100)
    pyramid, calls = Pyramid(seen), iter(range(2))

    def interrupt() -> None:
        next(calls)  # the third call raises

    with pytest.raises(StopIteration):
        pyramid.advance(interrupt) and pyramid.advance(interrupt) and pyramid.advance(interrupt)
    assert pyramid.progress < 1.0
    matches(pyramid, seen.weights()[0, 0], first=4)
    assert pyramid.progress == 1.0


def test_hidden_blocks_are_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = 0
    plain = module.weights

    def counting(x: Any, tile: Any, run: Any, *others: Any) -> Tensor:
        nonlocal pairs
        pairs += (tile.rows.stop - tile.rows.start) * (run.stop - run.start)
        return plain(x, tile, run, *others)

    monkeypatch.setattr(module, "weights", counting)
    pyramid = Pyramid(observed(4096, 4096, mask=regard.window(100)))
    while pyramid.advance():
        pass
    assert pairs <= 4096 * 1024
    pairs = 0
    assert not pyramid.tile(2, 0, 2).any()
    assert pairs == 0


def test_a_score_with_large_temporaries_is_computed_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    plain = module.weights

    def counting(x: Any, tile: Any, run: Any, *others: Any) -> Tensor:
        nonlocal most
        most = max(most, (tile.rows.stop - tile.rows.start) * (run.stop - run.start) * x.spec.cost)
        return plain(x, tile, run, *others)

    monkeypatch.setattr(module, "weights", counting)
    seen = observed(90, 120, score=regard.scores.Additive(8, 8, hidden=256))
    matches(Pyramid(seen), seen.weights()[0, 0].detach())
    assert 0 < most <= 2**21


def test_a_map_holds_one_head_only() -> None:
    assert Pyramid(observed(600, 600, heads=8, keys=4)).bytes == Pyramid(observed(600, 600)).bytes


def test_several_threads_may_request_tiles_while_the_coarse_levels_are_computed() -> None:
    seen = observed(2100, 2100, mask=regard.causal())
    pyramid, truth = Pyramid(seen), pooled(seen.weights()[0, 0], 2)
    wrong: list[float] = []

    def look(row: int) -> None:
        for _ in range(4):
            rows = slice(row * SIDE, (row + 1) * SIDE)
            wrong.append(float((pyramid.tile(2, row, 0).double() - truth[rows, :SIDE]).abs().max()))

    threads = [threading.Thread(target=look, args=(row,)) for row in range(3)]
    for thread in threads:
        thread.start()
    while pyramid.advance():
        pass
    for thread in threads:
        thread.join()
    assert len(wrong) == 12
    assert max(wrong) < 1e-6
    assert pyramid.progress == 1.0


def test_inputs_changed_in_place_raise_an_error() -> None:
    q, k = drawn(1, 1, 2300, 4), drawn(1, 1, 2300, 4, seed=1)
    pyramid = Pyramid(regard.observe(q, k, k, backend="chunked"))
    k.add_(1.0)
    with pytest.raises(ChangedError, match=r"^tile: .*changed in place"):
        pyramid.tile(0, 0, 0)
    with pytest.raises(ChangedError, match=r"^advance: "):
        pyramid.advance()


def test_bad_arguments_get_one_clear_error() -> None:
    seen = observed(300, 520, heads=2)
    with pytest.raises(DtypeError, match=r"^Pyramid: observation must come from regard\.observe\. Got Tensor"):
        Pyramid(drawn(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^Pyramid: head must be a whole number from 0 to 1\. Got 2\."):
        Pyramid(seen, head=2)
    with pytest.raises(ArgumentError, match=r"^Pyramid: item must be a whole number from 0 to 0\. Got True\."):
        Pyramid(seen, item=True)
    with pytest.raises(ArgumentError, match=r"^Pyramid: a map needs at least one query and one key"):
        Pyramid(observed(0, 5))
    pyramid = Pyramid(seen)
    with pytest.raises(ArgumentError, match=r"^tile: level must be a whole number from 0 to 2\. Got 3\."):
        pyramid.tile(3, 0, 0)
    with pytest.raises(ArgumentError, match=r"^tile: row must be a whole number from 0 to 1 at level 0\. Got 2\."):
        pyramid.tile(0, 2, 0)
    with pytest.raises(ArgumentError, match=r"^tile: col must be a whole number from 0 to 2 at level 0\. Got -1\."):
        pyramid.tile(0, 0, -1)
