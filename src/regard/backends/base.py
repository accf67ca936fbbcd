"""What a backend is: reasons to refuse, and a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from ..chunked import statistics
from ..chunked.stacked_survey import StackedSurvey
from ..chunked.token_repeats import TokenLabels, TokenRepeats, survey_with_repeats
from ..core.options import BothLse, Heads, Kind
from ..core.problem import Problem
from ..core.rows import Rows, StackedRows
from ..core.tiling import TileSizes

__all__ = ["Backend", "Prepared", "PreparedSurvey"]

Prepared: TypeAlias = Callable[..., Any]
"""From query, key, value, mask, sink and structured bias to the output or, of an observed problem, to `Rows`."""

PreparedSurvey: TypeAlias = Callable[[Problem, StackedRows, int, int], StackedSurvey | None]
"""`Backend.survey` of problems whose statistics are in one tensor; None where it has to go the whole way."""


class Backend(ABC):
    """One way to compute attention.

    `refuses` lists why it will not take a problem; `run` may rely on that list being empty. The late passes of an
    Observation work from q, k and the row statistics on any device; a backend with kernels for them overrides them.
    """

    name: ClassVar[str]
    about: ClassVar[str]

    @abstractmethod
    def refuses(self, p: Problem) -> list[str]:
        """Why this backend cannot take a problem; empty if it can."""

    @abstractmethod
    def run(self, p: Problem) -> Rows:
        """Compute a problem."""

    def prepare(self, p: Problem) -> Prepared | None:
        """`run` for problems that differ from this one by tensors alone, and no tensor of it; None without one."""
        return None

    def prepare_survey(self, p: Problem) -> PreparedSurvey | None:
        """`survey` for problems that differ from this one by tensors alone, and no tensor of it; None without one."""
        return None

    def detail(self, p: Problem) -> str:
        """What it would run, in a few words, for `why`."""
        return self.about

    @property
    def tile_sizes(self) -> TileSizes:
        return TileSizes()

    def received(self, p: Problem, rows: Rows) -> Tensor:
        return statistics.received(p, rows, self.tile_sizes)

    def pooled(self, p: Problem, rows: Rows, height: int, width: int) -> Tensor:
        return statistics.pooled(p, rows, height, width, self.tile_sizes)

    def top(self, p: Problem, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        return statistics.top(p, rows, k, self.tile_sizes)

    def moments(self, p: Problem, rows: Rows) -> tuple[Tensor, Tensor]:
        return statistics.moments(p, rows, self.tile_sizes)

    def survey(self, p: Problem, rows: Rows, height: int, width: int) -> statistics.Survey:
        return statistics.survey(p, rows, height, width, self.tile_sizes)

    def survey_with_repeats(
        self, p: Problem, rows: Rows, tokens: TokenLabels
    ) -> tuple[statistics.Survey, TokenRepeats]:
        return survey_with_repeats(p, rows, tokens, self.tile_sizes)

    def visible(self, p: Problem) -> Tensor:
        return statistics.visible(p, self.tile_sizes)

    def divergence(
        self, first: Problem, second: Problem, kind: Kind, heads: Heads, epsilon: float | None, lse: BothLse
    ) -> Tensor | None:
        """The divergence of each row, as `row_divergence` of `chunked` has it; None without kernels for it.

        `lse` are those of both sides, where they are known; derivatives do not pass through them.
        """
        return None

    def __repr__(self) -> str:
        return f"regard.backends.{type(self).__name__}()"
