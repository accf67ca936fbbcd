"""The words of the example: similar words have similar vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.report.example import SOURCE, TARGET, hashed, known


def test_every_word_of_both_sentences_is_known() -> None:
    assert known(SOURCE).shape == (len(SOURCE), known(TARGET).shape[1])
    assert known(TARGET).isfinite().all()


@given(word=st.text(st.characters(), min_size=1, max_size=10))
def test_any_word_has_the_same_finite_embedding_each_time(word: str) -> None:
    first, second = hashed([word]), hashed([word, "x"])[:1]
    assert first.equal(second)
    assert first.isfinite().all()


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_a_word_s_logit_with_itself_is_the_sharpness(sharpness: float) -> None:
    word = hashed(["attention"], dim=64, sharpness=sharpness)
    torch.testing.assert_close((word @ word.T).squeeze() / 8.0, torch.tensor(sharpness))


def test_similar_words_are_nearer_than_others_and_case_makes_no_difference() -> None:
    rose, roses, other, capital = hashed(["rose", "roses", "milk", "ROSE"])
    assert rose @ roses > 3 * (rose @ other).abs()
    assert rose.equal(capital)
