"""A judge behind a server that answers by script, and people by CSV; two runs side by side; the
papers' tables.
"""

import csv
import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from benchmarks import rouge_judge, tables
from benchmarks.compare_runs import PAGE, compare, main
from benchmarks.judge import apply, export, judge
from benchmarks.judge_agreement import agreement, pairs_of
from raypd.answering.components import build
from raypd.cluster import driver
from raypd.config.load import load_config
from raypd.config.yaml_file import parse
from raypd.errors import ConfigError
from raypd.run.text import NONE
from raypd.training import preference
from tests.models.test_endpoint import completion, server
from tests.processes import ROOT
from tests.runs import TITLES, run_config, says, write_rows
from tests.tasks.test_cascade import SHOES, rows, scripted

# Of (Brand, Size)
SAID = {"a": "correct, incorrect", "b": "hallucination, missing", "c": "correct null, correct"}
TEXTS = {
    "a": ("good", "bad"),
    "b": ("bad", "good"),
    "c": ("alike", "alike"),
    "d": ("good", "bad"),
    "e": ("good", None),
}
COLUMNS = {
    "sample": 0,
    "turn": 0,
    "finish_reason": "stop",
    "tokens": 1,
    "raw": "",
    "counters": "{}",
    "warnings": [],
}
OURS = {"a": ("Acme", 42.0), "b": ("Zeta", None), "c": (None, 7.0), "d": ("Acme", 1.0), "e": None}
THEIRS = {
    "a": ("acme", 42.0),
    "b": ("Beta", None),
    "c": ("Zeta", 8.0),
    "d": None,
    "e": ("Acme", 1.0),
}


@pytest.fixture
def finished(tmp_path, in_process, monkeypatch):
    """Makes a run of scripted answers: finished(name, task, {id: columns or the reason of an
    error}); its folder.
    """
    run_extract = driver.run_extract
    monkeypatch.setattr(driver, "run_extract", partial(run_extract, build=build))  # of the judge

    def finish(name, task, answers, **keys):
        lines = [
            {"id": i, "title": f"title {i}", "prompt": f"ask {i}", "category": f"c{i < 'c'}"}
            for i in answers
        ]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = run_config(
            task, tmp_path / "in.jsonl", tmp_path / name, model={"name": "fake"}, **keys
        )
        run_extract(config, build=scripted(answers))
        return config.output.path

    return finish


@pytest.fixture
def texts(finished):
    answers = {text: {**COLUMNS, "text": f"{text} answer"} for text in ("good", "bad", "alike")} | {
        None: "failed"
    }
    sides = [{id: answers[pair[side]] for id, pair in TEXTS.items()} for side in range(2)]
    return finished("ours", "generation", sides[0]), finished("theirs", "generation", sides[1])


def keys(url):
    return ["model.name=gpt", f"model.endpoint={{url: {url}, key_variable: null, retries: 0}}"]


def figures(judgement):
    return {measure.name: measure.value for measure in judgement.measures if not measure.of}


def test_five_classes_as_hpd_counts_them(finished, tmp_path):
    values = {"a": ("Acme", 42.0), "b": ("Zeta", None), "c": (None, 7.0)}
    run = finished(
        "run", SHOES, {id: rows(v[0], 0.9, v[1], 0.9) for id, v in values.items()}, input=TITLES
    )
    # Of which the judge says another class of c's size.
    targets = {"a": ("acme", 43), "b": (None, 7), "c": (None, 8)}
    labels = [
        json.dumps({"id": id, "target": {"Brand": t[0], "Size": t[1]}}) for id, t in targets.items()
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(labels))

    def reply(body, _):
        said = SAID[body["messages"][0]["content"].partition("title ")[2][0]].split(", ")
        return completion(json.dumps(dict(zip(("Brand", "Size"), said, strict=True))))

    with server(reply) as (url, received):
        made = [
            judge(run, str(tmp_path / "labels.jsonl"), str(tmp_path / "judge"), None, keys(url))
            for _ in range(2)
        ]
    assert len(received) == 3  # the second time all is there
    asked = "".join(body["messages"][0]["content"] for *_, body in received)
    assert (
        'title b\n\n[values that were extracted]\nBrand: "Zeta"\nSize: null\n</document>' in asked
    )
    assert '- "Size": one of correct, incorrect, missing, correct null, hallucination' in asked
    assert figures(made[1]) == pytest.approx(
        {"LLM-P": 3 / 5, "LLM-R": 3 / 5, "LLM-F1": 3 / 5, "as labelled": 5 / 6}
    )
    assert made[1].verdicts == {
        "correct": 2,
        "incorrect": 1,
        "hallucination": 1,
        "missing": 1,
        "correct null": 1,
    }


