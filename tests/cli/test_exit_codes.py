"""What a run that has ended tells by its exit code and its last lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from raypd.cli.main import app, report_errors
from tests.runs import write_jsonl


@pytest.fixture
def extract(tmp_path: Path, config, in_process):
    def run(titles: list[str], *overrides: str) -> Result:
        made = config(str(write_jsonl(tmp_path / "a.jsonl", titles)))
        (tmp_path / "run.yaml").write_text(made.model_dump_json())
        return CliRunner().invoke(app, ["extract", str(tmp_path / "run.yaml"), *overrides])

    return run


def test_no_document_failed(extract) -> None:
    done = extract(["a"] * 12)
    assert (done.exit_code, done.exception) == (0, None)
    assert "documents failed" not in done.output


def test_some_failed(extract, tmp_path) -> None:
    done = extract(["a"] * 14 + [""] * 5 + ["program"])
    assert done.exception is None
    share, where = done.output.splitlines()[-2:]
    assert share == "6 of 20 documents failed (30%), most because: no text in title"
    assert where == f"`raypd errors {tmp_path}/out` lists them; --retry-errors tries again what may pass"


@pytest.mark.parametrize(
    ("titles", "most", "reason"),
    [
        ([""] * 12, "1.0", "no document was answered: 12 of 12 documents failed (100%), most because: no text in"),
        (["a"] * 9 + [""] * 3, "0.2", "more documents failed than cluster.max_failed_share, 0.2: 3 of 12 documents"),
    ],
)
def test_none_was_answered_or_too_few(extract, capsys, monkeypatch, titles, most, reason) -> None:
    done = extract(titles, f"cluster.max_failed_share={most}")
    assert "12 documents: " in done.output  # the summary stands before it
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with report_errors():
        raise done.exception
    assert codes == [1]
    assert reason in capsys.readouterr().err
