"""An alignment of two languages that attention learns from translations alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..functional import attention, observe
from ..scores import Cosine
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Alignment"]

# Families of words: each stem takes each ending, in both languages.
_STEMS = (
    *("national", "moral", "social", "légal", "idéal", "central"),
    *("local", "vital", "libéral", "brutal", "final", "mental"),
)
_ENDINGS = {"": "", "ité": "ity", "isme": "ism", "iste": "ist", "ement": "ly", "iser": "ize"}
# Trained words without relatives, and words that are related to no trained one.
_SINGLE = {"le": "the", "un": "a", "chat": "cat", "noir": "black", "veut": "wants", "souvent": "often", "lait": "milk",
           "froid": "cold", "livre": "book", "voit": "sees", "rouge": "red", "ami": "friend"}  # fmt: skip
_FOREIGN = {"chien": "dog", "pain": "bread", "rue": "street", "oiseau": "bird", "hiver": "winter", "boire": "drink",
            "jaune": "yellow", "fleur": "flower", "cheval": "horse", "deux": "two"}  # fmt: skip
_SENTENCE = ("le", "moraliste", "libéral", "veut", "souvent", "un", "chat", "noir")
_TRANSLATED = ("the", "liberal", "moralist", "often", "wants", "a", "black", "cat")

_WORDS = ("The", "cat", "sat", "on", "mat")
_PRINTED = (0.089, 0.542, 0.124, 0.098, 0.147)  # the weights that the texts print for their own code
_TAU = 0.07


@dataclass(frozen=True)
class Alignment(Study):
    """French words learn to attend to English ones; and five words in which a longer key wins.

    No vector is made by hand. The vector of a word is the sum of learned vectors of its letters (n-grams), with one
    table per language, so equal spelling helps nothing. The loss compares the output with the translated word and never
    sees the weights.

    >>> Alignment(steps=40).run().verdict, Alignment(steps=0).run().verdict
    (True, False)
    """

    name: ClassVar[str] = "alignment"
    brief: ClassVar[str] = "Trained to translate, attention learns to align words"
    claim: ClassVar[str] = (
        "Attention that is trained to translate words learns to align sentences, by meaning and not by position, "
        "although it is never told where a translation is. It aligns unseen words too if their parts were trained, and "
        "only then. Its score q·k = ‖q‖ ‖k‖ cos θ rewards length as well as direction: in a widely copied example with "
        "five words, “mat” wins over “cat”, although “cat” points along the query, because its key is longer."
    )
    test: ClassVar[str] = (
        "In sentences of another order, the strongest key is the right one for at least 95 % of trained words and 90 % "
        "of unseen words with trained parts; other unseen words stay below 30 %, and so does the share of words whose "
        "strongest key is at their own position. In the five-word example each claimed weight is within 0.0005 of the "
        "computed one, “mat” has the largest; “cat” has the largest with keys of one length, and more than 0.98 with "
        "the cosine."
    )
    caption: ClassVar[str] = (
        "Left: a sentence after training, with the share of each French word's attention that each English word "
        "receives; “moraliste” and “moralist” were never trained. Right: the five-word example. Its code gives "
        "most weight to “mat”, and not the numbers that are printed with it; a cosine over τ = 0.07 finds “cat”."
    )
    least: ClassVar[dict[str, float]] = {"steps": 0, "sentence": 2}
    among: ClassVar[dict[str, Collection[str]]] = {"rule": ("meaning", "place"), "order": ("shuffled", "same")}

    steps: int = 100
    dim: int = 32
    sentence: int = 8  # words per sentence
    order: str = "shuffled"  # the order of the French words in training: shuffled, or the same as in English
    rule: str = "meaning"  # what a word aligns by, according to the claim: its meaning, or its place in the sentence
    claimed: tuple[float, ...] = (0.075, 0.292, 0.053, 0.157, 0.422)  # the weights of the five words

    def suit(self) -> None:
        """Sentences must not be longer than a group has words, and every one of the five words has a weight."""
        most = min(len(_FOREIGN), len(_STEMS))
        if self.sentence > most:
            self.refuse("sentence", f"at most {most}, the number of unseen words")
        if len(self.claimed) != len(_WORDS):
            self.refuse("claimed", f"{len(_WORDS)} weights")

    def measure(self, progress: Progress) -> list[Row]:
        """Train, then attend in new sentences; and compute the five-word example."""
        trained, unseen = _vocabulary()
        model = _Translator(trained | unseen | _FOREIGN, len(trained), self)
        model.train_on(self.steps, self.order, progress)
        groups = {"trained": trained, "unseen, trained parts": unseen, "unseen, other parts": _FOREIGN}
        found, first = [], 0
        for name, words in groups.items():
            found.append({"words": name, "number": len(words)} | model.accuracy(first, len(words)))
            first += len(words)
        return [*found, *model.attend(_SENTENCE, _TRANSLATED), *_five_words(self.claimed)]

    def holds(self, rows: list[Row]) -> bool:
        """The alignment follows the rule in every group, and the five words do what is claimed."""
        trained, unseen, foreign, *others = rows
        right = "aligned with the translation" if self.rule == "meaning" else "aligned with the same place"
        learned = trained[right] >= 0.95 and unseen[right] >= 0.9 and foreign[right] < 0.3
        by_place = any(row["aligned with the same place"] >= 0.3 for row in (trained, unseen, foreign))
        return learned and not by_place and _longer_key_wins(others[len(_SENTENCE) :])

    def draw(self, rows: list[Row]) -> Figure:
        """The sentence as a matrix of bars, and the five words three times."""
        figure, (matrix, five) = canvas(11.5, 4.2, columns=2)
        matrix.get_gridspec().set_width_ratios([5, 2])
        aligned, words = rows[3 : 3 + len(_SENTENCE)], rows[3 + len(_SENTENCE) :]
        _draw_matrix(matrix, aligned)
        bars = {"weight": "C0", "as printed": "0.75", f"cosine, τ = {_TAU}": "C1"}
        for shift, (column, colour) in zip((-0.27, 0.0, 0.27), bars.items(), strict=True):
            places = [place + shift for place in range(len(words))]
            label = "as computed" if column == "weight" else column
            drawn = five.barh(places, [row[column] for row in words], 0.25, color=colour, label=label)
            five.bar_label(drawn, [f"{row[column]:.3f}" for row in words], padding=2, fontsize=7.5)
        five.set_yticks(range(len(words)), [f"{row['key']}\n‖k‖ {row['‖k‖']:.2f}" for row in words])
        five.set(xlabel="weight", xlim=(0, 1.15))
        five.invert_yaxis()
        five.grid(visible=False, axis="y")
        five.legend(frameon=False, loc="center right", fontsize=8)
        return figure


class _Translator(nn.Module):
    """Attention from French to English: one table of letter vectors and one of positions per language, and values."""

    french: Tensor  # (words, n-grams) how often each n-gram is in each word
    english: Tensor

    def __init__(self, words: dict[str, str], trained: int, study: Alignment) -> None:
        super().__init__()
        self.words, self.trained, self.length = words, trained, study.sentence
        self.french, self.english = _spelling(list(words)), _spelling(list(words.values()))
        sizes = (self.french.shape[1], self.english.shape[1], study.sentence, study.sentence)
        tables = (nn.Parameter(0.3 * torch.randn(size, study.dim)) for size in sizes)
        self.query, self.key, self.query_place, self.key_place = tables
        self.value = nn.Parameter(torch.randn(trained, study.dim))

    def forward(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of French words and keys of English ones, each with its position; words are indices."""
        places = torch.arange(target.shape[-1]) % self.length
        query = (self.french @ self.query)[target] + self.query_place[places]
        return query, (self.english @ self.key)[source] + self.key_place[places]

    def sentences(self, count: int, first: int, number: int, order: str) -> tuple[Tensor, Tensor, Tensor]:
        """French and English sentences with the same words of a group, and the place of each translation."""
        source = first + torch.rand(count, number).argsort(-1)[:, : self.length]
        places = torch.arange(self.length).expand(count, -1)
        if order == "shuffled":
            places = torch.rand(count, self.length).argsort(-1)
        return source.gather(1, places), source, places

    def train_on(self, steps: int, order: str, progress: Progress) -> None:
        """Train the output to be the value of the translated word."""
        optimiser = torch.optim.Adam(self.parameters(), lr=0.02)
        for _ in counted(range(steps), progress):
            target, source, _ = self.sentences(32, 0, self.trained, order)
            query, key = self(target, source)
            output = attention(query, key, self.value[source])
            optimiser.zero_grad()
            cross_entropy((output @ self.value.T).flatten(0, 1), target.flatten()).backward()
            optimiser.step()

    @torch.no_grad()
    def accuracy(self, first: int, number: int) -> Row:
        """Which key is the strongest, in new sentences of another order."""
        target, source, places = self.sentences(200, first, number, "shuffled")
        query, key = self(target, source)
        seen = observe(query, key, key)
        strongest = seen.top(1)[1][..., 0]
        return {
            "aligned with the translation": (strongest == places).double().mean().item(),
            "aligned with the same place": (strongest == torch.arange(self.length)).double().mean().item(),
            "weight on the translation": seen.weights().gather(-1, places[..., None]).mean().item(),
            "effective words": seen.perplexity.mean().item(),
        }

    @torch.no_grad()
    def attend(self, target: Sequence[str], source: Sequence[str]) -> list[Row]:
        """The weights of one sentence."""
        french, english = list(self.words), list(self.words.values())
        query, key = self(
            *(
                torch.tensor([known.index(word) for word in sentence])
                for known, sentence in ((french, target), (english, source))
            )
        )
        seen = observe(query, key, key)
        weights, entropy = seen.weights().tolist(), seen.entropy.tolist()
        return [
            {"query": word, **dict(zip(source, row, strict=True)), "entropy, nats": h}
            for word, row, h in zip(target, weights, entropy, strict=True)
        ]


