"""What a run that has ended tells by its exit code and its last lines."""

import json
from pathlib import Path

import pytest

from raypd.cli.summary import _values
from raypd.tasks.columns import value_row
from tests.runs import write_jsonl


@pytest.fixture
def extract(tmp_path: Path, config, in_process, raypd):
    def run(titles: list[str], *overrides: str):
        made = config(str(write_jsonl(tmp_path / "a.jsonl", titles)))
        (tmp_path / "run.yaml").write_text(made.model_dump_json())
        return raypd("extract", str(tmp_path / "run.yaml"), *overrides)

    return run


def test_no_document_failed(extract) -> None:
    code, out, err = extract(["a"] * 12)
    assert code == 0
    assert "documents failed" not in out + err


def test_some_failed(extract, tmp_path) -> None:
    code, out, _ = extract(["a"] * 14 + [""] * 5 + ["program"])
    assert code == 0
    share, where = out.splitlines()[-2:]
    assert share == "6 of 20 documents failed (30%), most because: no text in title"
    assert where == f"`raypd errors {tmp_path}/out` lists them; --retry-errors tries again what may pass"


@pytest.mark.parametrize(
    ("titles", "share", "reason"),
    [
        ([""] * 12, "1.0", "no document was answered: 12 of 12 documents failed (100%), most because: no text in"),
        (["a"] * 9 + [""] * 3, "0.2", "more documents failed than cluster.max_failed_share, 0.2: 3 of 12 documents"),
    ],
)
def test_none_was_answered_or_too_few(extract, titles, share, reason) -> None:
    code, out, err = extract(titles, f"cluster.max_failed_share={share}")
    assert "12 documents: " in out  # the summary stands before it
    assert code == 1
    assert reason in err


def test_a_boolean_is_that_of_the_record() -> None:
    """The few documents that a run shows at its end stand there as they do in the table."""
    record = {"Waterproof": True, "Decaf": False, "Brand": "Acme", "Weight in g": 7, "Color": None}
    values = [value_row(name, value, "ok", None) for name, value in record.items()]
    row = {"id": "1", "status": "ok", "record": json.dumps(record), "values": values, "truncated": False}
    assert str(_values(row)) == "Waterproof: true  Decaf: false  Brand: Acme  Weight in g: 7"
