"""Copies of documents with values of others: text and labels stay of one mind."""

import json

import pytest

from raypd.errors import ConfigError
from raypd.tasks.base import Document
from raypd.training.data import check, prepare, swapped
from tests.runs import config_tree, extraction, run_config
from tests.tiny import tiny_tokenizer

TASK = extraction(shoes=["Brand", "Model", {"name": "Size", "type": "number"}], hats=["Brand"])


def config(tmp_path, **training):
    source = {"text_columns": ["title", "note"]}
    keys = {
        "decoding": {"method": "hyper_parallel"},
        "training": {"swap_copies": 8, "max_skipped_share": 1, **training},
    }
    return run_config(TASK, tmp_path / "in.jsonl", tmp_path / "out", input=source, **keys)


def shoe(number, brand, model, title, category="shoes", note=None):
    target = {"Brand": brand, "Model": model, "Size": 42}
    return Document(number, str(number), {"category": category, "title": title, "note": note, "target": target})


def test_labels_stand_in_the_copies_as_they_stood_in_the_documents(tmp_path):
    documents = [shoe(0, "Acme", "Acme Trail", "Acme Trail 42", note="by Acme"),
                 shoe(1, "Berg", "Road X", "Road X of Berg, 42"), shoe(2, "Nova", None, "42, Nova"),
                 shoe(3, "hidden", None, "its brand stands nowhere"),
                 Document(4, "4", {"category": "hats", "title": "Zeta hat", "target": {"Brand": "Zeta"}}),
                 Document(5, "5", {"category": "boats", "title": "x", "target": {"Brand": "x"}}),
                 Document(6, "6", {"category": "shoes", "title": "x", "target": None})]  # fmt: skip
    before = json.dumps([document.fields for document in documents])
    copies = swapped(documents, config(tmp_path))
    assert json.dumps([document.fields for document in documents]) == before
    assert len(copies) == 8 * 5
    brands = {number: set() for number in range(5)}
    for made in copies:
        text = f"{made.fields['title']} {made.fields.get('note') or ''}"
        labels = made.fields["target"]
        brands[int(made.id)].add(labels["Brand"])
        assert "42" in text or made.id in "34"
        if made.id != "3":
            assert all(value in text for value in labels.values() if isinstance(value, str))
        if made.id == "0":  # the longer value goes with the shorter one that it holds
            assert made.fields["note"] == f"by {labels['Brand']}"
    assert brands[0] == {"Acme", "Berg", "Nova"}
    assert (brands[3], brands[4]) == ({"hidden"}, {"Zeta"})
    assert [made.fields for made in swapped(documents, config(tmp_path))] == [made.fields for made in copies]


def test_they_are_trained_on_beside_the_documents_and_never_validated(tmp_path):
    rows = [{"id": n, **shoe(n, f"Brand{n}", None, f"Brand{n} shoe 42").fields} for n in range(20)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = []
    for copies in (0, 3):
        data, groups, validation = prepare(config(tmp_path, swap_copies=copies), tiny_tokenizer(), 4096)
        counts.append((data.documents, sum(map(len, groups)), sum(map(len, validation)), data.skipped))
    (documents, plain, held_out, _), (same, with_copies, still_held_out, skipped) = counts
    assert (plain, with_copies) == (documents, 4 * documents)
    assert (same, still_held_out, skipped) == (documents, held_out, {})


def test_they_are_of_extraction(tmp_path):
    tree = config_tree("generation", decoding={"method": "autoregressive"}, training={"swap_copies": 1})
    with pytest.raises(ConfigError, match=r"training.swap_copies is for extraction, and this is generation"):
        check(run_config(tree["task"], decoding=tree["decoding"], training=tree["training"]))
