"""What people copy: raypd.LLM in a script without Ray, and the scripts of examples/, each as a
process.
"""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.processes import ROOT, ended, start
from tests.tiny import save_tiny

LLM = """
import sys
sys.modules["ray"] = None
import raypd

fake = raypd.LLM("fake", settings={"model.fake": {"load_seconds": 0}})
assert len(fake.extract("one text", ["Brand"])) == 1
assert len(fake.generate("Hello")) == 1
assert len(fake.answer("x", "Who?")) == 1
assert fake.answer(None, "Who?")[0].error
errors = [result.error for result in fake.extract([None, "a\\0b", "\\ud800 shoe", " "], ["Brand"])]
assert errors == [
    "the document has no text",
    "column 'text' holds NUL characters",
    "column 'text' holds half a surrogate pair",
    "the document has no text",
], errors
llm = raypd.LLM(sys.argv[1], settings={"decoding.max_new_tokens": 12, "decoding.method": "guided"})
schema = [{"name": "Brand"}, {"name": "Red", "type": "boolean"}]
record, bad = llm.extract(["Acme shoe, red", " "], schema)
for mapping in (record.value, record.confidence, record.status, record.span, record.raw):
    assert set(mapping) == {"Brand", "Red"}, record
assert "<th>Brand</th>" in record._repr_html_(), record
assert "the document has no text" in bad._repr_html_()
assert record.value["Red"] in (True, False, None), record
assert 0 < record.confidence["Red"] <= 1, record
assert bad.value is None, bad
assert bad.error == "the document has no text", bad
choices = {"question": "Where?", "choices": ["A", "Oslo"]}
free, choice = llm.answer("Bob lives in Oslo.", ["Where does Bob live?", choices])
assert choice.value in ("A", "Oslo"), choice
first, second = llm.generate(["Say yes.", ["Hello", "Who are you?"]])
assert first.value, first
assert second.value, second
assert second.status in ("stop", "length"), second
assert len(llm._models) == 1, "one model for all"
assert raypd.LLM().settings["model.name"] == "smollm2-135m-instruct"
"""


@pytest.mark.slow
@pytest.mark.ci
def test_llm_answers_in_this_process_without_ray(tmp_path: Path) -> None:
    ended(start("-c", LLM, str(save_tiny(tmp_path))))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    code = (
        "import os, runpy, sys; os.chdir(sys.argv[2]); runpy.run_path(sys.argv[1], "
        "run_name='__main__')"
    )
    assert ended(start("-c", code, str(script), str(tmp_path)), seconds=3000)


@pytest.mark.slow
@pytest.mark.ci
def test_the_notebook_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", 4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources=place,
    ).execute()
    shown = [
        str(output.get("data", "")) for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    for words in ("<td>Green</td>|<td>green</td>", "3 documents, 0 failed", "strict F1"):
        assert any(word in text for word in words.split("|") for text in shown), shown
