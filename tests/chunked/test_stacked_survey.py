"""A survey in one tensor: its parts are aligned, lie apart, and can be written and read, copies included."""

from __future__ import annotations

import pickle

import torch

from regard.chunked.stacked_survey import StackedSurvey, SurveySizes
from regard.chunked.statistics import Survey


def test_the_parts_are_aligned_and_apart() -> None:
    sizes = SurveySizes(1, 3, 5, 7, 2, 3, 1)
    memory = torch.zeros(sizes.words, dtype=torch.int64)
    survey = StackedSurvey(memory, sizes).survey
    assert [*sizes.parts, "seen_from"] == list(Survey._fields)
    assert survey.seen_from is None
    for number, part in enumerate(survey[:-1], 1):
        assert part is not None
        assert not (part.data_ptr() - memory.data_ptr()) & 15
        part.fill_(number)
    for x in (survey, pickle.loads(pickle.dumps(StackedSurvey(memory, sizes))).survey):
        assert [part.unique().tolist() for part in x[:-1]] == [[number] for number in range(1, len(Survey._fields))]
        assert (x.map.shape, x.received.shape, x.key.shape) == ((1, 3, 2, 3), (1, 3, 7), (1, 3, 5))
        assert (x.totals.shape[:3], x.peaks.shape) == ((1, 3, 1), (1, 3, 3, 3))
        assert (x.visible.dtype, x.peaks.dtype, x.totals.dtype) == (torch.int64, torch.float64, torch.float32)
