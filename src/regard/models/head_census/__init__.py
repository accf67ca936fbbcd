"""A census of heads: what each head of a model does over a whole corpus."""

from __future__ import annotations

from .census import Census
from .codec import codec_of
from .corpus import Corpus
from .counted_heads import Exemplar, KeyWeight
from .run import census
from .summary import HeadRecord, Summary
from .texts import Texts

__all__ = ["Census", "Corpus", "Exemplar", "HeadRecord", "KeyWeight", "Summary", "Texts", "census", "codec_of"]
