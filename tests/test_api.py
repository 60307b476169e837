"""`import raypd`: runs from Python are those of the command line, and LLM needs no Ray."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import raypd
from raypd.errors import ConfigError, InputError
from tests.processes import ROOT, ended, start

FRAME = pd.DataFrame({"id": ["a", "b", "c"], "title": ["red shoe", "blue shoe", "hat"], "price": [1.0, 2.0, 3.0]})


def test_a_frame_becomes_a_run_that_the_same_call_finds_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = raypd.extract(FRAME, ["Brand", {"name": "Price", "type": "number"}], model="fake")
    rows = run.to_pandas()
    assert list(rows["id"]) == ["a", "b", "c"]
    assert set(json.loads(rows["record"][0])) == {"Brand", "Price"}
    assert run.bill.documents == 3
    assert Path(run.report()).read_text().startswith("<!DOCTYPE html>")
    assert run.path.startswith(str(tmp_path / "runs"))

    again = raypd.extract(FRAME, ["Brand", {"name": "Price", "type": "number"}], model="fake")
    assert (again.path, again.bill.sessions) == (run.path, 1)  # nothing was left to do
    assert raypd.Run(run.path).to_arrow() == run.to_arrow()
    other = raypd.extract(FRAME.head(2), ["Brand", {"name": "Price", "type": "number"}], model="fake", output="own")
    assert other.path == str(tmp_path / "own")
    assert other.manifest.documents == 2


@pytest.mark.parametrize("documents", [["a red shoe", "a hat/cap"], [{"id": "x", "title": "hat", "n": 1}]])
def test_a_list_of_texts_or_dicts_is_documents(documents, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = raypd.extract(documents, ["Brand"], model="fake")
    assert (run.manifest.documents, run.manifest.failed) == (len(documents), 0)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (["a.jsonl", "runs/b"], InputError, "a.jsonl: no such file"),
        (["a text", {"title": "x"}], ConfigError, r"source\[1\]: a list is of texts or dicts, all alike"),
        (["a text", None], ConfigError, r"source\[1\]: a list is of paths, texts or dicts, not NoneType"),
        (FRAME.head(0), InputError, "no rows"),
        (pd.DataFrame([["x", "y"]], columns=["title", "title"]), InputError, "two columns 'title'"),
        (pd.DataFrame({"title": ["x", 3]}), InputError, "column title"),
        (pd.DataFrame({"a": ["x"], "b": ["y"]}), ConfigError, "text: name the columns .* a, b"),
        (pa.table({"n": [1]}), ConfigError, "text: name the columns"),
        (7, ConfigError, "not int"),
    ],
)
def test_what_is_no_table_of_documents_is_refused(source, error, said, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        raypd.extract(source, ["Brand"], model="fake")
    assert not os.listdir(tmp_path)


def test_a_run_that_has_not_ended_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run here"):
        raypd.Run(tmp_path)


LLM = """
import sys
sys.modules["ray"] = None
import raypd

fake = raypd.LLM("fake")
assert len(fake.extract("one text", ["Brand"])) == len(fake.generate("Hello")) == len(fake.answer("x", "Who?")) == 1
errors = [result.error for result in fake.extract([None, "a\\0b", "\\ud800 shoe", " "], ["Brand"])]
assert errors == ["no text in text", "column 'text' holds NUL characters", "column 'text' holds half a surrogate pair",
                  "no text in text"], errors
llm = raypd.LLM(settings={"decoding.max_new_tokens": 12, "decoding.method": "guided"})
record, bad = llm.extract(["Acme shoe, red", " "], [{"name": "Brand"}, {"name": "Red", "type": "boolean"}])
assert set(record.value) == set(record.confidence) == set(record.status) == {"Brand", "Red"}, record
assert record.value["Red"] in (True, False, None) and 0 < record.confidence["Red"] <= 1, record
assert bad.value is None and bad.error == "no text in text", bad
choices = {"question": "Where?", "choices": ["A", "Oslo"]}
free, choice = llm.answer("Bob lives in Oslo.", ["Where does Bob live?", choices])
assert choice.value in ("A", "Oslo"), choice
first, second = llm.generate(["Say yes.", ["Hello", "Who are you?"]])
assert first.value and second.value and second.status in ("stop", "length"), second
print("done", len(llm._models))
"""


def test_llm_answers_in_this_process_without_ray() -> None:
    assert ended(start("-c", LLM)).strip().endswith("done 1")  # one model for all


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.stem)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    code = "import os, runpy, sys; os.chdir(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
    assert ended(start("-c", code, str(script), str(tmp_path)))
