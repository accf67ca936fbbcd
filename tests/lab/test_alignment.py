"""The alignment that attention learns, and the five words in which a longer key wins."""

from __future__ import annotations

import pytest
import torch

import regard.lab
from regard.errors import ArgumentError
from regard.lab import Experiment
from regard.lab.alignment import Alignment

PRINTED = (0.089, 0.542, 0.124, 0.098, 0.147)
FRENCH = ("le", "moraliste", "libéral", "veut", "souvent", "un", "chat", "noir")
ENGLISH = ("the", "moralist", "liberal", "wants", "often", "a", "cat", "black")


@pytest.fixture(scope="module")
def found() -> Experiment:
    return Alignment().run()


def test_attention_learns_to_align_trained_words_and_unseen_ones_of_trained_parts(found: Experiment) -> None:
    assert found.verdict
    trained, unseen, foreign = found.rows[:3]
    assert trained["aligned with the translation"] > 0.99
    assert unseen["aligned with the translation"] > 0.95
    assert foreign["aligned with the translation"] == pytest.approx(1 / 8, abs=0.05)
    assert foreign["effective words"] > 7.5


def test_untrained_vectors_align_nothing() -> None:
    untrained = Alignment(steps=0).run()
    assert not untrained.verdict
    assert all(row["aligned with the translation"] < 0.2 for row in untrained.rows[:3])


def test_alignment_by_place_is_refuted() -> None:
    assert not Alignment(steps=40, rule="place").run().verdict


def test_sentences_of_one_order_teach_places_which_unknown_words_then_follow() -> None:
    same = Alignment(order="same").run()
    assert not same.verdict
    assert same.rows[2]["aligned with the same place"] > 0.9


def test_every_word_of_the_sentence_finds_its_translation_and_one_of_them_is_unseen(found: Experiment) -> None:
    wanted = dict(zip(FRENCH, ENGLISH, strict=True))
    for row in found.rows[3:11]:
        weights = {key: row[key] for key in list(row)[1:-1]}
        assert sum(weights.values()) == pytest.approx(1.0, abs=1e-5)
        assert max(weights, key=weights.__getitem__) == wanted[row["query"]]


def test_the_five_words_are_those_of_the_texts_code_and_not_of_the_output_they_print(found: Experiment) -> None:
    torch.manual_seed(42)
    key, query = torch.randn(1, 5, 8), torch.randn(1, 1, 8)
    key[0, 1] = query[0, 0] + 0.1 * torch.randn(8)
    weights = torch.softmax(query @ key.mT / 8**0.5, -1).flatten().tolist()
    words = found.rows[11:]
    assert [row["weight"] for row in words] == pytest.approx(weights, abs=1e-6)
    assert [row["‖k‖"] for row in words] == pytest.approx(key.norm(dim=-1).flatten().tolist(), rel=1e-5)
    assert (round(words[1]["‖k‖"], 2), round(words[4]["‖k‖"], 2)) == (1.90, 3.62)
    assert words[1]["cosine, τ = 0.07"] == pytest.approx(0.990, abs=1e-3)


def test_the_weights_that_texts_print_are_refuted(found: Experiment) -> None:
    assert not Alignment(steps=40, claimed=PRINTED).run().verdict
    study, rows = found.study, found.rows
    assert study.holds(rows)
    mat = rows[-1]
    assert not study.holds([*rows[:-1], mat | {"keys of one length": 1.0}])
    assert not study.holds([*rows[:-1], mat | {"weight": 0.0, "claimed": 0.0}])


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"rule": "luck"}, r"'meaning', 'place'\. Got 'luck'"),
        ({"sentence": 11}, "at most 10"),
        ({"claimed": (0.5, 0.5)}, "must be 5 weights"),
    ],
)
def test_a_wrong_choice_is_named(choices: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        regard.lab.run("alignment", **choices)


def test_the_picture_has_a_number_beside_every_bar(found: Experiment) -> None:
    matrix, five = found.figure().axes
    assert [label.get_text() for label in matrix.get_yticklabels()] == [row["query"] for row in found.rows[3:11]]
    assert len(matrix.texts) == 64
    assert {"0.292", "0.542", "0.422", "0.147"} <= {text.get_text() for text in five.texts}
    assert len(five.texts) == len(five.patches) == 15