def test_the_better_text_in_both_orders_and_people(texts, tmp_path):
    """The judge takes whatever stands first for d; e failed in one run."""

    def reply(body, _):
        request, a, _ = body["messages"][-1]["content"].partition("[request]")[2].split("[answer ")
        better = (
            "A" if "ask d" in request else "tie" if "alike" in a else "A" if "good" in a else "B"
        )
        return completion(json.dumps({"better": better}))

    (ours, theirs), output, file = texts, str(tmp_path / "judge"), tmp_path / "blind.csv"
    with server(reply) as (url, received):
        made = judge(ours, theirs, output, None, keys(url))
        with pytest.raises(ConfigError, match="holds questions about other answers"):
            judge(theirs, ours, output, None, keys(url))
    assert len(received) == 7  # both orders of what is alike are one question
    assert figures(made) == pytest.approx(
        {"win rate": 0.5, "(W+T)/(T+L)": 1.0, "in both orders": 0.75}
    )
    assert "3 pairs" in export(ours, theirs, str(file))
    head, *lines = csv.reader(file.open(encoding="utf-8-sig"))
    assert {line[3].split()[0] for line in lines} == {"good", "bad"}  # now one, now the other
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(
            [head, *([*cells, 1 if "good" in cells[3] else 2] for *cells, _ in lines)]
        )
    wanted = {"win rate": 2 / 3, "(W+T)/(T+L)": 2.0, "as the judge": 2 / 3}
    assert figures(apply(str(file), output)) == pytest.approx(wanted)
    row = {"instruction": "Do", "input": None, "response1": "x", "response2": "y"}
    (x, y), said = pairs_of(row | {f"annotator{i}": i for i in (1, 2, 3)}, "1")
    assert (x.request, x.answer, y.request, y.answer, said) == ("Do", "x", "Do", "y", [1, -1, 0])
    lines = agreement({key: [1, 0, 1] for key in "1234"}, {"1": 1, "2": 0, "3": -1}).splitlines()
    assert lines[1:] == [
        "agreement, all: 33.3% of 3",
        "agreement, without ties: 50.0% of 2",
        "two people: 33.3%",
    ]


def test_a_score_for_every_text(texts, tmp_path):
    with server(lambda *_: completion('{"score": 7}')) as (url, _):
        made = judge(texts[0], None, str(tmp_path / "judge"), None, keys(url), limit=4)
    assert [(m.name, m.value, m.documents) for m in made.measures if not m.of] == [
        ("score of 10", 7.0, 4)
    ]


def test_values_and_labels(finished, tmp_path):
    scripts = (
        {id: rows(v[0], 0.9, v[1], 0.9) if v else "?" for id, v in of.items()}
        for of in (OURS, THEIRS)
    )
    ours, theirs = (
        finished(name, SHOES, next(scripts), input=TITLES) for name in ("ours", "theirs")
    )
    lines = [json.dumps({"id": id, "target": {"Brand": "Zeta", "Size": 7654.5}}) for id in "bc"]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    made = compare(ours, theirs, str(tmp_path / "labels.jsonl"))
    of_c = [["Brand", NONE, "Zeta", "Zeta"], ["Size", "7.0", "8.0", "7654.5"]]
    found = {document.id: document.rows for document in made.documents}
    assert found == {"b": [["Brand", "Zeta", "Beta", "Zeta"]], "c": of_c}
    assert (made.agreement.agree, made.agreement.of) == (3, 6)
    assert {row[0]: row[1:3] for row in made.rows}["values right"] == ["0.250", "0.250"]
    assert (
        f"2 documents answered differently, 1 by {ours} alone, 1 by {theirs} alone"
        in made.describe()
    )


