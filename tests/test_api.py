"""`import raypd`: runs from Python are those of the command line."""

import json
import os
import stat
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pandas as pd
import pyarrow as pa
import pytest
from pydantic import BaseModel, Field

import raypd
from raypd.answering import request_queue
from raypd.errors import ConfigError, InputError
from raypd.run.load import load_run
from tests.runs import write_rows

FRAME = pd.DataFrame(
    {
        "id": ["a", "b", "c"],
        "title": ["red shoe", "blue shoe", "hat"],
        "price": [1.0, 2.0, 3.0],
    }
)


def test_a_frame_becomes_a_run_that_the_same_call_finds_again(
    tmp_path: Path, monkeypatch, ray_here
) -> None:
    monkeypatch.chdir(tmp_path)
    attributes = ["Brand", {"name": "Price", "type": "number"}]
    run = raypd.extract(
        FRAME,
        attributes,
        model="fake",
        settings={"cluster.unit_documents": 1},
    )
    rows = run.to_pandas()
    typed = run.to_pandas(typed=True)
    assert list(rows["id"]) == list(typed["id"]) == ["a", "b", "c"]
    assert set(json.loads(rows["record"][0])) == {"Brand", "Price"}
    assert typed["Price"].dtype.kind == "f"
    assert Path(run.report()).read_text().startswith("<!DOCTYPE html>")
    assert run.path.startswith(str(tmp_path / "runs"))
    again = raypd.extract(
        FRAME,
        attributes,
        model="fake",
        settings={"cluster.unit_documents": 1},
    )
    # Nothing was left to do.
    assert again.path == run.path
    assert again.bill.sessions == 1
    assert run.bill.documents == 3
    assert raypd.Run(run.path).to_arrow() == run.to_arrow()


def test_a_run_is_verified_scored_and_tried_again(tmp_path: Path, monkeypatch, in_process) -> None:
    monkeypatch.chdir(tmp_path)
    run = raypd.extract(
        [{"id": "a", "title": "red <b> shoe"}, {"id": "b", "title": " "}], ["Brand"], model="fake"
    )
    assert run.verify().passed is True
    assert list(run.to_pandas(typed=True)["Brand"].isna()) == [False, True]
    assert "no text in title" in run.errors().column("reason")[0].as_py()
    assert raypd.extract(["a hat"], ["Brand"], model="fake").errors().num_rows == 0
    other = raypd.extract(
        FRAME.head(2),
        ["Brand"],
        model="fake",
        output="own",
    )
    assert other.path == str(tmp_path / "own")
    assert other.manifest.documents == 2
    Path("labels.jsonl").write_text('{"id": "a", "target": {"Brand": "no such"}}\n')
    assert run.evaluate("labels.jsonl").measures[0].documents == 1
    assert run.retry_errors(everything=True).manifest.documents == 2
    page = run._repr_html_()
    assert "<b>" not in page
    assert "2 documents, 1 failed" in page


