"""Where tokens repeat, by full matrices: what `Observation.survey_with_repeats` must give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

__all__ = ["MASKS", "check_repeats"]

MASKS = {
    "all": None,
    "causal": regard.causal(),
    "window": regard.window(20),
    "padding": regard.padding(torch.tensor([40, 31])),
    "strided": regard.strided(3),
}


def check_repeats(name: str, backend: str, length: int = 70, heads: int = 4, items: int = 2) -> None:
    """Compare a survey among some rows with the sums over the whole matrix, for grouped heads."""
    torch.manual_seed(1)
    q, k = torch.randn(items, heads, length, 16), torch.randn(items, heads // 2, length, 16)
    tokens, counted = torch.randint(0, 9, (items, length)), torch.rand(items, length) > 0.3
    seen = regard.observe(q, k, k, mask=MASKS[name], backend=backend)
    survey, repeats = seen.among(counted).survey_with_repeats(tokens)
    whole = regard.observe(q.double(), k.double(), k.double(), mask=MASKS[name], backend="reference").weights()
    P = whole * counted[:, None, :, None]
    place = torch.arange(length)
    earlier, preceding = place < place[:, None], F.pad(tokens, (1, -1), value=-1)
    close(repeats.duplicate, on(P, tokens, tokens, earlier))
    close(repeats.induction, on(P, tokens, preceding, earlier))
    close(survey.received, P.sum(-2))
    close(survey.largest, P.amax(-1))
    close(survey.distance, (P * (place - place[:, None]).abs()).sum(-1))


def on(P: Tensor, own: Tensor, label: Tensor, earlier: Tensor) -> Tensor:
    return (P * ((own[:, :, None] == label[:, None, :]) & earlier)[:, None]).sum(-1)


def close(found: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(found.double(), true, atol=2e-6, rtol=2e-5)
