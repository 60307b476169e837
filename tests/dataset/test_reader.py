"""Reading: one document for every row, whatever stands in it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from tests.runs import read_all, write_jsonl

BAD = [(b"{not json", "a.jsonl, byte {}: not JSON"),
       (b"[1, 2]", "a.jsonl, byte {}: expected a JSON object, found a list"),
       (b"null", "a.jsonl, byte {}: expected a JSON object, found null"),
       (b'{"id": 1, "title": "\xff\xfe"}', "a.jsonl, byte {}: not UTF-8"),
       (b'{"id": 1, "title": "a\x00b"}', "a.jsonl, byte {}: not JSON"),
       (b'{"id": 1, "title": "a\\u0000b"}', "a.jsonl, byte {}: column 'title' holds NUL"),
       (b'{"id": 1, "title": "\\ud800"}', "a.jsonl, byte {}: column 'title' holds half a surrogate"),
       (b'{"id": 1, "title": "  "}', "a.jsonl, byte {}: no text in title"),
       (b'{"id": 1}', "a.jsonl, byte {}: no text in title"),
       (b'{"id": 1, "title": {"a": 1}}', "a.jsonl, byte {}: column 'title' holds an object"),
       (b'{"id": 1, "title": "' + b"x" * 3000 + b'"}', "a.jsonl, byte {}: the document has 3000 bytes"),
       (b'{"id": 1, "title": "' + b"x" * 200_000 + b'"}', "a.jsonl, byte {}: the line has 2000"),
       (b"[" * 60_000, "a.jsonl, byte {}: not JSON that can be read: nested too deeply"),
       (b'{"id": 1, "title": ' + b"[" * 3000 + b"]" * 3000 + b"}", "a.jsonl, byte {}: "),
       (b"9" * 5000, "a.jsonl, byte {}: not JSON: a number has more digits than can be read")]  # fmt: skip


def test_every_kind_of_bad_line_is_a_document_with_an_error(tmp_path, config) -> None:
    good = b'{"id": "good", "title": "text"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(part for bad, _ in BAD for part in (bad, good)))
    documents, place = read_all(config(str(tmp_path / "a.jsonl"), max_document_bytes=2000)), 0
    for (bad, message), of_bad, of_good in zip(BAD, documents[::2], documents[1::2], strict=True):
        assert message.format(place) in (of_bad.error or ""), of_bad
        assert (of_good.id, of_good.error) == ("good", None)
        place += len(bad) + len(good) + 2


def test_lists_of_texts_and_numbers_become_text(tmp_path, config) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"title": title}) + "\n" for title in (["a", "b"], 7, True, ["a", 1])))
    documents = read_all(config(str(path), id_column=None))
    assert [d.fields.get("title") for d in documents] == ["a\nb", "7", "true", None]
    assert "holds a list with a number in it, not text" in (documents[3].error or "")


def test_ids_are_text_and_made_where_they_are_missing(tmp_path, config) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"id": 7}, {"id": "x"}, {}, {"id": None}, {"id": "x"}, {"id": ["no"]}, {"id": "\ud800"}]
    texts = [json.dumps({**row, "title": "t"}) + "\n" for row in rows]
    path.write_text("".join(texts))
    ids = [f"a.jsonl:{sum(map(len, texts[:i]))}" for i in range(len(texts))]
    expected = ["7", "x", ids[2], ids[3], "x", ids[5], "?"]
    assert [(d.id, d.error) for d in read_all(config(str(path)))] == [(id, None) for id in expected]
    assert [d.id for d in read_all(config(str(path), id_column=None))] == ids


def test_parquet_values_become_text_and_bad_ones_errors(tmp_path, config) -> None:
    path = tmp_path / "a.parquet"
    title = pa.Array.from_buffers(pa.string(), 4, pa.array([b"fine", b"\xff", None, b"a\x00"], pa.binary()).buffers())
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "title": title, "other": [1, 2, 3, 4]}), path)
    run = config(str(path))
    (unit,) = list(plan(run))
    documents = read_unit(unit, run)
    assert [d.error for d in documents] == [None, "a.parquet, row 1: column 'title' is not UTF-8",
                                            "a.parquet, row 2: no text in title",
                                            "a.parquet, row 3: column 'title' holds NUL characters"]  # fmt: skip
    assert (documents[0].fields, read_unit(unit, run, ["other"])[0].fields["other"]) == ({"id": 1, "title": "fine"}, 1)


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path, config) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    run = config(str(path))
    (unit,) = list(plan(run))
    write_jsonl(path, ["a", "c"])
    with pytest.raises(InputError, match="has changed since"):
        read_unit(unit, run)
    path.unlink()
    with pytest.raises(InputError, match="is gone since"):
        read_unit(unit, run)
