"""Whole models on a GPU: watched by the fused kernels, with the numbers of the full weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.models import builtin
from regard.models.head_statistics import STATISTICS
from regard.report.atlas import Atlas, AtlasLayer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def ids(n: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 1024, (2, n))


def test_the_built_in_model_has_the_same_numbers_as_on_the_cpu() -> None:
    looks = []
    for device in ("cpu", "cuda"):
        model = builtin.load().to(device)
        with torch.no_grad(), regard.watch(model) as seen:
            model(ids(200).to(device))
        looks.append(seen)
    assert looks[0].layers == looks[1].layers
    for cpu, gpu in zip(looks[0].heads, looks[1].heads, strict=True):
        for name in STATISTICS:
            assert getattr(gpu, name) == pytest.approx(getattr(cpu, name), rel=2e-3, abs=2e-3), (
                cpu.layer,
                cpu.head,
                name,
            )
    for layer in looks[0].layers:
        torch.testing.assert_close(looks[1].map(layer), looks[0].map(layer), atol=1e-4, rtol=1e-3)
    assert [f.rule for f in looks[0].findings()] == [f.rule for f in looks[1].findings()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder_keeps_its_output_and_its_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda", dtype)
    x = torch.randn(2, 150, 64, device="cuda", dtype=dtype)
    found = []
    for watching in (False, True):
        model.zero_grad()
        if watching:
            with regard.watch(model) as seen:
                y = model(x)
        else:
            y = model(x)
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    near = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=near, rtol=near)
    assert seen.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    assert repr(seen[seen.layers[0]]).endswith("by triton)")


def test_a_monitor_logs_and_an_atlas_draws() -> None:
    model = builtin.load().to("cuda").train()
    logged: list[tuple[str, float, int]] = []
    with regard.Monitor(model, every=2, log=lambda *one: logged.append(one)):
        for _ in range(3):
            model(ids(64).cuda()).logsumexp(-1).mean().backward()
    assert {step for *_, step in logged} == {0, 2}
    assert len(logged) == 2 * 2 * 32
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids(700).cuda())
    layer = seen.layers[2]
    mask_bits = [str(i) for i in range(700)]
    atlas = Atlas("on a GPU", [AtlasLayer(layer, seen[layer], mask_bits, mask_bits)])
    tile = torch.frombuffer(bytearray(atlas.tile(0, 2, 0, 1, 1)), dtype=torch.float32).view(256, 256)
    exact = seen[layer].weights(slice(256, 512), slice(256, 512))[0, 2].cpu()
    torch.testing.assert_close(tile, exact, atol=1e-4, rtol=1e-3)
    atlas.close()
