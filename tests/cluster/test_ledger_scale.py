"""The ledger of a run with very many workers."""

import pytest

from tests.cluster.many_reports import UNIT_DOCUMENTS, simulate


def test_no_usage_is_lost_between_workers_and_the_bill(tmp_path):
    found = simulate(tmp_path, workers=24, categories=30, seconds=23)
    assert found["documents"] == found["category_documents"]
    assert found["documents"] >= 24 * 2 * UNIT_DOCUMENTS


@pytest.mark.slow
@pytest.mark.idle
def test_1024_workers_with_300_categories_take_less_than_a_quarter_of_a_core(tmp_path):
    found = simulate(tmp_path, workers=1024, categories=300, seconds=30)
    assert found["share_of_a_core"] < 0.25
    assert found["documents"] == found["category_documents"]
    assert found["bill_bytes"] < 4 << 20