def _vocabulary() -> tuple[dict[str, str], dict[str, str]]:
    """The words that are trained, and those that are not: of each stem, one ending is held out."""
    trained, unseen = dict(_SINGLE), dict[str, str]()
    for number, stem in enumerate(_STEMS):
        for place, (french, english) in enumerate(_ENDINGS.items()):
            group = unseen if place == (number + 2) % len(_ENDINGS) else trained
            group[stem + french] = stem.replace("é", "e") + english
    return trained, unseen


def _spelling(words: Sequence[str]) -> Tensor:
    """How often each n-gram of 3 or 4 letters is in each word, divided by the root of their number."""
    grams = [[f"<{word}>"[i : i + size] for size in (3, 4) for i in range(len(word) + 3 - size)] for word in words]
    known = {gram: place for place, gram in enumerate(sorted({gram for some in grams for gram in some}))}
    counts = torch.zeros(len(words), len(known))
    for row, some in zip(counts, grams, strict=True):
        for gram in some:
            row[known[gram]] += len(some) ** -0.5
    return counts


def _five_words(claimed: tuple[float, ...]) -> list[Row]:
    """The example as its code draws it: five random keys, of which “cat” is the query with a little noise."""
    generator = torch.Generator().manual_seed(42)
    key, query = torch.randn(5, 8, generator=generator), torch.randn(1, 8, generator=generator)
    key[1] = query[0] + 0.1 * torch.randn(8, generator=generator)
    norms, plain = key.norm(dim=-1), observe(query, key, key)
    equal = key / norms[:, None] * norms[1]
    columns = {
        "‖k‖": norms,
        "cos θ": observe(query, key, key, score=Cosine(temperature=1.0)).scores()[0],
        "q·k / √d": plain.scores()[0],
        "weight": plain.weights()[0],
        "claimed": torch.tensor(claimed),
        "as printed": torch.tensor(_PRINTED),
        "keys of one length": observe(query, equal, equal).weights()[0],
        f"cosine, τ = {_TAU}": observe(query, key, key, score=Cosine(temperature=_TAU)).weights()[0],
    }
    numbers = {column: values.tolist() for column, values in columns.items()}
    return [{"key": word, **{column: numbers[column][i] for column in numbers}} for i, word in enumerate(_WORDS)]


