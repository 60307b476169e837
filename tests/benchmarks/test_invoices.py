"""The labelled invoices: the file is the generator's, and every label fits the schema and stands in its text."""

import json
from pathlib import Path

from benchmarks.labelled import invoices
from raypd.config.schema import categories_of
from raypd.config.tasks import Category


def test_the_invoices() -> None:
    rows = [json.loads(line) for line in invoices.FILE.read_text().splitlines()]
    assert (rows, len(rows)) == (list(invoices.invoices()), invoices.COUNT)
    assert {len(row["target"]["lines"]) for row in rows} >= {1, 2, 3, 4, 5, 6, 8}
    (category,) = categories_of(str(invoices.FILE.with_suffix(".schema.json")), Path()).values()
    attributes = Category.model_validate(category).attributes
    for row in rows:
        assert all(attribute.fits(row["target"][attribute.name]) for attribute in attributes), row
        wanted = [line["item"] for line in row["target"]["lines"]] + [row["target"]["invoice_number"]]
        assert all(text in row["description"] for text in wanted), row
