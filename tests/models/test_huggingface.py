"""`attn_implementation="regard"` against `"eager"`: the same numbers and the same tokens, model by model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import (
    DECODERS,
    ENCODERS,
    LISTENERS,
    NAMED,
    SEQ2SEQ,
    VIEWERS,
    Architecture,
    Call,
    build,
    drawn,
    regarded,
)
from regard.masks import Mask
from regard.models.huggingface.lazy_mask import LazyMask

WORDS = drawn(2, 11)
WHOLE = torch.ones(2, 11, dtype=torch.int64)
LEFT, RIGHT = WHOLE.clone(), WHOLE.clone()
LEFT[0, :4] = 0
RIGHT[0, -4:] = 0
GREEDY = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}


def agree(found: Tensor, expected: Tensor, where: Tensor | None = None) -> None:
    """Compare at real positions only: the logits of padding do not matter."""
    if where is not None:
        found, expected = found[where.bool()], expected[where.bool()]
    assert expected.std() > 0.05, "attention would not matter"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def stays_a_mask(call: Call) -> bool:
    """Whether there was no mask, or one that no model turned into a tensor."""
    return call.mask is None or (isinstance(call.mask, LazyMask) and "tensor" not in vars(call.mask))


def same_as_eager(architecture: Architecture, *runs: Callable[[Any], tuple[Tensor, Tensor | None]]) -> None:
    """Run a model both ways, count our calls in the first run, and check all masks."""
    model = build(architecture)
    with torch.no_grad():
        expected = [run(model) for run in runs]
        with regarded(model) as calls:
            for at, (run, (numbers, where)) in enumerate(zip(runs, expected, strict=True)):
                found, _ = run(model)
                if at == 0:
                    assert len(calls) == architecture.calls
                if numbers.is_floating_point():
                    agree(found, numbers, where)
                else:
                    assert torch.equal(found, numbers)
    assert all(map(stays_a_mask, calls)) == (not architecture.tensors)
    assert all(isinstance(call.mask.mask, Mask) for call in calls if isinstance(call.mask, LazyMask))


@pytest.mark.parametrize("architecture", DECODERS, ids=str)
def test_a_decoder_computes_and_generates_what_it_does_eagerly(architecture: Architecture) -> None:
    def read(keep: Tensor) -> Callable[[Any], tuple[Tensor, Tensor]]:
        return lambda model: (model(WORDS, attention_mask=keep).logits, keep)

    def write(model: Any) -> tuple[Tensor, None]:
        return model.generate(WORDS, attention_mask=LEFT, **GREEDY)[:, WORDS.shape[1] :], None

    same_as_eager(architecture, read(WHOLE), read(LEFT), read(RIGHT), write)


@pytest.mark.parametrize("architecture", ENCODERS, ids=str)
def test_an_encoder_computes_what_it_does_eagerly(architecture: Architecture) -> None:
    def read(keep: Tensor) -> Callable[[Any], tuple[Tensor, Tensor]]:
        return lambda model: (model(input_ids=WORDS, attention_mask=keep).logits, keep)

    same_as_eager(architecture, read(WHOLE), read(LEFT), read(RIGHT))


@pytest.mark.parametrize("architecture", SEQ2SEQ, ids=str)
def test_an_encoder_with_a_decoder_computes_and_generates_what_it_does_eagerly(architecture: Architecture) -> None:
    target, real = drawn(2, 7, seed=2), RIGHT[:, -7:]

    def read(keep: Tensor) -> Callable[[Any], tuple[Tensor, Tensor]]:
        given = {"decoder_input_ids": target, "decoder_attention_mask": real}
        return lambda model: (model(input_ids=WORDS, attention_mask=keep, **given).logits, real)

    def write(model: Any) -> tuple[Tensor, None]:
        return model.generate(WORDS, attention_mask=LEFT, num_beams=1, **GREEDY), None

    same_as_eager(architecture, read(WHOLE), read(LEFT), read(RIGHT), write)


@pytest.mark.parametrize("architecture", LISTENERS, ids=str)
def test_a_speech_model_computes_and_generates_what_it_does_eagerly(architecture: Architecture) -> None:
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    sound = sound if architecture.model.startswith("Whisper") else sound.mT.contiguous()

    def read(model: Any) -> tuple[Tensor, None]:
        return model(input_features=sound, decoder_input_ids=drawn(2, 7, seed=2)).logits, None

    def write(model: Any) -> tuple[Tensor, None]:
        return model.generate(sound, num_beams=1, **GREEDY), None

    same_as_eager(architecture, read, write)


@pytest.mark.parametrize("architecture", VIEWERS, ids=str)
def test_a_vision_model_computes_what_it_does_eagerly(architecture: Architecture) -> None:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    same_as_eager(architecture, lambda model: (model(pixels)[0], None))


def test_more_than_fifty_architectures_are_tested_and_four_of_them_build_tensors() -> None:
    assert len(NAMED) == len(DECODERS) + len(ENCODERS) + len(SEQ2SEQ) + len(LISTENERS) + len(VIEWERS) > 50
    assert sum(bool(each.tensors) for each in NAMED.values()) == 4
