"""The kernels for rows with lists of keys, without a GPU: they compile for sm_90 and find room for their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hopper_compiled
import regard
from hopper_compiled import SHARED, compiles, usage
from regard.core.rows import Rows
from regard.core.spec import Spec
from regard.kernels.arguments import DropoutArgs
from regard.kernels.chosen_engine import kernel_lists
from regard.kernels.portable import chosen_launch
from regard.kernels.portable.chosen_launch import ChosenArgs
from regard.masks import Mask

hopper = hopper_compiled.hopper
N, K = 64, 32
LISTS = torch.arange(K).expand(N, K)
HALF, FLOAT = torch.bfloat16, torch.float32
CASES: dict[str, tuple[Mask, int, int, int, torch.dtype]] = {  # the mask, query heads, key heads, dim
    "16 heads share keys": (regard.chosen(LISTS) & regard.causal(), 16, 1, 128, HALF),
    "blocks": (regard.chosen(LISTS[:1, :1], size=32, rows=N), 2, 1, 64, HALF),
    "dim 256": (regard.chosen(LISTS), 4, 1, 256, HALF),
    "float32": (regard.chosen(LISTS), 16, 1, 128, FLOAT),
}
EVERY_DAY = ("16 heads share keys", "forward")  # what each run compiles; -m slow compiles the others too


class Compiled:
    """A kernel that is compiled in place of being started."""

    def __init__(self, kernel: Any, found: dict[str, Any]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> None:
            if self.kernel.__name__ not in self.found:
                made = self.kernel.warmup(*args, grid=grid, **options)
                self.found[self.kernel.__name__] = made.result() if hasattr(made, "result") else made

        return start


@compiles
@pytest.mark.parametrize(
    ("name", "direction"),
    [
        pytest.param(name, direction, marks=[] if (name, direction) == EVERY_DAY else [pytest.mark.slow])
        for name in CASES
        for direction in ("forward", "backward", "statistics")
    ],
)
def test_they_compile_and_fit(name: str, direction: str, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, heads, key_heads, dim, dtype = CASES[name]
    found: dict[str, Any] = {}
    for kernel in ("chosen_forward", "chosen_dq", "chosen_dkdv", "sum_entries", "chosen_received", "chosen_top"):
        monkeypatch.setattr(chosen_launch, kernel, Compiled(getattr(chosen_launch, kernel), found))
    query, key, value = (torch.zeros(1, h, N, dim, dtype=dtype) for h in (heads, key_heads, key_heads))
    args = ChosenArgs(query, key, value, kernel_lists(Spec(N, N, mask)), 0.1, None, DropoutArgs())
    if direction == "forward":
        chosen_launch.forward(args, entropy=True)
        assert set(found) == {"chosen_forward"}
    elif direction == "statistics":
        chosen_launch.received(args, *torch.zeros(2, 1, heads, N).unbind())
        chosen_launch.top(args, k=128)
        assert set(found) == {"chosen_received", "sum_entries", "chosen_top"}
    else:
        rows = Rows(*(torch.zeros(1, heads, N, *each) for each in ((dim,), (), (), (), ())))
        rows = rows._replace(output=rows.output.to(dtype))
        chosen_launch.backward(args, rows, rows.output, None, rows.entropy, wants_keys=True)
        assert set(found) == {"chosen_dq", "sum_entries"} | ({"chosen_dkdv"} if args.tiles > 1 else set())
    for kernel in found.values():
        used = usage(kernel)
        assert used["LOCAL"] == 0
        assert used["STACK"] <= 16
        assert kernel.metadata.shared <= SHARED // 2, "two programs share a multiprocessor"


SPREAD = torch.arange(64).expand(N, 64)
FOR_HOPPER: dict[
    str, tuple[Mask, int, int]
] = {  # the mask, query heads, bytes per thread that the backward spills at most
    "keys": (regard.chosen(SPREAD), 64, 128),
    "keys under a mask": (regard.chosen(SPREAD[:4], rows=16) & regard.causal(), 16, 192),
    "blocks": (regard.chosen(SPREAD[:4, :1], size=64, rows=16), 64, 128),
    "blocks under a mask": (regard.chosen(SPREAD[:, :1], size=128) & regard.causal(), 64, 192),
}


@compiles
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "keys" else [pytest.mark.slow]) for name in FOR_HOPPER]
)
def test_those_for_hopper_compile_and_two_programs_fit(
    name: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.kernels.hopper import chosen_launch as chip

    mask, heads, spilled = FOR_HOPPER[name]
    found: dict[str, Any] = {}
    for kernel in ("chosen_forward", "chosen_backward"):
        monkeypatch.setattr(chip, kernel, Compiled(getattr(chip, kernel), found))
    query, key = (torch.zeros(1, h, N, 128, dtype=HALF) for h in (heads, 1))
    args = ChosenArgs(query, key, key, kernel_lists(Spec(N, N, mask)), 0.1, None, DropoutArgs())
    assert [reason for reason in chip.refuses(args) if "not on a GPU" not in reason] == []
    rows = chip.forward(args, entropy=False)
    monkeypatch.setattr(chosen_launch, "sum_entries", Compiled(chosen_launch.sum_entries, found))
    chosen_launch.backward(args, rows, rows.output, None, None, wants_keys=True, by_lists=chip.backward)
    assert set(found) == {"chosen_forward", "chosen_backward", "sum_entries"}
    for kind, kernel in found.items():
        used = usage(kernel)
        assert used["LOCAL"] == 0
        assert used["STACK"] <= (spilled if kind == "chosen_backward" else 0)
        assert kernel.metadata.shared + 1024 <= (SHARED + 1024) // 2, "two programs share a multiprocessor"
    assert "ld.global.v4" in found["sum_entries"].asm["ptx"], "a thread loads 16 bytes at a time"
