"""`raypd report --texts`: the documents' texts beside their answers, each value marked where it stands."""

from pathlib import Path

import pytest

from raypd import storage
from raypd.answering import components
from raypd.config import RunConfig
from raypd.dataset import writer
from raypd.errors import InputError
from raypd.report import data, page, texts
from raypd.tasks.columns import value_row
from tests.runs import make_config, run_here, with_keys, with_values, write_jsonl

config = make_config
TITLES = ["  Boots <b>of</b> Acme, red", "Acme &amp; Acme", "of nobody"]


@pytest.fixture
def run(tmp_path: Path, config) -> RunConfig:
    """A run of the fake model whose values are put where they stand in the texts."""
    made = config(str(write_jsonl(tmp_path / "in/a.jsonl", TITLES)), id_column="id")
    made = with_keys(made, model={"name": "fake", "fake": {"load_seconds": 0, "step_seconds": 0}})
    run_here(made, components.build)
    ((unit, path),) = writer.objects(made.output.path)
    summary, table = writer.read_table(made.output.path, unit)
    found = [[("Acme", 18), ("cme, red", 19)], [("Acme", 0), ("Acme", 11)], []]
    spans = [[{**value_row(f"a{n}", text, "ok", 0.9), "span": {"begin": at, "end": at + len(text)}, "span_exact": True}
              for n, (text, at) in enumerate(own)] for own in found]  # fmt: skip
    assert writer.replace_rows(path, with_values(table, "values", spans), summary, storage.version(path))
    return made


def test_values_are_marked_where_they_stand(run: RunConfig) -> None:
    found = data.load(run.output.path)
    texts.add(found)
    shown = [[(piece, marks) for piece, marks in one.text if piece] for one in found.sample.documents]
    assert shown == [
        [("  Boots <b>of</b> ", ""), ("Acme", "a0"), (", red", "")],  # of two that overlap the first
        [("Acme", "a0"), (" &amp; ", ""), ("Acme", "a1")],
        [("of nobody", "")],
    ]
    html = page.render(found)
    assert all(part in html for part in ("Boots &lt;b&gt;of&lt;/b&gt; ", '<mark title="a0"><bdi>Acme</bdi></mark>'))
    assert "<b>of" not in html


def test_without_it_the_page_holds_no_text_and_a_lost_input_is_said(run: RunConfig) -> None:
    assert "Boots" not in page.render(data.load(run.output.path))
    Path(str(run.input.path)).unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: no such file"):
        texts.add(data.load(run.output.path))
