"""Tiles follow the chip, and one that a chip has no room for is replaced by a smaller one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import regard  # noqa: E402
from regard.backends import KNOWN  # noqa: E402
from regard.core.validation import pose  # noqa: E402
from regard.kernels import launch_cache  # noqa: E402
from regard.kernels.arguments import KernelArgs  # noqa: E402
from regard.kernels.block_mask import BlockMask  # noqa: E402
from regard.kernels.portable import configs, launch  # noqa: E402
from regard.kernels.portable.configs import CHIPS, Config  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_refused", {})
    monkeypatch.setattr(launch_cache, "_LAUNCHES", {})


def work(dim: int = 128) -> KernelArgs:
    x = torch.zeros(1, 1, 200, dim, dtype=torch.bfloat16)
    return KernelArgs(x, x, x, BlockMask(200, 200))


def refusing(room: int, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Let a chip refuse tiles with more than `room` pairs; the tiles that were tried."""
    tried: list[Config] = []

    def start(
        key: Any, kernel: Any, programs: int, arguments: Any, options: Any, changing: Any, about: Any = None
    ) -> None:
        tried.append(about)
        if about.BM * about.BN * about.stages > room:
            raise triton.OutOfResources(about.BM * about.BN, room, "shared memory")

    monkeypatch.setattr(launch_cache, "start", start)
    return tried


def test_a_refused_tile_is_replaced_by_smaller_ones_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = refusing(32 * 32, monkeypatch)
    listed = work().config("forward")
    launch.forward(work(), entropy=False)
    areas = [c.BM * c.BN * c.stages for c in tried]
    assert tried[0] == listed
    assert areas == sorted(areas, reverse=True)
    assert len(set(areas)) == len(areas)
    assert areas[-1] == 32 * 32
    launch.forward(work(), entropy=False)
    assert tried[len(areas) :] == [tried[len(areas) - 1]]  # at once, from now on
    assert work(64).config("forward") == configs.config("plain forward", CHIPS["8.6"], 2, 64)  # other tiles stay


def test_why_says_which_tile_had_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(32 * 32, monkeypatch)
    monkeypatch.setattr(KNOWN["triton"], "refuses", lambda p: [], raising=False)
    q = torch.zeros(1, 1, 200, 128)
    assert "room" not in KNOWN["triton"].detail(pose(q, q, q))
    launch.forward(work(), entropy=False)
    said = str(regard.why(q, q, q, backend="triton"))
    assert "the plain forward at dim 128 takes tiles of 32 × 32 in 1 stages" in said
    assert "the chip has no room for 64 × 64 in 2" in said


def test_a_chip_without_room_for_the_smallest_tile_raises_what_triton_says(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = refusing(16 * 16 - 1, monkeypatch)
    with pytest.raises(triton.OutOfResources, match="shared memory"):
        launch.forward(work(), entropy=False)
    assert (tried[-1].BM, tried[-1].BN, tried[-1].stages) == (16, 16, 1)


@pytest.mark.parametrize(
    ("capability", "shared", "tma", "like"),
    [((9, 0), 1, True, "9.0"), ((12, 0), 1, False, "12.0"), ((12, 1), 99, False, "8.9"), ((10, 3), 227, True, "10.0")],
)
def test_a_chip_counts_by_its_memory_and_not_by_its_generation(
    capability: tuple[int, int], shared: int, tma: bool, like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(shared_memory_per_block_optin=shared * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    chip = configs.chip_of.__wrapped__(torch.device("cuda", 0))
    assert chip.name == ".".join(map(str, capability))
    assert chip.tma == tma
    for direction in ("plain forward", "forward", "dkdv", "dq", "received", "jvp", "decode"):
        for size in (2, 4):
            assert configs.config(direction, chip, size, 128) == configs.config(direction, CHIPS[like], size, 128)