def _longer_key_wins(rows: list[Row]) -> bool:
    exact = all(math.isclose(row["weight"], row["claimed"], rel_tol=0, abs_tol=5e-4) for row in rows)
    first, fair = (max(rows, key=lambda row: row[column])["key"] for column in ("weight", "keys of one length"))
    return exact and first == "mat" and fair == "cat" and rows[1][f"cosine, τ = {_TAU}"] > 0.98


def _draw_matrix(axes: Any, rows: list[Row]) -> None:
    """One bar per pair of words, with its share in per cent; the largest of each row is dark."""
    keys, places = list(rows[0])[1:-1], range(len(rows))
    best = [max(keys, key=lambda key: row[key]) for row in rows]
    for column, key in enumerate(keys):
        shares, left = [row[key] for row in rows], 1.15 * column
        colours = ["C0" if strongest == key else "#a9c9e3" for strongest in best]
        axes.barh(places, [1.0] * len(rows), left=[left] * len(rows), height=0.7, color="#f1f1f1")
        axes.barh(places, shares, left=[left] * len(rows), height=0.7, color=colours)
        for place, share in zip(places, shares, strict=True):
            inside = share > 0.4
            where, colour = (left + 0.04, "white") if inside else (left + share + 0.04, "#333333")
            axes.text(where, place, f"{share:.0%}", va="center", fontsize=7.5, color=colour)
    axes.set_xticks([1.15 * column + 0.5 for column in range(len(keys))], keys)
    axes.set_yticks(places, [row["query"] for row in rows])
    axes.set(xlabel="English (keys)", ylabel="French (queries)")
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