def test_the_page_of_texts(texts, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_runs", *texts])
    main()
    assert "same answers: 25.0%" in capsys.readouterr().out
    assert "ask d" in Path(texts[0], PAGE).read_text()


def test_every_command_is_one_and_every_need_a_step(tmp_path, monkeypatch):
    registry, asked = parse((ROOT / "benchmarks" / "tables.yaml").read_text()), []
    monkeypatch.chdir(ROOT)

    def keep(words):
        asked.append(words[3 + words[2].endswith("judge") :])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(tables.subprocess, "run", keep)
    maker = tables.Maker(Path("/data"), tmp_path, None)
    monkeypatch.setattr(maker, "file", lambda name: Path("/data") / name)
    for name, table in registry["tables"].items():
        for step in table.get("needs", []):
            maker.make(step, registry["steps"][step])
        for key, run in table.get("runs", {}).items():
            maker.make(f"{name}/{tables._file(key)}", run["run"])
    outputs = [
        load_config(file, keys).output.path for _, file, *keys in asked if file.endswith("yaml")
    ]
    assert {output.startswith(str(tmp_path)) for output in outputs} == {True}


def test_a_section_and_its_page(texts, tmp_path):
    columns, runs = (
        ["same answers", "ROUGE-L", "win rate"],
        {name: {"paper": "1", "run": "-"} for name in "ab"},
    )
    table = {
        "title": "T",
        "columns": columns,
        "labels": "labels.jsonl",
        "judged": {"by": "pairs"},
        "runs": runs,
    }
    table["at_a_time"] = [2]
    (tmp_path / "labels.jsonl").write_text('{"id": "a", "reference": ["good answers", ""]}\n')
    (tmp_path / "t").mkdir()
    for name, run in zip("ab", texts, strict=True):
        (tmp_path / "t" / tables._file(f"2, {name}")).symlink_to(run)
    with server(lambda *_: completion('{"better": "A"}')) as (url, _):  # whichever stands first
        text = tables.section("t", table, tables.Maker(tmp_path, tmp_path, None, (), keys(url)), {})
    says(
        text,
        "| 1.000 (1.000 to 1.000) |  |\n| 2, b | 1 | 25.0% of 4 | 0.500 (0.500",
        "| 0.500 (0.500 to 0.500) |\n",
    )
    registry = {"tables": {"t": table, "u": {"title": "U"}}, "missing": {"V": "no GPU"}}
    page = tables.page("", registry, {"t": text})
    assert "* `u`: U" in page
    assert text in tables.page(page, registry, {"u": "## U\n"})


def test_a_table_by_category_and_one_of_data(finished, tmp_path):
    parts = {"a": (3, 60), "b": (1, 90), "c": (5, 20)}  # threads, and most cached tokens, of 100
    answers = {}
    for id, (threads, cached) in parts.items():
        ways = {"apar": {"max_cached_tokens": cached}, "flattened": {"max_cached_tokens": 100}}
        answers[id] = {**COLUMNS, "text": "x", "counters": json.dumps({"threads": threads, **ways})}
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "APAR").symlink_to(finished("apar", "generation", answers))
    kinds = {"a": "writing", "b": "coding", "c": "math"}
    write_rows(
        tmp_path / "kinds.jsonl", ({"id": id, "category": kind} for id, kind in kinds.items())
    )
    paper = dict.fromkeys(["all", "without coding, math", "coding", "math", "writing"], "p")
    categories = {"file": "kinds.jsonl", "left_out": ["coding", "math"]}
    columns, runs = ["threads", "parallel", "cached saved"], {"APAR": {"paper": paper, "run": "-"}}
    table = {"title": "T", "columns": columns, "categories": categories, "runs": runs}
    maker = tables.Maker(tmp_path, tmp_path, None)
    assert json.loads(maker.file("kinds.jsonl[1:2]").read_text())["id"] == "b"
    text = tables.section("t", table, maker, {})
    says(
        text,
        (
            "| APAR, all | p | 3.00 | 67% | 43.3% |\n| APAR, without coding, math (1) | p | 3.00 | "
            "100% | 40.0% |"
        ),
        "| APAR, coding (1) | p | 1.00 | 0% | 10.0% |",
    )
    questions = [{"question": "Who?", "answers": ["me"]}, {"question": "Why?", "answers": []}]
    write_rows(tmp_path / "q.jsonl", [{"context": "It was me.", "questions": questions}])
    table = {"title": "S", "columns": [], "sets": {"S": {"paper": "1", "file": "q.jsonl"}}}
    assert "| S | 1 | 1 | 2.00 | 4.00 | 2.00 | 1.00 |" in tables.section("s", table, maker, {})
    assert tables.intra_prompt_ratios(2, 6, 2, 4) == (
        2 * 8 / 10,
        2 * 10 / 14,
        10**2 / (8**2 + 2 * 8),
    )


def test_the_answer_nearer_to_the_reference_is_better(tmp_path) -> None:
    write_rows(
        tmp_path / "p.jsonl", [{"turns": ["Name a pet. "], "reference": ["a small brown dog"]}]
    )
    near, far = "it is a brown dog", "no idea"
    with rouge_judge.server(rouge_judge.references(tmp_path / "p.jsonl"), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for first, second, word in (
            (near, far, "first"),
            (far, near, "second"),
            (near, near, "tie"),
        ):
            question = preference._PROMPT.format(
                request="[user] Name a pet.", first=first, second=second
            )
            body, url = (
                {"messages": [{"content": question}]},
                f"http://127.0.0.1:{server.server_port}",
            )
            assert (
                requests.post(url, json=body, timeout=9).json()["choices"][0]["message"]["content"]
                == word
            )
        assert (
            requests.post(url, json={"messages": [{"content": "Who?"}]}, timeout=9).status_code
            == 400
        )
        server.shutdown()
