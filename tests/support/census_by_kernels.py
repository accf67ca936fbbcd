"""A census by kernels against the same by torch's operations: a model, batches with padding, and the comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard.models import census
from regard.models.head_census import engine
from regard.models.head_census.kernel_rows import made_by_kernels
from regard.models.head_census.scales import SCALES

__all__ = ["Reader", "check_census", "padded"]


class Reader(nn.Module):
    """One layer of attention with grouped heads, a sink and a window, whose padding comes last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.heads = nn.Embedding(11, 32), nn.Linear(32, 32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.heads(self.table(input_ids)).unflatten(-1, (4, 8)).transpose(1, 2)  # [B, 4, N, 8]
        q, k, v = 3 * x[:, :2], x[:, 2:3], x[:, 3:]
        mask = regard.window(5) & regard.padding(attention_mask.sum(1))
        sink = torch.linspace(-3, 1, 2, device=x.device)
        return regard.attention(q, k, v, mask=mask, sink=sink, backend="triton")


def padded(items: int, length: int, device: str) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (items, length))
    mask = torch.ones_like(ids)
    mask[-1, length - 4 :] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def check_census(sizes: Sequence[tuple[int, int]], device: str, patch: pytest.MonkeyPatch, moved: float) -> None:
    """Compare all arrays; of the counts in a histogram a part `moved` may be in the next bin."""
    model = Reader().to(device)
    data = [padded(*size, device) for size in sizes]
    made: list[bool] = []
    patch.setattr(engine, "made_by_kernels", lambda survey: made.append(made_by_kernels(survey)) or made[-1])
    found = census(model, data, exemplars=3).state.arrays()
    assert made == [True] * len(data)
    patch.setattr(engine, "made_by_kernels", lambda survey: False)
    true = census(model, data, exemplars=3).state.arrays()
    assert found.keys() == true.keys()
    assert found["0.received"].sum() > 0 < found["0.active"].sum()
    units = np.array([scale.unit for scale in SCALES])[:, None, None]
    for name, x in found.items():
        y = true[name]
        if name.endswith("_sum"):
            np.testing.assert_allclose(x * units, y * units, atol=1e-4, rtol=1e-5, err_msg=name)
        elif name.endswith("histogram"):
            apart = np.abs((x - y).cumsum(-1)).sum(-1)  # bins, over all counts
            assert (apart <= moved * y.sum(-1)).all()
        elif name.partition(".")[2] in ("received", "active"):
            np.testing.assert_allclose(x, y, atol=2**12, rtol=1e-5, err_msg=name)
        elif x.dtype.kind == "f":
            np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5, err_msg=name)
        elif "exemplars" not in name or not moved:  # near-equal rows may change places
            np.testing.assert_array_equal(x, y, err_msg=name)
