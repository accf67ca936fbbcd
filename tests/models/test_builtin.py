"""The built-in model: its tokenizer loses nothing, its file is small and harmless, its heads do what they should."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from regard.errors import ArgumentError, DtypeError, FileError, ShapeError
from regard.models import builtin
from regard.models.builtin import Model, Tokenizer
from regard.models.builtin.tokenizer import words
from regard.models.interceptor import CallInterceptor
from regard.observation import Observation

PACKAGE = Path(builtin.__file__).parent
LONG = 4096
# From "Alice's Adventures in Wonderland", which is in the public domain and not in the text of the training.
ALICE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and "
    "what is the use of a book,” thought Alice “without pictures or conversations?” So she was considering in her own "
    "mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies."
)


@pytest.fixture(scope="module")
def trained() -> Model:
    return builtin.load()


@pytest.fixture(scope="module")
def untrained() -> Model:
    return builtin.load(trained=False)


class Far(NamedTuple):
    """What the trained model does with 4,096 tokens: some at their beginning, and again at their end."""

    segment: Tensor
    layers: dict[str, Observation]
    logits: Tensor

    def weight(self, back: int) -> float:
        """The largest mean weight that a head puts on the key `back` before each of the last tokens."""
        rows = torch.arange(LONG - len(self.segment), LONG - 1)
        return max(
            seen.weights(rows, rows - back).diagonal(0, -2, -1).mean(-1).max().item() for seen in self.layers.values()
        )


@pytest.fixture(scope="module")
def far(trained: Model) -> Far:
    generator = torch.Generator().manual_seed(4)
    segment = torch.randperm(512, generator=generator)[:64]
    others = torch.randint(512, 1024, (LONG - 128,), generator=generator)
    layers: dict[str, Observation] = {}
    with torch.no_grad(), CallInterceptor(trained, layers.__setitem__):
        logits = trained(torch.cat([segment, others, segment])[None])
    return Far(segment, layers, logits[0])


def tokens(text: str) -> Tensor:
    return torch.tensor([builtin.tokenizer().encode(text)])


def loss(model: Model, ids: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).item()


def previous(model: Model) -> float:
    """The largest mean weight that a head puts on the previous token."""
    return model.weights(tokens(ALICE)).diagonal(-1, -2, -1).mean((1, -1)).max().item()


def induction(model: Model, period: int) -> float:
    """The largest mean weight that a head puts on the token after the last occurrence of the current one."""
    segment = torch.randint(1024, (4, period), generator=torch.Generator().manual_seed(1))
    behind = model.weights(segment.repeat(1, 2)).diagonal(1 - period, -2, -1)[..., 1:]
    return behind.mean((1, -1)).max().item()


@given(st.text())
def test_decoding_gives_back_any_text(text: str) -> None:
    tokenizer = builtin.tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.pieces(ids)) == len(ids)
    assert b"".join(words(text)) == text.encode()


@given(st.text(st.characters(max_codepoint=127)))
def test_the_pieces_of_plain_text_join_to_it(text: str) -> None:
    tokenizer = builtin.tokenizer()
    assert "".join(tokenizer.pieces(tokenizer.encode(text))) == text


@given(st.lists(st.integers(0, 1023)))
def test_any_tokens_are_text(ids: list[int]) -> None:
    tokenizer = builtin.tokenizer()
    assert tokenizer.decode(ids).encode()[:0] == b""
    assert all(piece.encode() for piece in tokenizer.pieces(ids))


@pytest.mark.parametrize(("text", "valid"), [("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ud83d\ude00", "😀")])
def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_is_its_character(text: str, valid: str) -> None:
    tokenizer = builtin.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == valid


@pytest.mark.parametrize("char", ["a", " ", "\n", "-", "7", "é", "界"])
def test_a_long_run_of_one_character_is_encoded_in_time_linear_in_it(char: str) -> None:
    tokenizer = builtin.tokenizer()
    assert tokenizer.decode(tokenizer.encode(char * 100_000)) == char * 100_000


def test_the_same_text_has_the_same_tokens_in_a_tokenizer_that_is_read_again() -> None:
    again = Tokenizer.from_file(PACKAGE / "vocabulary.json")
    assert again.encode(ALICE) == builtin.tokenizer().encode(ALICE) == again.encode(ALICE)


def test_words_of_english_take_few_tokens(trained: Model) -> None:
    assert len(builtin.tokenizer()) == trained.embedding.num_embeddings == 1024
    assert len(builtin.tokenizer().encode(ALICE)) < len(ALICE) / 2
    assert builtin.tokenizer().pieces(builtin.tokenizer().encode(" of the people")) == [" of", " the", " people"]


def test_the_tokenizer_refuses_what_is_not_text_or_a_token(tmp_path: Path) -> None:
    with pytest.raises(DtypeError, match=r"encode: text must be a string\. Got bytes"):
        builtin.tokenizer().encode(b"bytes")  # type: ignore[arg-type]
    for member in (builtin.tokenizer().decode, builtin.tokenizer().pieces):
        with pytest.raises(ArgumentError, match=r"from 0 to 1023\. Got -1"):
            member([5, -1])
    with pytest.raises(ArgumentError, match="below 256"):
        Tokenizer([(256, 0)])
    with pytest.raises(FileError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(FileError, match="not a vocabulary"):
        Tokenizer.from_file(tmp_path / "other.json")


def test_the_weights_take_at_most_4_megabytes_and_name_the_licence_of_their_text() -> None:
    file = PACKAGE / "weights.safetensors"
    assert file.stat().st_size <= 4_000_000
    with safe_open(file, "pt") as stored:
        assert "public-domain text" in stored.metadata()["licence"]
        assert "CC0-1.0" in stored.metadata()["licence"]
    assert "CC0-1.0" in (PACKAGE / "README.md").read_text(encoding="utf-8")


def test_loading_unpickles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refused)
    builtin.load()
    kinds = {file.suffix for file in PACKAGE.iterdir() if file.is_file()}
    assert kinds == {".py", ".json", ".md", ".safetensors"}


def test_missing_or_damaged_weights_are_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "weights.safetensors"
    monkeypatch.setattr(builtin, "_WEIGHTS", broken)
    with pytest.raises(FileError, match=r"^load: the weights .* missing or damaged; reinstall regard"):
        builtin.load()
    broken.write_bytes((PACKAGE / "weights.safetensors").read_bytes()[:-1000])
    with pytest.raises(FileError, match=r"^load: "):
        builtin.load()


def test_the_untrained_model_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    first = builtin.load(trained=False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    second = builtin.load(trained=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_loaded_model_is_in_float32_and_ready_to_use(trained: Model) -> None:
    assert {weight.dtype for weight in trained.parameters()} == {torch.float32}
    assert not trained.training


def test_training_lowers_the_loss_on_a_text_that_was_not_trained_on(trained: Model, untrained: Model) -> None:
    ids = tokens(ALICE)
    assert loss(trained, ids) < loss(untrained, ids) - 1.5


def test_training_forms_a_head_that_attends_to_the_previous_token(trained: Model, untrained: Model) -> None:
    assert previous(trained) > 0.4
    assert previous(untrained) < 0.1


@pytest.mark.parametrize("period", [20, 50, 100])
def test_training_forms_an_induction_head(trained: Model, untrained: Model, period: int) -> None:
    assert induction(trained, period) > 0.3
    assert induction(untrained, period) < 0.1


def test_repetition_is_predicted(trained: Model, untrained: Model) -> None:
    segment = torch.randint(1024, (1, 40), generator=torch.Generator().manual_seed(2))
    foretold = [(model(segment.repeat(1, 2))[0, 40:-1].argmax(-1) == segment[0, 1:]) for model in (trained, untrained)]
    assert foretold[0].float().mean() > 0.5
    assert foretold[1].float().mean() < 0.1


def test_the_head_for_the_previous_token_holds_at_4096_tokens(far: Far) -> None:
    assert far.weight(back=1) > 0.4


def test_an_induction_head_finds_what_occurred_4032_tokens_before(far: Far) -> None:
    assert far.weight(back=LONG - 64 - 1) > 0.3


def test_repetition_is_predicted_over_4032_tokens(far: Far) -> None:
    assert far.logits.shape == (LONG, 1024)
    assert bool(far.logits.isfinite().all())
    assert (far.logits[-64:-1].argmax(-1) == far.segment[1:]).float().mean() > 0.5


def test_the_file_says_on_how_long_texts_the_model_was_trained_and_how_it_does_beyond(trained: Model) -> None:
    with safe_open(PACKAGE / "weights.safetensors", "pt") as stored:
        metadata = stored.metadata()
    assert trained.trained_length == int(metadata["trained_length"]) >= LONG
    check = json.loads(metadata["check"])
    assert check["until"][-1] >= 2 * LONG
    within = [at for at, end in enumerate(check["until"]) if end <= LONG]
    assert min(check["previous"][at] for at in within) > 0.4
    assert min(check["induction"][at] for at in within) > 0.3
    assert check["loss"][within[-1]] < check["loss"][0]


def test_a_model_before_training_names_no_trained_length(untrained: Model) -> None:
    assert untrained.trained_length is None


def test_layers_with_a_window_see_it_and_the_others_see_everything() -> None:
    weights = Model(vocabulary=50, dim=32, layers=2, heads=4, window=3).weights(torch.arange(10)[None])
    assert (weights[0] > 0).sum(-1).unique().tolist() == [1, 2, 3]
    assert torch.equal(weights[1, 0, 0] > 0, torch.ones(10, 10).tril() > 0)


def test_generating_beyond_the_window_gives_what_the_whole_sequence_gives() -> None:
    torch.manual_seed(0)
    model = Model(vocabulary=50, dim=32, layers=4, heads=4, window=4).eval()
    ids = torch.randint(50, (2, 11))
    found = model.generate(ids, 9)
    whole = model(found)[:, 10:-1].argmax(-1)
    assert torch.equal(found[:, 11:], whole)


def test_a_later_token_changes_no_bit_of_earlier_logits(trained: Model) -> None:
    ids = tokens(ALICE)[:, :96]
    changed = ids.clone()
    changed[0, 64:] = torch.arange(32)
    with torch.no_grad():
        before, after = trained(ids), trained(changed)
    assert torch.equal(before[:, :64], after[:, :64])
    assert not torch.equal(before[:, 64:], after[:, 64:])


def test_the_weights_of_every_layer_are_causal_and_sum_to_1(trained: Model) -> None:
    weights = trained.weights(tokens(ALICE)[:, :50].expand(2, -1))
    assert weights.shape == (4, 2, 8, 50, 50)
    assert torch.allclose(weights.sum(-1), torch.ones(4, 2, 8, 50), atol=1e-5)
    assert not weights.triu(1).any()


def test_generating_with_a_cache_gives_what_the_whole_sequence_gives(trained: Model) -> None:
    ids = tokens("The whale was white. The wh")
    found = trained.generate(ids, 12)
    whole = ids
    for _ in range(12):
        whole = torch.cat([whole, trained(whole)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, whole)
    assert torch.equal(trained.generate(ids, 0), ids)


def test_sampled_tokens_follow_the_seed(trained: Model) -> None:
    ids = tokens("The").expand(2, -1)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(trained.generate(ids, 20, temperature=1.0))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_the_model_refuses_what_are_not_tokens(untrained: Model) -> None:
    with pytest.raises(DtypeError, match=r"integers\. Got torch\.float32"):
        untrained(torch.zeros(1, 4))
    with pytest.raises(DtypeError, match="Got list"):
        untrained([[1, 2]])
    with pytest.raises(DtypeError, match="Got list"):
        untrained.generate([[1, 2]], 3)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"ids must be \(batch, length\). Got \(4,\)"):
        untrained(torch.arange(4))
    for wrong in (1024, -1):
        with pytest.raises(ArgumentError, match="from 0 to 1023"):
            untrained(torch.tensor([[3, wrong]]))
    with pytest.raises(ArgumentError, match="count"):
        untrained.generate(torch.tensor([[3]]), -1)
    with pytest.raises(ShapeError, match="one token to continue"):
        untrained.generate(torch.empty(1, 0, dtype=torch.int64), 3)
