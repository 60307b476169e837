"""Keys inside of objects are columns: `message.body` is the body of the objects in `message`."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd.dataset.formats.nested_names import names_in_row, names_in_schema
from raypd.dataset.look import look
from raypd.dataset.reader import read_table
from raypd.errors import InputError
from raypd.tasks import with_nested
from tests.runs import read_all

ROWS = [
    {"ticket": {"no": "T1"}, "message": {"subject": "Help", "body": "The kettle leaks."}, "n": 1},
    {"ticket": {"no": "T2"}, "message": {"subject": "Iron", "body": None}, "n": 2},
    {"ticket": {"no": "T3"}, "message": None, "n": 3},
]
KEYS = {"id_column": "ticket.no", "text_columns": ["message.subject", "message.body"]}


def write(folder: Path, suffix: str) -> str:
    """Write the rows in a format."""
    path = folder / f"a.{suffix}"
    table = pa.Table.from_pylist(ROWS)
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_texts_and_ids_inside_of_objects_are_read_from_every_format(
    tmp_path, config, suffix
) -> None:
    first, second, third = read_all(config(write(tmp_path, suffix), **KEYS))
    assert [first.id, second.id, third.id] == ["T1", "T2", "T3"]
    assert first.fields["message.subject"] == "Help"
    assert first.fields["message.body"] == "The kettle leaks."
    assert second.error is None
    assert second.fields.get("message.body") is None
    assert "no text in message.subject, message.body" in (third.error or "")


def test_a_table_in_memory_has_them_too(config) -> None:
    documents = read_table(pa.Table.from_pylist(ROWS), config("x", **KEYS))
    assert documents[0].fields["message.body"] == "The kettle leaks."


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_a_key_that_no_object_has_is_named_with_those_that_there_are(
    tmp_path, config, suffix
) -> None:
    path = write(tmp_path, suffix)
    with pytest.raises(InputError, match=r"no column 'message.bdy'.*did you mean 'message.body'"):
        read_all(config(path, text_columns=["message.bdy"], id_column="ticket.no"))


def test_an_object_as_text_is_refused_with_a_key_that_it_has(tmp_path, config) -> None:
    documents = read_all(config(write(tmp_path, "jsonl"), text_columns=["message"], id_column=None))
    assert "name a key of it instead, such as message.subject" in (documents[0].error or "")


def test_a_column_whose_own_name_has_a_dot_comes_first(tmp_path, config) -> None:
    row = {"id": 1, "a.b": "own", "a": {"b": "inner", "c.d": "odd"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (document,) = read_all(config(str(tmp_path / "a.jsonl"), text_columns=["a.b", "a.c.d"]))
    assert document.fields["a.b"] == "own"
    assert document.fields["a.c.d"] == "odd"


def test_the_texts_of_a_list_of_objects_are_joined(tmp_path, config) -> None:
    row = {"id": 1, "turns": [{"text": "Hello"}, {"who": "me"}, {"text": "Bye"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (document,) = read_all(config(str(tmp_path / "a.jsonl"), text_columns=["turns.text"]))
    assert document.fields["turns.text"] == "Hello\nBye"


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_look_at_data_chooses_texts_inside_of_objects(tmp_path, suffix) -> None:
    found = look(write(tmp_path, suffix))
    assert found.texts == ["message.subject", "message.body"]
    assert found.columns == ["ticket.no", "message.subject", "message.body", "n"]


def test_a_look_at_parquet_does_so_too(tmp_path) -> None:
    found = look(write(tmp_path, "parquet"))
    assert found.texts == ["message.subject", "message.body"]
    assert "message" not in found.columns


def test_an_object_with_very_many_keys_is_no_record(tmp_path) -> None:
    prices = {f"sku{n}": "a price in words that is long" for n in range(60)}
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"id": 1, "title": "A kettle of two litres", "prices": prices}) + "\n"
    )
    found = look(str(tmp_path / "a.jsonl"))
    assert found.texts == ["title"]
    assert found.columns == ["id", "title", "prices"]


def test_names_end_at_the_fourth_level() -> None:
    row = {"a": {"b": {"c": {"d": {"e": 1}}}}}
    assert list(names_in_row(row)) == ["a", "a.b", "a.b.c", "a.b.c.d"]
    assert names_in_schema(pa.Table.from_pylist([row]).schema) == list(names_in_row(row))
    listed = {"a": [{"b": "x"}]}
    assert names_in_schema(pa.Table.from_pylist([listed]).schema) == ["a", "a.b"]


def test_what_is_not_there_adds_no_field() -> None:
    fields = {"a": {"b": None}, "c": "text", "d": [1, {"e": 2}]}
    assert with_nested(fields, ["a.b", "c.x", "z.y", None, "c"]) == fields
    assert with_nested(fields, ["d.e"])["d.e"] == [2]
