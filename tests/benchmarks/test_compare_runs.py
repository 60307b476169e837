"""Two runs side by side: figures against labels, and every document where they differ."""

import json
from pathlib import Path

from benchmarks.compare_runs import PAGE, compare, main
from raypd.run.text import NONE
from tests.benchmarks.test_judge import finished, texts  # noqa: F401
from tests.runs import TITLES
from tests.tasks.test_cascade import SHOES, rows

OURS = {"a": ("Acme", 42.0), "b": ("Zeta", None), "c": (None, 7.0), "d": ("Acme", 1.0), "e": None}
THEIRS = {"a": ("acme", 42.0), "b": ("Beta", None), "c": ("Zeta", 8.0), "d": None, "e": ("Acme", 1.0)}


def test_values_and_labels(finished, tmp_path):  # noqa: F811
    ours, theirs = (
        finished(name, SHOES, {id: rows(v[0], 0.9, v[1], 0.9) if v else "?" for id, v in of.items()}, input=TITLES)
        for name, of in (("ours", OURS), ("theirs", THEIRS))
    )
    lines = [json.dumps({"id": id, "target": {"Brand": "Zeta", "Size": 7654.5}}) for id in "bc"]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    made = compare(ours, theirs, str(tmp_path / "labels.jsonl"))
    assert {document.id: document.rows for document in made.documents} == {
        "b": [["Brand", "Zeta", "Beta", "Zeta"]],
        "c": [["Brand", NONE, "Zeta", "Zeta"], ["Size", "7.0", "8.0", "7654.5"]],
    }
    assert (made.agreement.agree, made.agreement.of) == (3, 6)
    assert {row[0]: row[1:3] for row in made.rows}["values right"] == ["0.250", "0.250"]
    assert f"2 documents answered differently, 1 by {ours} alone, 1 by {theirs} alone" in made.describe()


def test_the_page_of_texts(texts, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("sys.argv", ["compare_runs", *texts])
    main()
    assert "same answers: 25.0%" in capsys.readouterr().out
    assert "ask d" in Path(texts[0], PAGE).read_text()
