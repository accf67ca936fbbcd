"""The survey of a call on a GPU: few launches, started again with the arguments of first ones, and few operations."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import observation

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

from recorded_launches import STARTS, record_launches
from regard.backends import Triton, dispatch, remembered
from regard.backends.triton import _of_rows
from regard.kernels import arguments, launch, launch_cache, survey
from regard.kernels.arguments import KernelArgs
from regard.kernels.block_mask import block_mask
from regard.kernels.hopper import forward_launch, statistics_launch
from regard.kernels.portable import statistics_launch as portable
from regard.kernels.portable.configs import CHIPS
from regard.models.record import MAP_SIDE

CPU = torch.device("cpu")
KERNELS = {
    "forward": (forward_launch, "forward"),
    "by bands": (statistics_launch, "pooled_kernel"),
    "portable by bands": (portable.statistics_kernels, "received_by_bands"),
    "fold": (portable.statistics_kernels, "fold_bands"),
    "by rows": (portable.statistics_kernels, "row_survey"),
}


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch, KERNELS)
    for module in (launch, survey):
        monkeypatch.setattr(module, "hopper", lambda _: True)
    monkeypatch.setattr(arguments, "chip_of", lambda _: CHIPS["9.0"])
    for module in (launch, forward_launch, survey):
        monkeypatch.setattr(module, "is_current_device", lambda _: True)
    monkeypatch.setattr(survey, "cuda_allocator", lambda size, dtype: lambda: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(forward_launch, "refuses", lambda _: [])
    monkeypatch.setattr(Triton, "refuses", lambda *_: [])
    monkeypatch.setattr(dispatch, "order", lambda _: dispatch.OTHERS)
    monkeypatch.setattr(observation, "_may_be_remembered", lambda _: True)
    monkeypatch.setattr(remembered, "operations_are_plain", lambda: True)  # under `Operations` they are not
    monkeypatch.setattr(remembered, "_CALLS", {})


class Operations(TorchDispatchMode):
    """Records the operations of torch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Attend(nn.Module):
    def __init__(self, by_regard: bool) -> None:
        super().__init__()
        self.by_regard = by_regard

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.by_regard:
            return regard.attention(q, k, v, mask=regard.window(5), softcap=9.0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("by_regard", [False, True])
def test_a_layer_like_an_earlier_one_is_watched_by_four_launches_and_few_operations(by_regard: bool) -> None:
    model = nn.Sequential(Attend(by_regard))

    watched: list[regard.models.Seen] = []

    def run() -> list[str]:
        q, k, v = torch.zeros(3, 1, 2, 16, 64, dtype=torch.bfloat16).unbind()
        STARTS.clear()
        with torch.no_grad(), regard.watch(model) as seen, Operations() as operations:
            model[0](q, k, v)
        watched.append(seen)
        return operations.names

    run()
    assert [start.how for start in STARTS] == ["first"] * 4
    names = run()
    assert [(start.how, start.kernel) for start in STARTS] == [
        ("again", name) for name in ("forward", "by bands", "fold", "by rows")
    ]
    # The output, its statistics and a counter, then the survey and what its launches hand on.
    assert names == ["aten::empty.memory_format"] * 2 + ["aten::zeros"] + ["aten::empty.memory_format"] * 2 + [
        "aten::zero_"
    ]
    call, survey = watched[1]["0"], watched[1].surveys()["0"].survey
    for x, y in ((call.received, survey.received), (call.visible, survey.visible), (call.distance, survey.distance)):
        assert y is not None
        assert x.data_ptr() == y.data_ptr()
    assert len(STARTS) == 4  # nobody computed them again


def work(mask: regard.Mask | None, n: int = 300, **more: Any) -> KernelArgs:
    x = (torch.randn(2, heads, n, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    return KernelArgs(*x, block_mask(mask, n, n, CPU), 0.125, **more)


def rows_of(w: KernelArgs) -> list[Tensor]:
    return [torch.zeros(w.rows) for _ in range(3)]


def comparable(x: Any) -> Any:
    """An argument as something that equals another with the same numbers in the same places."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype
    if hasattr(x, "block_shape"):
        return tuple(x.base.shape), x.shape, x.strides, x.block_shape, x.layout
    return tuple(map(comparable, x)) if isinstance(x, tuple) else x


@pytest.mark.parametrize("by_chip", [True, False])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.strided(5)], ids=repr)
def test_launches_that_are_started_again_have_the_arguments_of_first_ones(
    mask: Any, by_chip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "hopper", lambda _: by_chip)
    first, again = work(mask), work(mask)
    survey.survey(first, *rows_of(first), 7, 5)
    rows = rows_of(again)
    found = survey.survey(again, *rows, 7, 5)
    assert [start.how for start in STARTS] == ["first"] * 3 + ["again"] * 3
    for (_, name, programs, given), (_, same, count, others) in zip(STARTS[:3], STARTS[3:], strict=True):
        assert (name, programs) == (same, count)
        assert tuple(map(comparable, given)) == tuple(map(comparable, others))
    kernel = portable.statistics_kernels.row_survey
    by_rows = dict(zip(kernel.arg_names, STARTS[5].arguments, strict=True))
    assert by_rows["q"] is again.query
    assert by_rows["out"].totals is found.totals
    assert all(x is y for x, y in zip(by_rows["stats"], rows, strict=True))
    fold = dict(zip(portable.statistics_kernels.fold_bands.arg_names, STARTS[4].arguments, strict=True))
    assert fold["received"] is found.received
    assert fold["first"] is by_rows["first"]


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.strided(5)], ids=repr)
def test_a_shortcut_passes_the_arguments_of_first_launches(mask: Any) -> None:
    first, again = work(mask), work(mask)
    assert survey.survey_shortcut(first, 7, 5) is None  # nothing was launched yet
    survey.survey(first, *rows_of(first), 7, 5)
    run, statistics = survey.survey_shortcut(first, 7, 5), torch.zeros(4, *again.rows)
    assert run is not None
    stacked = run(again.query, again.key, statistics, again.block_mask)
    assert stacked is not None
    found = stacked.survey
    _, row_max, log_row_sum, entropy = (x.data_ptr() for x in statistics)
    assert [start.how for start in STARTS] == ["first"] * 3 + ["again"] * 3
    by_bands, fold, by_rows = (
        dict(zip(names, start.arguments, strict=True))
        for names, start in zip(
            (
                statistics_launch.pooled_kernel.arg_names,
                portable.statistics_kernels.fold_bands.arg_names,
                portable.statistics_kernels.row_survey.arg_names,
            ),
            STARTS[3:],
            strict=True,
        )
    )
    assert (by_bands["q"].base, by_bands["k"].base) == (again.query, again.key)
    assert (by_bands["row_max"], by_bands["log_row_sum"]) == (row_max, log_row_sum)
    assert by_bands["out"] == fold["bands"]
    assert fold["first"] == by_rows["first"] == fold["bands"] + 4 * 2 * 4 * 7 * 300
    for name, part in (("received", found.received), ("cells", found.map), ("peaks", found.peaks)):
        assert fold[name] == part.data_ptr()
    kernels = zip(by_rows["out"], portable.RowSurvey._fields, strict=True)
    assert all(place == getattr(found, name).data_ptr() and not place & 15 for place, name in kernels)
    assert (by_rows["q"], by_rows["k"], by_rows["stats"]) == (again.query, again.key, (row_max, log_row_sum, entropy))
    true = survey.survey(again, *rows_of(again), 7, 5)
    for start, other in zip(STARTS[3:6], STARTS[6:], strict=True):
        assert (start.kernel, start.programs) == (other.kernel, other.programs)
        assert tuple(map(without_tensors, start.arguments)) == tuple(map(without_tensors, other.arguments))
    assert [(x.shape, x.dtype) for x in found[:-1]] == [(x.shape, x.dtype) for x in true[:-1]]


def without_tensors(x: Any) -> Any:
    """An argument with None for what differs from call to call."""
    if isinstance(x, Tensor) or (isinstance(x, int) and x > 2**32) or x is None:
        return None
    if hasattr(x, "block_shape"):
        return x.shape, x.strides, x.block_shape, x.layout
    return tuple(map(without_tensors, x)) if isinstance(x, tuple) else x


def test_a_shortcut_to_a_survey_is_not_taken_where_something_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    w = work(regard.causal())
    survey.survey(w, *rows_of(w), 7, 5)
    run, statistics = survey.survey_shortcut(w, 7, 5), torch.zeros(4, *w.rows)
    assert run is not None
    assert run(w.query, w.key, statistics, w.block_mask) is not None
    beside = torch.zeros(w.query.numel() + 1, dtype=w.query.dtype)[1:].view_as(w.query)
    assert run(beside, w.key, statistics, w.block_mask) is None
    assert run(w.query, w.key, statistics, work(regard.strided(5)).block_mask) is None
    assert run(w.query, w.key, statistics, work(regard.window(5)).block_mask) is None
    monkeypatch.setattr(survey, "is_current_device", lambda _: False)
    assert run(w.query, w.key, statistics, w.block_mask) is None
    assert survey.survey_shortcut(w, 8, 5) is None
    odd = work(regard.causal(), n=301)  # 2 · 4 · 301 statistics begin at multiples of 16 bytes, 2 · 1 · 301 do not
    odd = KernelArgs(odd.query[:, :1], odd.key[:, :1], odd.value[:, :1], odd.block_mask, 0.125)
    survey.survey(odd, *rows_of(odd), 7, 5)
    assert survey.survey_shortcut(odd, 7, 5) is None


def test_masks_of_one_kind_share_launches_and_pass_lists_of_their_own() -> None:
    for lengths in ([5, 200], [300, 7]):
        w = work(regard.padding(torch.tensor(lengths)))
        STARTS.clear()
        survey.survey(w, *rows_of(w), 7, 5)
        tile = statistics_launch.tile_for(w)
        by_bands, by_rows = (dict(zip(names, STARTS[at].arguments, strict=True)) for at, names in (
            (0, statistics_launch.pooled_kernel.arg_names), (2, portable.statistics_kernels.row_survey.arg_names)
        ))  # fmt: skip
        assert by_bands["lists"] is w.block_mask.by_keys(128, tile.BN)
        assert by_rows["args"].blocks is w.block_lists(w.config("dq"))
    assert [start.how for start in STARTS] == ["again"] * 3


def test_statistics_at_odd_addresses_are_copied() -> None:
    whole = torch.zeros(25)
    for x in (whole[1:], whole[:24].view(2, 3, 4).transpose(0, 1), whole[:24]):
        found = _of_rows(x, (2, 3, 4))
        assert found.shape == (2, 3, 4)
        assert found.is_contiguous()
        assert not found.data_ptr() & 15
    assert _of_rows(found, (2, 3, 4)) is found


CHANGES: dict[str, Any] = {"n": 301, "softcap": 9.0, "scales": torch.ones(4)}


@pytest.mark.parametrize("change", [*CHANGES, "height", "mask"])
def test_another_survey_is_a_first_one(change: str) -> None:
    w = work(None)
    survey.survey(w, *rows_of(w), 7, 5)
    STARTS.clear()
    other = work(
        regard.causal() if change == "mask" else None, **{key: CHANGES[key] for key in CHANGES if key == change}
    )
    survey.survey(other, *rows_of(other), 8 if change == "height" else 7, 5)
    hows = {start.kernel: start.how for start in STARTS}
    assert hows["by bands"] == "first"
    assert hows["by rows"] == ("again" if change == "height" else "first")


def test_a_survey_keeps_no_tensor() -> None:
    w = work(regard.padding(torch.tensor([5, 200])))
    rows = rows_of(w)
    found = survey.survey(w, *rows, MAP_SIDE, MAP_SIDE)
    kept = [
        weakref.ref(x) for x in (w.query, w.key, w.value, w.block_mask, *rows, found.map, found.totals, found.peaks)
    ]
    del w, rows, found
    STARTS.clear()
    gc.collect()
    assert len(launch_cache._LAUNCHES) == 4  # with the route
    assert not any(x() is not None for x in kept)
