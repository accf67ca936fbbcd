"""Corners that a careful reader found: each once held a mistake, or a mutation that no other test saw."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import biases, scores
from regard.backends import Chunked
from regard.core.spec import Spec
from regard.core.tiling import TileSizes, strips
from regard.lab.online import peak_bytes

GAPS = {
    "one gap": lambda: regard.prefix(128) | ~regard.prefix(512),
    "two gaps": lambda: regard.prefix(128) | (~regard.prefix(256) & regard.prefix(384)) | ~regard.prefix(512),
    "a partial block, then a gap": lambda: regard.prefix(100) | ~regard.prefix(500),
    "nothing": lambda: ~regard.everything(),
}


@pytest.mark.parametrize("name", GAPS)
def test_hidden_blocks_between_visible_ones_are_in_no_run_and_stay_hidden(name):
    mask, n, m = GAPS[name](), 512, 640
    allowed = mask.dense(n, m)
    for strip in strips(Spec(n, m, mask), (1, 1, 1), TileSizes()):
        seen = torch.zeros(m, dtype=torch.bool)
        for run in strip.runs:
            part = allowed[strip.rows, run.start : run.stop]
            assert part.any()
            assert part.all() or not run.full
            assert not seen[run.start : run.stop].any()
            seen[run.start : run.stop] = True
        blocks = allowed[strip.rows].any(0).unflatten(0, (-1, 128)).any(-1)
        assert torch.equal(seen.unflatten(0, (-1, 128)).any(-1), blocks)
    q, k, v = (torch.randn(1, 1, s, 4, dtype=torch.float64) for s in (n, m, m))
    torch.testing.assert_close(
        regard.attention(q, k, v, mask=mask, backend="chunked"),
        regard.attention(q, k, v, mask=mask, backend="reference"),
    )


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("kv", [1, 2, 3, 6])
def test_a_mask_and_a_bias_for_each_head_follow_the_heads_whatever_the_groups(backend, kv):
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, kv, 11, 8), torch.randn(2, kv, 11, 8)
    mask, bias = torch.rand(6, 9, 11) > 0.3, torch.randn(6, 9, 11)
    alibi = biases.alibi(torch.rand(6))
    for more, own in (
        ({"mask": mask}, lambda h: {"mask": mask[h]}),
        ({"bias": bias}, lambda h: {"bias": bias[h]}),
        ({"bias": alibi}, lambda h: {"bias": biases.alibi(alibi.slopes[h : h + 1])}),
        (
            {"mask": regard.predicate(lambda b, h, i, j: (i + j + h) % 3 > 0)},
            lambda h: {"mask": regard.predicate(lambda b, g, i, j: (i + j + h) % 3 > 0)},
        ),
    ):
        found = regard.attention(q, k, v, backend=backend, **more)
        for h in range(6):
            g = h // (6 // kv)
            one = regard.attention(q[:, h : h + 1], k[:, g : g + 1], v[:, g : g + 1], backend=backend, **own(h))
            torch.testing.assert_close(found[:, h : h + 1], one)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_sink_serves_all_heads_and_gets_the_sum_of_their_gradients(backend, shape):
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    one = torch.full(shape, 0.5, requires_grad=True)
    each = torch.full((4,), 0.5, requires_grad=True)
    a = regard.attention(q, k, v, sink=one, backend=backend)
    b = regard.attention(q, k, v, sink=each, backend=backend)
    torch.testing.assert_close(a, b)
    (ga,), (gb,) = torch.autograd.grad(a.sin().sum(), one), torch.autograd.grad(b.sin().sum(), each)
    torch.testing.assert_close(ga.sum(), gb.sum())


def test_a_buffer_of_a_score_is_watched_too():
    held = torch.ones(4)
    seen = regard.observe(*torch.randn(3, 2, 4, 9, 8).unbind(), score=scores.Scaled(held))
    held.zero_()
    with pytest.raises(regard.errors.ChangedError):
        seen.weights()


def test_vmap_over_a_bias_that_hides_differently_each_time_equals_a_loop():
    q, k, v = torch.randn(3, 2, 2, 6, 4).unbind()
    v[..., 5, :] = torch.nan  # something to look for
    bias = torch.zeros(3, 6, 6)
    bias[..., 5] = -torch.inf
    bias[0, :, 2] = -torch.inf
    found = torch.vmap(lambda b: regard.attention(q, k, v, bias=b, backend="chunked"))(bias)
    alone = torch.stack([regard.attention(q, k, v, bias=b, backend="chunked") for b in bias])
    torch.testing.assert_close(found, alone)


def test_a_strip_of_whole_rows_and_a_tile_of_a_costly_score_stay_within_the_budget():
    for n, m, groups, cost in ((4096, 20000, 1, 1), (4096, 20000, 4, 1), (512, 3000, 2, 64)):
        rule, cut = Spec(n, m, cost=cost), TileSizes()
        for strip in strips(rule, (2, 3, groups), cut, whole=True):
            tile = strip.hull(m)
            rows = tile.rows.stop - tile.rows.start
            assert rows == 1 or 8 * groups * rows * m * cost <= cut.budget
        for strip in strips(rule, (2, 3, groups), cut):
            lead = (strip.batch.stop - strip.batch.start) * (strip.heads.stop - strip.heads.start)
            for run in strip.runs:
                rows = strip.rows.stop - strip.rows.start
                assert run.stop - run.start <= 128 or lead * groups * rows * (run.stop - run.start) * cost <= cut.budget


def test_few_rows_at_a_time_take_less_memory_however_many_heads_there_are():
    q, k, v = torch.randn(3, 1, 16, 1024, 16).unbind()
    few, some, many = (
        peak_bytes(lambda size=size: regard.attention(q, k, v, backend=Chunked(size))) / 2**20 for size in (16, 64, 256)
    )
    assert few + 2 < some
    assert some + 8 < many


def test_for_few_rows_the_keys_are_not_laid_out_anew():
    q, k, v = torch.randn(1, 2, 16, 64), *torch.randn(2, 1, 2, 32768, 64).unbind()
    assert peak_bytes(lambda: regard.attention(q, k, v, backend="chunked")) < k.nbytes


@pytest.mark.parametrize("rows", [3, 16, 64, 200])
def test_keys_in_any_layout_have_the_same_products(rows):
    q = torch.randn(2, 3, rows, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 300, 3, 8, dtype=torch.float64).transpose(2, 3).unbind()  # heads lie within positions
    wide = torch.randn(2, 2, 3, 300, 16, dtype=torch.float64)
    for keys, values in ((k, v), wide[..., ::2], wide[..., :8], k[:1].expand(2, 2, -1, -1, -1)):
        expected = regard.attention(q, keys, values, backend="reference")
        torch.testing.assert_close(regard.attention(q, keys, values, backend="chunked"), expected)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_gradients_and_second_gradients_have_the_same_bits_inside_and_outside_autocast(backend):
    def derivatives(inside):
        q, k, v = (
            x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8, generator=torch.Generator().manual_seed(0)).unbind()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = regard.attention(q, k, v, mask=regard.causal(), backend=backend).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            first = torch.autograd.grad(output.square().sum(), (q, k, v), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
            plain = (
                torch.autograd.grad(regard.attention(q, k, v, backend=backend).float().square().sum(), (q, k, v))
                if False
                else ()
            )
        return [*first, *second, *plain]

    for a, b in zip(derivatives(True), derivatives(False), strict=True):
        assert torch.equal(a, b)


def test_the_first_gradient_has_the_same_bits_inside_and_outside_autocast():
    def derivatives(inside):
        q, k, v = (
            x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8, generator=torch.Generator().manual_seed(0)).unbind()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = regard.observe(q, k, v, mask=regard.causal(), backend="chunked")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return torch.autograd.grad(seen.output.float().square().sum() + seen.entropy.sum(), (q, k, v))

    for a, b in zip(derivatives(True), derivatives(False), strict=True):
        assert torch.equal(a, b)


def test_a_run_of_the_lowest_logits_leaves_the_entropy_finite():
    q, k, v = torch.zeros(1, 1, 512, 2), torch.zeros(1, 1, 4200, 2), torch.zeros(1, 1, 4200, 2)
    bias = torch.zeros(4200)
    bias[:4096] = torch.finfo(torch.float32).min
    seen = regard.observe(q, k, v, bias=bias, backend="chunked")
    torch.testing.assert_close(seen.entropy, torch.full_like(seen.entropy, 104).log())


def test_a_score_that_gains_a_parameter_is_a_change():
    score = scores.Bilinear(8, 8)
    seen = regard.observe(*torch.randn(3, 2, 4, 9, 8).unbind(), score=score)
    score.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(regard.errors.ChangedError):
        seen.weights()


def test_a_probability_that_rounds_to_one_drops_without_overflow():
    i = torch.arange(100)
    from regard.core.dropout import keep

    assert int(keep(1 - 2.0**-50, 3, i[:1], i[:1], i, i).sum()) < 3


def test_rows_whose_keys_share_their_low_half_have_fates_of_their_own():
    from regard.core.dropout import _int32, _mixed, keep

    i = torch.arange(400_000)
    low = _int32(_mixed(i + 1, _mixed(torch.tensor([1]), _mixed(torch.tensor([1]), 7))))
    order = low.argsort()
    twins = (low[order][1:] == low[order][:-1]).nonzero().squeeze(-1)
    assert len(twins)
    a, b = order[twins[0]], order[twins[0] + 1]
    fates = keep(0.5, 7, i[:1], i[:1], torch.stack((a, b)), i[:2000])[0, 0]
    assert not torch.equal(fates[0], fates[1])


def test_zeros_of_both_signs_rank_by_place():
    from regard.chunked.statistics import _by_rank

    S = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])
    assert _by_rank(S, torch.arange(4), 3)[1].tolist() == [[0, 1, 3]]


def test_forward_over_reverse_with_one_input_that_needs_a_gradient():
    from torch.autograd import forward_ad as fwAD

    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    t = torch.randn_like(q)

    def g(q, backend):
        return torch.autograd.grad(regard.attention(q, k, v, backend=backend).sin().sum(), q, create_graph=True)[0]

    out = {}
    for b in ("chunked", "reference", "auto"):
        with fwAD.dual_level():
            d = fwAD.make_dual(q.clone().requires_grad_(), t)
            out[b] = fwAD.unpack_dual(g(d, b)).tangent
    torch.testing.assert_close(out["chunked"], out["reference"])
    torch.testing.assert_close(out["auto"], out["reference"])


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_the_tangent_of_a_bias_alone_is_never_silently_zero(backend):
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    bias, t = torch.randn(2, 6, 6)
    _, found = torch.func.jvp(lambda b: regard.attention(q, k, v, bias=b, backend=backend), (bias,), (t,))
    _, true = torch.func.jvp(lambda b: regard.attention(q, k, v, bias=b, backend="reference"), (bias,), (t,))
    assert true.abs().max() > 1e-3
    torch.testing.assert_close(found, true)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(bias, t)
        found = torch.autograd.forward_ad.unpack_dual(regard.attention(q, k, v, bias=dual, backend=backend)).tangent
    torch.testing.assert_close(found, true)


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("watched", [False, True])
def test_nan_in_the_keys_behind_a_causal_mask_from_the_top_leaves_no_trace(backend, watched):
    q, k, v = torch.randn(2, 4, 37, 16), torch.randn(2, 4, 41, 16), torch.randn(2, 4, 41, 16)
    k[..., 37:, :] = torch.nan
    v[..., 37:, :] = torch.inf
    q, k, v = (x.requires_grad_(watched) for x in (q, k, v))
    found = regard.attention(q, k, v, mask=regard.causal(offset=0), backend=backend)
    assert found.isfinite().all()
    if watched:
        assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), (q, k, v)))


def test_strides_are_no_reason_for_sdpa_to_refuse():
    x = torch.randn(16, 2, 4, 9).movedim(0, -1)
    assert x.stride(-1) != 1
    assert regard.why(x, x, x).backend == "sdpa"


def test_a_mask_shared_by_leading_dimensions_is_a_reason_of_its_own():
    x = torch.randn(2, 3, 4, 9, 8)
    assert any("leading dimensions" in r for r in regard.why(x, x, x, mask=regard.padding([5, 9])).refusals["sdpa"])


@pytest.mark.parametrize("more", ["bias", "head bias"])
def test_second_derivatives_under_a_fixed_bias_are_those_of_the_formula(more):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 6, 4).unbind())
    bias = torch.randn(6, 6) if more == "bias" else torch.randn(2, 6, 6)
    assert regard.why(q, k, v, bias=bias).backend == "sdpa"

    def twice(backend):
        (first,) = torch.autograd.grad(
            regard.attention(q, k, v, bias=bias, backend=backend).sin().sum(), q, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), (q, k, v))

    for a, b in zip(twice("sdpa"), twice("reference"), strict=True):
        torch.testing.assert_close(a, b)


def test_nan_in_a_query_that_a_small_mask_leaves_without_keys_reaches_no_gradient():
    q, k, v = torch.randn(1, 2, 13, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    q[..., 0, :] = torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    found = regard.attention(q, k, v, mask=regard.causal(offset=-1))  # every key is seen, row 0 sees none
    assert not found[..., 0, :].any()
    dq, dk, dv = torch.autograd.grad(found.square().sum(), (q, k, v))
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    assert not dq[..., 0, :].any()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_minus_infinity_in_a_relative_table_hides_as_a_mask_does(backend):
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    table = torch.zeros(2, 5)
    table[:, 3:] = -torch.inf
    seen = regard.observe(q, k, v, bias=biases.relative(table), backend=backend)
    same = regard.observe(q, k, v, mask=regard.causal(), backend=backend)
    for member in ("output", "lse", "entropy", "visible", "received"):
        torch.testing.assert_close(getattr(seen, member), getattr(same, member))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("mask", [regard.prefix(5), regard.dense(torch.arange(9) < 5), regard.padding([5])], ids=repr)
def test_a_hidden_key_so_large_that_its_logits_overflow_leaves_no_trace(mask, watched):
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    true = regard.attention(q, k, v, mask=mask)
    k = k.clone()
    k[:, :, 7] = 3e38
    q = q.requires_grad_(watched)
    torch.testing.assert_close(regard.attention(q, k, v, mask=mask), true)


def test_half_precision_that_sums_beyond_its_range_is_finite():
    x = torch.full((2, 4, 300, 64), 0.5).half()
    assert regard.why(x, x, x, mask=regard.padding([5, 300])).backend == "sdpa"


@pytest.mark.parametrize("score", [scores.Bilinear(8, 8), scores.Additive(8, 8, 4)], ids=["Bilinear", "Additive"])
def test_a_score_under_autocast_in_a_compiled_call_is_that_outside(score):
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()

    def call():
        return regard.attention(q, k, v, score=score, softcap=5.0)

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(call(), torch.compile(call, backend="eager")(), atol=0, rtol=0)


def test_one_row_of_keys_for_all_items_pads_every_item():
    q, k, v = torch.randn(3, 2, 2, 400, 8).unbind()
    keep = torch.rand(400) > 0.5
    found = regard.attention(q, k, v, mask=regard.padding(keep), backend="sdpa")
    torch.testing.assert_close(found, regard.attention(q, k, v, mask=regard.padding(keep), backend="reference"))


def test_a_mask_that_all_heads_share_is_covered_once():
    class Counted(type(regard.causal())):
        asked = 0

        def cover(self, *args):
            Counted.asked += 1
            return super().cover(*args)

    x = torch.randn(4, 8, 600, 4)
    regard.attention(x, x, x, mask=Counted(), backend=Chunked(chunk_size=64))
    assert Counted.asked == 1