@pytest.mark.parametrize(
    "documents",
    [
        ["a red shoe"],
        ["a hat/cap", "a shirt w/o sleeves"],
        ["24/7", "Bose/QC45"],
        [{"id": "x", "title": "hat", "n": 1}],
        [{"title": "hat"}, {"description": "a red cap"}],
        [{"name": "hat", "category": "record"}],
    ],
)
def test_a_list_of_texts_or_dicts_is_documents(
    documents, tmp_path: Path, monkeypatch, in_process
) -> None:
    monkeypatch.chdir(tmp_path)
    run = raypd.extract(documents, ["Brand"], model="fake")
    assert run.manifest.documents == len(documents)
    assert run.manifest.failed == 0
    assert "category" not in load_run(run.path, []).text_columns()


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (["a.jsonl", "runs/b"], InputError, "a.jsonl: no such file"),
        (["b/*"], InputError, "no file matches"),
        (["runs/a.pdf", "runs/b"], InputError, "no such"),
        ([], InputError, "no rows"),
        (FRAME[:0], InputError, "no rows"),
        (
            ["a text", {"title": "x"}],
            ConfigError,
            r"source\[1\]: a list must contain either texts or dicts",
        ),
        (
            ["a text", None],
            ConfigError,
            r"source\[1\]: a list must contain paths, texts or dicts, not NoneType",
        ),
        (pd.DataFrame([["x", "y"]], columns=["title", "title"]), InputError, "two columns 'title'"),
        (pd.DataFrame({"title": ["x", 3]}), InputError, "column title"),
        (7, ConfigError, "not int"),
        (pa.table({"n": [1], "m": [2]}), InputError, "no column of text; it has n, m"),
    ],
)
def test_what_is_no_table_of_documents_is_refused(
    source, error, said, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        raypd.extract(source, ["Brand"], model="fake")
    assert not os.listdir(tmp_path)


def dataset(*texts: str) -> SimpleNamespace:
    """As Ray's, each text in a block of its own."""
    blocks = [pa.table({"id": [text], "text": [text]}) for text in texts]
    schema = SimpleNamespace(base_schema=blocks[0].schema)
    return SimpleNamespace(schema=lambda: schema, iter_batches=lambda batch_format: blocks)


def test_a_dataset_of_other_rows_is_another_run_in_a_private_folder(
    tmp_path, monkeypatch, in_process
) -> None:
    monkeypatch.chdir(tmp_path)
    datasets = dataset("hat", "cap"), dataset("cap", "hat"), dataset("shoe")
    first, same, other = (raypd.extract(rows, ["Brand"], model="fake") for rows in datasets)
    assert first.path == same.path
    assert list(other.to_pandas()["id"]) == ["shoe"]
    assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700


def test_the_columns_of_a_file_are_found(tmp_path: Path, monkeypatch, in_process, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("name,note\nMug,A red mug of the shop for coffee\n")
    frame = pd.read_csv("x.csv").assign(n=1, Brand="of the shop that we have")
    for source, said in (
        ("x.csv", "csv: reads name, note,"),
        (
            frame,
            "not read (input.text_columns): n; not read, because columns with an attribute's name",
        ),
    ):
        assert raypd.extract(source, ["Brand"], model="fake").manifest.ok == 1
        assert said in capsys.readouterr().err


def test_a_list_of_files_with_blanks_in_their_names_is_of_paths(
    tmp_path: Path, monkeypatch, in_process
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my file.jsonl").write_text('{"id": "a", "title": "hat"}\n{"id": "b", "title": "cap"}\n')
    Path("🎧.jsonl").write_bytes(Path("my file.jsonl").read_bytes())
    settings = {"task.instruction": "🎧\x7f\u2028\x85"}
    for source, output in (
        (["my file.jsonl"], None),
        ("🎧.jsonl", "out🎧"),
        (FRAME[:2], Path("runs/exp[1]?")),
    ):
        run = raypd.extract(
            source, ["Brand"], model="fake", text="title", output=output, settings=settings
        )
        assert list(run.to_pandas()["id"]) == ["a", "b"]
        assert load_run(run.path, []).extraction.instruction == settings["task.instruction"]
        assert Path(run.path).name == Path(output or run.path).name
    assert raypd.extract(["x " * 3000], ["Brand"], model="fake").manifest.documents == 1


class Shoe(BaseModel):
    brand: str
    size: int | None = None
    price: Decimal | None = None


class Long(Shoe):
    brand: str = Field(min_length=1000)


def test_a_pydantic_model_gives_instances_bytes_are_no_text_and_an_interrupted_call_leaves_nothing(
    monkeypatch,
) -> None:
    llm = raypd.LLM("fake", settings={"model.fake": {"load_seconds": 0}})
    (answer,) = llm.extract("a shoe", Shoe)
    assert answer.parsed == Shoe(**answer.value)
    for schema in (Long, ["brand"]):
        assert llm.extract("a shoe", schema)[0].parsed is None
    (hat,) = llm.extract({"title": "a hat"}, Shoe)
    mixed = iter(
        [
            "a shoe",
            {"title": "a hat"},
            {"text": "a shoe"},
        ]
    )
    assert llm.extract(mixed, Shoe) == [answer, hat, answer]
    assert llm.extract([], Shoe) == []
    frame = pd.DataFrame({"title": ["a hat", None]})
    assert llm.extract(frame, Shoe)[0] == hat
    for call in (
        lambda: llm.extract(b"a", Shoe),
        lambda: llm.answer("a", [b"a"]),
        lambda: llm.generate(b"a"),
    ):
        with pytest.raises(TypeError, match="bytes are not text"):
            call()
    interrupted = Mock(wraps=request_queue.answer, side_effect=[KeyboardInterrupt, DEFAULT])
    monkeypatch.setattr(request_queue, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.extract("a shoe", ["brand"])
    assert not llm._parts  # in whose engine its programs are
    assert llm.extract("a shoe", ["brand"])[0].error is None


def test_a_run_that_has_not_ended_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run here"):
        raypd.Run(tmp_path)


def test_ids_and_texts_are_named_columns(tmp_path: Path, monkeypatch, in_process) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"nr": f"A{n}", "remark": "nothing of interest at all", "body": f"A shoe of size {n}"}
        for n in range(3)
    ]
    run = raypd.extract(
        rows,
        ["Brand"],
        model="fake",
        id="nr",
        text="body",
    )
    assert list(run.to_pandas()["id"]) == ["A0", "A1", "A2"]
    config = json.loads((Path(run.path) / "run.json").read_text())["config"]
    assert config["input"]["text_columns"] == ["body"]
    assert config["input"]["id_column"] == "nr"
    path = write_rows(tmp_path / "in.jsonl", rows)
    of_file = raypd.extract(
        str(path),
        ["Brand"],
        model="fake",
        id="nr",
        text=["body"],
    )
    assert list(of_file.to_pandas()["id"]) == ["A0", "A1", "A2"]
    llm = raypd.LLM("fake")
    answers = llm.extract(
        rows,
        ["Brand"],
        id="nr",
        text="body",
    )
    assert [answer.value for answer in answers] == [{"Brand": "fake"}] * 3
    with pytest.raises(ConfigError, match="column 'sku'"):
        llm.extract(rows, ["Brand"], id="sku", text="body")


def test_a_run_says_what_its_answers_are_worth(tmp_path: Path, monkeypatch, in_process) -> None:
    monkeypatch.chdir(tmp_path)
    run = raypd.extract([f"shoe {n}" for n in range(9)], ["Brand"], model="fake")
    assert "made up" in run.check.model
    assert any("same value in all 9 documents" in warning for warning in run.warnings)
    assert "raypd init" in run.check.next_step
    assert "raypd init" in run._repr_html_()
