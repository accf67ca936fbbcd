"""The Hopper kernels without a GPU: numbers, barriers and hazards, by an interpreter of our own."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gluon_interpreter
import regard
from contract_cases import Case, Shape, agree, plain_results, results, truth
from gluon_interpreter import Deadlock, run_hopper_kernels
from regard.kernels.arguments import KernelArgs
from regard.kernels.block_mask import BlockMask
from regard.kernels.hopper import backward_launch, forward_launch, key_blocks, ptx

BLOCKS = Shape(batch=1, heads=2, kv_heads=1, n=150, m=200, d=64, dv=64)
WIDER = replace(BLOCKS, d=128, dv=128)
SEEN = torch.rand(2, 150, 200, generator=torch.Generator().manual_seed(0)) < 0.01
SEEN[:, :70, :64] = True
SLOPES, TABLE = torch.tensor([0.1, 0.2]), torch.linspace(-1, 1, 66).view(2, 33)


def everything(s: Shape) -> dict[str, Any]:
    return {
        "mask": SEEN,
        "bias": torch.randn(s.heads, s.n, s.m),
        "softcap": 5.0,
        "scale": torch.linspace(0.1, 0.2, s.heads),
        "sink": torch.randn(s.heads),
    }


CASES = [
    Case("plain", lambda s: {}, BLOCKS),
    Case("causal", lambda s: {"mask": regard.causal()}, replace(WIDER, n=200, kv_heads=2)),
    Case("window and sink", lambda s: {"mask": regard.window(40, 9), "sink": torch.randn(s.heads)}, WIDER),
    Case("window and cap", lambda s: {"mask": regard.window(290, 20), "softcap": 3.0}, replace(BLOCKS, n=250, m=450)),
    Case("bits by head", lambda s: {"mask": SEEN, "softcap": 3.0}, BLOCKS),
    Case("alibi", lambda s: {"mask": regard.padding([170]), "bias": regard.biases.alibi(SLOPES)}, WIDER),
    Case("relative", lambda s: {"mask": regard.blocks(50), "bias": regard.biases.relative(TABLE)}, BLOCKS),
    Case("all together", everything, BLOCKS),
    Case("dims 96", lambda s: {"mask": regard.causal()}, replace(BLOCKS, d=96, dv=96)),
    Case("dims 192 and 128", lambda s: {"mask": regard.prefix(70)}, replace(BLOCKS, d=192, dv=128)),
    Case("dims 256", lambda s: {"mask": regard.window(90)}, replace(BLOCKS, d=256, dv=256)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_and_gradients_agree_with_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_hopper_kernels(monkeypatch)
    tensors, kwargs = case.inputs(torch.float16)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results("triton", tensors, kwargs)
    assert started == ["forward", "backward"]
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


MODS: dict[str, Any] = {
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "relative": lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-16, 16) + 16],
    "NaN at hidden pairs": lambda s, b, h, i, j: s - torch.log((51 + i - j).float()),
    "softcap": lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0),
}


@pytest.mark.parametrize("name", MODS)
def test_a_function_of_the_scores_that_is_a_cap_or_a_bias_runs_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_hopper_kernels(monkeypatch)
    case = Case(name, lambda s: {"mask": regard.causal(), "score": regard.scores.Pointwise(MODS[name])}, BLOCKS)
    tensors, kwargs = case.inputs(torch.float16)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results("triton", tensors, kwargs)
    assert started == ["forward", "backward"]
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")
    assert "the function of the scores is" in str(regard.why(*tensors, **kwargs, backend="triton"))


CHUNKED = replace(BLOCKS, n=70, m=140, d=96, dv=96)
WINDOW = {"mask": regard.window(40, 9), "scale": torch.linspace(0.1, 0.2, 2)}
IN_CHUNKS = [
    Case("plain", lambda s: {}, replace(CHUNKED, kv_heads=2)),
    Case("causal and softcap", lambda s: {"mask": regard.causal(), "softcap": 4.0}, replace(CHUNKED, d=80, dv=80)),
    Case("window and scales", lambda s: dict(WINDOW), replace(CHUNKED, d=72, dv=72)),
    Case("bias", lambda s: {"bias": torch.randn(s.heads, s.n, s.m)}, replace(CHUNKED, d=88, dv=88)),
    Case("all together", everything, replace(BLOCKS, d=96, dv=96)),
    Case("dims 80 and 96", lambda s: {"mask": regard.causal()}, replace(CHUNKED, d=80)),
]  # fmt: skip


@pytest.mark.parametrize("case", IN_CHUNKS, ids=lambda case: case.name)
def test_gradients_in_two_chunks_agree_with_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    tensors, kwargs = case.inputs(torch.float16)
    assert tile_of(tensors) == backward_launch.CHUNKED
    gradients_agree(tensors, kwargs)


@pytest.mark.parametrize(("d", "dv"), [(96, 64), (64, 96), (96, 128), (128, 80)])
def test_dims_that_do_not_both_need_a_second_chunk_have_none(d: int, dv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    tensors, kwargs = Case("causal", lambda s: {"mask": regard.causal()}, replace(CHUNKED, d=d, dv=dv)).inputs(
        torch.float16
    )
    assert not tile_of(tensors).chunked
    gradients_agree(tensors, kwargs)


def tile_of(tensors: list[Tensor]) -> backward_launch.BackwardTile:
    q, k, v = tensors
    return backward_launch.tile_for(KernelArgs(q, k, v, BlockMask(q.shape[2], k.shape[2])))


def gradients_agree(tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
    found, true, ordinary = results("triton", tensors, kwargs), truth(tensors, kwargs), plain_results(tensors, kwargs)
    agree(found[1], true[1], ordinary[1], 3, "gradient")


def inputs(n: int, d: int = 64, heads: tuple[int, int] = (2, 1)) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(1, h, n, d, generator=g).half().requires_grad_() for h in (heads[0], heads[1], heads[1])]


def rows_and_gradients(programs: int, d: int, dv: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Rows, gradients and the float32 sums of dQ, with at most `programs` programs at a time, and that as the seed."""
    sums: list[Tensor] = []
    postprocess = backward_launch.postprocess_dq

    def keep_sums(w: Any, workspace: Any, tile: Any) -> Tensor:
        sums.append(workspace.dq_sums.clone())
        return postprocess(w, workspace, tile)

    with monkeypatch.context() as patch:
        run_hopper_kernels(patch, seed=programs, programs=programs)
        patch.setattr(backward_launch, "postprocess_dq", keep_sums)
        q, k, v = inputs(520, d, (1, 1))
        tensors = [q.detach()[:, :, :130].requires_grad_(), k, v.detach()[..., :dv].requires_grad_()]
        seen = regard.observe(*tensors, mask=regard.window(480), backend="triton")
        loss = seen.output.square().sum() + seen.entropy.sum()
        return [seen.output, seen.lse, *torch.autograd.grad(loss, tensors), *sums]


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_the_order_in_which_programs_and_warps_run_changes_no_bit(
    d: int, dv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [rows_and_gradients(programs, d, dv, monkeypatch) for programs in (1, 2, 4)]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_sums_of_dq_in_no_order_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_key_block_alone(semaphore: Any, position: Any) -> None:
        gluon_interpreter.here().pause(lambda: int(semaphore.load()) >= min(int(position), 1), "a semaphore")

    *ordered, sums = rows_and_gradients(4, 64, 64, monkeypatch)
    monkeypatch.setitem(gluon_interpreter.HOPPER, "acquire", first_key_block_alone)
    *unordered, other_sums = rows_and_gradients(4, 64, 64, monkeypatch)
    assert not torch.equal(sums, other_sums)
    for x, y in zip([*ordered, sums], [*unordered, other_sums], strict=True):
        torch.testing.assert_close(x, y)


def test_a_program_that_waits_for_a_later_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    key_tile = gluon_interpreter.in_python(key_blocks.key_tile, {"gl": SimpleNamespace(**gluon_interpreter.LANGUAGE)})

    def last_keys_first(params: Any, tile: Any) -> Any:
        return key_tile(params, params.key_blocks * params.batch_kv_heads - 1 - tile)

    monkeypatch.setitem(gluon_interpreter.HOPPER, "key_tile", last_keys_first)
    for d in (64, 256):  # programs that take many tiles, and one each
        with pytest.raises(Deadlock, match="a semaphore"):
            rows_and_gradients(2, d, d, monkeypatch)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (96, 40), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_logits_far_above_the_first_ones_are_computed_again(
    d: int, dv: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a causal mask the last keys come first, and with them the row max; all heads but one then need a retry."""
    run_hopper_kernels(monkeypatch)
    counts = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(forward_launch, "_counters", lambda w, tile: counts)
    q, k, v = (x.detach() for x in inputs(520, d, (3, 3)))
    k[:, :2, 100:200] *= 30
    found, wanted = (
        seen_under_dropout(*(x.to(dtype) for x in (q, k, v[..., :dv])), dropout, backend)
        for backend, dtype in (("triton", torch.float16), ("reference", torch.float64))
    )
    assert counts[1] > 0 < counts[2]
    assert counts[3] == 0
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=5e-3, rtol=1e-3)


def seen_under_dropout(q: Tensor, k: Tensor, v: Tensor, dropout: float, backend: str) -> list[Tensor]:
    torch.manual_seed(3)
    seen = regard.observe(q, k, v, mask=regard.causal(), dropout=dropout, backend=backend)
    return [seen.output, seen.lse, seen.max_logit, seen.entropy]


def test_a_program_takes_its_next_tile_when_four_key_blocks_are_left_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier, one with long row blocks would hold the next one while others are idle; later, it would wait."""
    run_hopper_kernels(monkeypatch)
    events: list[tuple[int, str]] = []

    def noted(what: str, call: Any) -> Any:
        def run(*args: Any) -> Any:
            events.append((gluon_interpreter.here().program, what))
            return call(*args)

        return run

    monkeypatch.setitem(gluon_interpreter.ASSEMBLY, ptx.COUNT, noted("take", gluon_interpreter.ASSEMBLY[ptx.COUNT]))
    monkeypatch.setitem(gluon_interpreter.HOPPER, "tma_load", noted("load", gluon_interpreter.HOPPER["tma_load"]))
    q, k, v = (x.detach() for x in inputs(7 * 128, 64, (2, 2)))
    regard.attention(q[:, :, :500], k, v, backend="triton")
    for program in (0, 1):  # which share six tiles of three groups, with seven key blocks each
        loads = [len(run) for run in "".join(what[0] for who, what in events if who == program).split("t")]
        assert loads == [3 + 2 * 3, *[3 + 2 * 7] * (len(loads) - 2), 2 * 4]
    assert sum(what == "take" for _, what in events) == 6


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    q, k, v = (x.detach().bfloat16() for x in inputs(150))
    found = forward_launch.launch_forward(KernelArgs(q, k, v, BlockMask(150, 150), scale=0.125), True)
    wanted = regard.attention(q.double(), k.double(), v.double(), backend="reference")
    assert (found.output - wanted).abs().max() < 8e-3


@pytest.mark.parametrize("d", [64, 96, 128])
def test_values_that_nobody_may_see_leave_no_trace(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    clean, dirty = inputs(150, d), inputs(150, d)
    with torch.no_grad():
        for x in dirty[1:]:
            x[:, :, 100:] = math.nan
    for x, y in zip(*(results("triton", x, {"mask": regard.padding([100])}) for x in (clean, dirty)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


EMPTY = torch.arange(150) % 80 < 75  # all rows but 75 to 79: whole blocks of 64, and a part of one
EMPTY_ROWS: dict[str, Any] = {
    "spans": {"mask": regard.causal(offset=-75)},
    "bits": {"mask": ~EMPTY[:, None] & (torch.rand(150, 150, generator=torch.Generator().manual_seed(2)) < 0.5)},
    "bias": {"bias": torch.zeros(2, 150, 150).masked_fill(EMPTY[:, None], -math.inf)},
}


@pytest.mark.parametrize("kind", EMPTY_ROWS)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_queries_of_rows_that_see_nothing_leave_no_trace(
    kind: str, d: int, dv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_hopper_kernels(monkeypatch)
    clean, dirty = ([q, k, v[..., :dv].detach().requires_grad_()] for q, k, v in (inputs(150, d), inputs(150, d)))
    kwargs = EMPTY_ROWS[kind]
    with torch.no_grad():
        empty = regard.observe(*clean, **kwargs, backend="reference").lse.isinf()
        dirty[0][empty] = math.nan
    assert empty.any(-1).all()
    for x, y in zip(*(results("triton", x, kwargs) for x in (clean, dirty)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_keys_past_the_end_have_no_weight_beside_logits_far_below_0(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    q, k, v = inputs(150, d)
    with torch.no_grad():
        k.copy_(-200 / d**0.5 * torch.ones_like(k) + k / 8)
        q.copy_(torch.ones_like(q) + q / 8)
    gradients_agree([q, k, v], {})  # a logit of 0 against lse = −195 is a weight of e^195


def test_a_key_that_is_no_number_is_in_the_rows_that_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    q, k, v = (x.detach() for x in inputs(150))
    k[:, :, 70] = math.nan
    found = regard.observe(q, k, v, mask=regard.causal(), backend="triton")
    nan = torch.arange(150) >= 70
    assert all((x.isnan() == nan).all() for x in (found.output[..., 0], found.lse, found.entropy))


@pytest.mark.parametrize("d", [64, 96])
def test_dropout(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)

    def found(backend: str, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(3)
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs(150, d)]
        output = regard.attention(*leaves, mask=regard.causal(), dropout=0.3, backend=backend)
        return [output.detach(), *torch.autograd.grad(output.sum(), leaves)]

    for ours, true in zip(found("triton", torch.float16), found("reference", torch.float64), strict=True):
        assert (ours - true).norm() < 2e-3 * true.norm()


def test_statistics_and_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_hopper_kernels(monkeypatch)
    tensors = [x.detach() for x in inputs(150)]
    doubles = [x.double() for x in tensors]
    found, wanted = (
        regard.observe(*x, mask=regard.causal(), backend=b) for x, b in ((tensors, "triton"), (doubles, "reference"))
    )
    torch.testing.assert_close(found.received.double(), wanted.received, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.map(7, 20).double(), wanted.map(7, 20), atol=1e-5, rtol=1e-5)
    for x, y in zip(*(tangents(x, b) for x, b in ((tensors, "triton"), (doubles, "reference"))), strict=True):
        assert (x - y).norm() < 2e-3 * y.norm()
    assert {"forward", "received", "pooled", "jvp"} == set(started)


def tangents(tensors: list[Tensor], backend: str) -> tuple[Tensor, Tensor]:
    directions = tuple(x.flip(2) for x in tensors)
    return torch.func.jvp(
        lambda *x: regard.attention(*x, mask=regard.window(60), backend=backend), tuple(tensors), directions
    )


@pytest.mark.parametrize("what", ["arrive", "expect"])
def test_a_barrier_that_nobody_completes_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    monkeypatch.setattr(gluon_interpreter.HOPPER["mbarrier"], what, lambda *args, **named: None)
    q, k, v = (x.detach() for x in inputs(300))
    with pytest.raises((Deadlock, AssertionError)):
        regard.attention(q, k, v, backend="triton")


def test_a_buffer_that_is_handed_on_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    wait = gluon_interpreter.HOPPER["mbarrier"].wait
    monkeypatch.setattr(  # the producer never waits for a free buffer
        gluon_interpreter.HOPPER["mbarrier"],
        "wait",
        lambda *args, **named: None if gluon_interpreter.here().name == "producer" else wait(*args, **named),
    )
    tensors = [x.detach() for x in inputs(600)]
    with pytest.raises(Deadlock):  # consumers wait for a phase that is over
        regard.attention(*tensors, backend="triton")


def test_a_product_that_nobody_waited_for_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run_hopper_kernels(monkeypatch)
    monkeypatch.setitem(
        gluon_interpreter.HOPPER, "warpgroup_mma_wait", lambda left=0, deps=(): deps[0] if len(deps) == 1 else deps
    )
    with pytest.raises(AssertionError, match="before it is waited for"):
        regard.attention(*(x.detach() for x in inputs(150)), backend="triton")
