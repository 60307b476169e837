"""Rounding of the layouts: they agree where nothing rounds, and every question of the file is looked at."""

from __future__ import annotations

import pytest
import torch

from raypd.evaluation.rounding import agreement, distance, layouts, table
from tests.evaluation.test_exact_match import loaded
from tests.tasks.test_question_answering import RAGGED
from tests.tiny import in_float64


def test_layouts_are_one_but_for_rounding():
    single, half = loaded(), loaded(torch.bfloat16)
    found = {name: layout(RAGGED) for name, layout in layouts(single, 4).items()}
    rough = {name: layout(RAGGED) for name, layout in layouts(half, 4).items()}
    in_float64(single.model)
    truth = layouts(single, 4)["unshared"](RAGGED)
    assert list(found) == ["batch 1", "batch 4", "unshared", "IPPD"]
    for name, logits in found.items():
        assert [len(row) for row in logits] == [len(row) for row in truth]
        assert distance(logits, truth) < 1e-4
        assert agreement(logits, truth) == 1
        assert 1e-3 < distance(rough[name], truth) < 1
    assert len(table(truth, found).splitlines()) == 5


def test_distance_and_agreement_by_hand():
    some, others = [torch.tensor([1.0, 3.0]), torch.tensor([0.0])], [torch.tensor([3.0, 1.0]), torch.tensor([1.0])]
    assert distance(some, others) == pytest.approx(3**0.5)
    assert agreement(some, others) == 0.5
