"""A judge behind a server that answers by script, people as judges, and the papers' tables."""

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
from raypd.text import NONE
from raypd.training import preference
from tests.models.test_endpoint import completion, server
from tests.processes import ROOT
from tests.runs import FAKE, TITLES, run_config, says, write_rows
from tests.tasks.test_cascade import SHOES, rows, scripted

# The judge's verdicts on (Brand, Size) of each document.
VERDICTS = {
    "a": ("correct", "incorrect"),
    "b": ("hallucination", "missing"),
    "c": ("correct null", "correct"),
}
# The texts of both runs; None if it failed.
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
OURS = {
    "a": ("Acme", 42.0),
    "b": ("Zeta", None),
    "c": (None, 7.0),
    "d": ("Acme", 1.0),
    "e": None,
}
THEIRS = {
    "a": ("acme", 42.0),
    "b": ("Beta", None),
    "c": ("Zeta", 8.0),
    "d": None,
    "e": ("Acme", 1.0),
}


@pytest.fixture
def finished(tmp_path, in_process, monkeypatch):
    """Makes a run of scripted answers, and returns its folder.

    finished(name, task, {id: the columns of a row, or the reason of an error})
    """
    run_extract = driver.run_extract
    monkeypatch.setattr(driver, "run_extract", partial(run_extract, build=build))  # the judge's run

    def finish(name, task, answers, **keys):
        documents = []
        for id in answers:
            category = "c1" if id < "c" else "c0"
            row = {"id": id, "title": f"title {id}", "prompt": f"ask {id}", "category": category}
            documents.append(row)
        corpus = write_rows(tmp_path / "in.jsonl", documents)
        config = run_config(task, corpus, tmp_path / name, model=FAKE, **keys)
        run_extract(config, build=scripted(answers))
        return config.output.path

    return finish


@pytest.fixture
def texts(finished):
    """(the folder of a run, the folder of another) over the same prompts."""
    answers = {None: "failed"}
    for text in ("good", "bad", "alike"):
        answers[text] = {**COLUMNS, "text": f"{text} answer"}
    ours = {id: answers[text] for id, (text, _) in TEXTS.items()}
    theirs = {id: answers[text] for id, (_, text) in TEXTS.items()}
    return finished("ours", "generation", ours), finished("theirs", "generation", theirs)


def values_of(script):
    """The rows of answers (Brand, Size) with a confidence of 0.9; None is an error."""
    answers = {}
    for id, values in script.items():
        answers[id] = "?" if values is None else rows(values[0], 0.9, values[1], 0.9)
    return answers


def keys(url):
    return ["model.name=gpt", f"model.endpoint={{url: {url}, key_variable: null, retries: 0}}"]


def figures(judgement):
    return {measure.name: measure.value for measure in judgement.measures if not measure.of}


def test_values_are_put_into_hpds_five_classes(finished, tmp_path):
    script = {
        "a": ("Acme", 42.0),
        "b": ("Zeta", None),
        "c": (None, 7.0),
    }
    run = finished("run", SHOES, values_of(script), input=TITLES)
    # The judge disagrees with the label of c's size.
    labels = [
        {"id": "a", "target": {"Brand": "acme", "Size": 43}},
        {"id": "b", "target": {"Brand": None, "Size": 7}},
        {"id": "c", "target": {"Brand": None, "Size": 8}},
    ]
    labels_file = str(write_rows(tmp_path / "labels.jsonl", labels))

    def reply(body, _):
        id = body["messages"][0]["content"].partition("title ")[2][0]
        brand, size = VERDICTS[id]
        return completion(json.dumps({"Brand": brand, "Size": size}))

    output = str(tmp_path / "judge")
    with server(reply) as (url, received):
        judge(run, labels_file, output, None, keys(url))
        judgement = judge(run, labels_file, output, None, keys(url))
    assert len(received) == 3  # the second call asks nothing
    prompts = "".join(body["messages"][0]["content"] for *_, body in received)
    says(
        prompts,
        'title b\n\n[values that were extracted]\nBrand: "Zeta"\nSize: null\n</document>',
        '- "Size": one of correct, incorrect, missing, correct null, hallucination',
    )
    expected = {
        "LLM-P": 3 / 5,
        "LLM-R": 3 / 5,
        "LLM-F1": 3 / 5,
        "as labelled": 5 / 6,
    }
    assert figures(judgement) == pytest.approx(expected)
    assert judgement.verdicts == {
        "correct": 2,
        "incorrect": 1,
        "hallucination": 1,
        "missing": 1,
        "correct null": 1,
    }


def compare_texts(body, _):
    """Answer a judge's question: the good text is better, but of d always the first."""
    request, a, _ = body["messages"][-1]["content"].partition("[request]")[2].split("[answer ")
    if "ask d" in request:
        better = "A"
    elif "alike" in a:
        better = "tie"
    else:
        better = "A" if "good" in a else "B"
    return completion(json.dumps({"better": better}))


@pytest.fixture
def judged(texts, tmp_path):
    """(what a judge says of both runs, the folder of its run, the requests that it received)."""
    output = str(tmp_path / "judge")
    with server(compare_texts) as (url, received):
        judgement = judge(*texts, output, None, keys(url))
    return judgement, output, received


def test_a_text_is_better_if_both_orders_say_so(judged):
    judgement, _, received = judged
    assert len(received) == 7  # texts that are alike are one question in both orders
    expected = {"win rate": 0.5, "(W+T)/(T+L)": 1.0, "in both orders": 0.75}
    assert figures(judgement) == pytest.approx(expected)


def test_a_judge_s_run_answers_one_comparison_only(texts, judged):
    ours, theirs = texts
    _, output, _ = judged
    with pytest.raises(ConfigError, match="holds questions about other answers"):
        judge(theirs, ours, output, None, keys("http://h"))


def test_people_judge_blindly_and_are_compared_with_a_judge(texts, judged, tmp_path):
    _, output, _ = judged
    file = tmp_path / "blind.csv"
    assert "3 pairs" in export(*texts, str(file))
    with file.open(encoding="utf-8-sig") as lines:
        head, *pairs = csv.reader(lines)
    first_answers = {pair[3].split()[0] for pair in pairs}
    assert first_answers == {"good", "bad"}  # neither run is always the first
    for pair in pairs:
        pair[-1] = "1" if "good" in pair[3] else "2"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([head, *pairs])
    expected = {"win rate": 2 / 3, "(W+T)/(T+L)": 2.0, "as the judge": 2 / 3}
    assert figures(apply(str(file), output)) == pytest.approx(expected)


def test_published_votes_are_read_as_points():
    row = {"instruction": "Do", "input": None, "response1": "x", "response2": "y"}
    votes = {"annotator1": 1, "annotator2": 2, "annotator3": 3}
    (first, second), points = pairs_of({**row, **votes}, "1")
    assert first.request == "Do"
    assert first.answer == "x"
    assert second.request == "Do"
    assert second.answer == "y"
    assert points == [1, -1, 0]


def test_agreement_is_counted_with_and_without_ties():
    votes = {key: [1, 0, 1] for key in "1234"}
    lines = agreement(
        votes,
        {
            "1": 1,
            "2": 0,
            "3": -1,
        },
    ).splitlines()
    assert lines[1:] == [
        "agreement, all: 33.3% of 3",
        "agreement, without ties: 50.0% of 2",
        "two people: 33.3%",
    ]


def test_every_text_of_one_run_gets_a_score(texts, tmp_path):
    with server(lambda *_: completion('{"score": 7}')) as (url, _):
        judgement = judge(texts[0], None, str(tmp_path / "judge"), None, keys(url), limit=4)
    (measure,) = [measure for measure in judgement.measures if not measure.of]
    assert measure.name == "score of 10"
    assert measure.value == 7.0
    assert measure.documents == 4


def test_two_runs_are_compared_value_by_value(finished, tmp_path):
    ours = finished("ours", SHOES, values_of(OURS), input=TITLES)
    theirs = finished("theirs", SHOES, values_of(THEIRS), input=TITLES)
    labels = [{"id": id, "target": {"Brand": "Zeta", "Size": 7654.5}} for id in "bc"]
    write_rows(tmp_path / "labels.jsonl", labels)
    comparison = compare(ours, theirs, str(tmp_path / "labels.jsonl"))
    assert {document.id: document.rows for document in comparison.documents} == {
        "b": [["Brand", "Zeta", "Beta", "Zeta"]],
        "c": [["Brand", NONE, "Zeta", "Zeta"], ["Size", "7.0", "8.0", "7654.5"]],
    }
    assert comparison.agreement.agree == 3
    assert comparison.agreement.of == 6
    rows_by_name = {row[0]: row[1:3] for row in comparison.rows}
    assert rows_by_name["values right"] == ["0.250", "0.250"]
    note = f"2 documents answered differently, 1 by {ours} alone, 1 by {theirs} alone"
    assert note in comparison.describe()


def test_the_page_of_a_comparison_shows_the_texts(texts, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare_runs", *texts])
    main()
    assert "same answers: 25.0%" in capsys.readouterr().out
    assert "ask d" in Path(texts[0], PAGE).read_text()


def test_every_configuration_of_a_table_loads(tmp_path, monkeypatch):
    registry = parse((ROOT / "benchmarks" / "tables.yaml").read_text())
    commands = []

    def keep(words):
        commands.append(words)
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tables.subprocess, "run", keep)
    maker = tables.Maker(Path("/data"), tmp_path, None)
    monkeypatch.setattr(maker, "file", lambda name: Path("/data") / name)
    for name, table in registry["tables"].items():
        for step in table.get("needs", []):
            maker.make(step, registry["steps"][step])
        for key, run in table.get("runs", {}).items():
            maker.make(f"{name}/{tables._file(key)}", run["run"])
    configured = 0
    for _, _, module, *words in commands:
        # `python -m raypd extract FILE ...`, but `python -m benchmarks.rouge_judge PROMPTS train
        # FILE ...`
        file, *keys = words[2:] if module.endswith("judge") else words[1:]
        if file.endswith("yaml"):
            configured += 1
            assert load_config(file, keys).output.path.startswith(str(tmp_path))
    assert configured


def test_a_section_has_the_figures_of_its_runs(texts, tmp_path):
    table = {
        "title": "T",
        "columns": ["same answers", "ROUGE-L", "win rate"],
        "labels": "labels.jsonl",
        "judged": {"by": "pairs"},
        "runs": {name: {"paper": "1", "run": "-"} for name in "ab"},
        "at_a_time": [2],
    }
    (tmp_path / "labels.jsonl").write_text('{"id": "a", "reference": ["good answers", ""]}\n')
    (tmp_path / "t").mkdir()
    for name, run in zip("ab", texts, strict=True):
        (tmp_path / "t" / tables._file(f"2, {name}")).symlink_to(run)
    # This judge always takes the first answer.
    with server(lambda *_: completion('{"better": "A"}')) as (url, _):
        maker = tables.Maker(tmp_path, tmp_path, None, (), keys(url))
        text = tables.section("t", table, maker, {})
    says(
        text,
        "| 1.000 (1.000 to 1.000) |  |\n| 2, b | 1 | 25.0% of 4 | 0.500 (0.500",
        "| 0.500 (0.500 to 0.500) |\n",
    )


def test_the_page_keeps_the_sections_that_it_has():
    registry = {"tables": {"t": {"title": "T"}, "u": {"title": "U"}}, "missing": {"V": "no GPU"}}
    page = tables.page("", registry, {"t": "## T\n"})
    assert "`u`: U" in page
    assert "## T\n" in tables.page(page, registry, {"u": "## U\n"})


def test_the_page_keeps_what_people_have_written_around_the_tables():
    registry = {"tables": {"t": {"title": "T"}}, "missing": {"V": "no GPU"}}
    page = (
        "# Tables\n\nRead this.\n\n" + tables.page("", registry, {"t": "## T\n"}) + "\n## Later\n"
    )
    assert tables.page(page, registry, {}) == page
    changed = tables.page(page, registry, {"t": "## T, again\n"})
    assert changed == page.replace("## T\n", "## T, again\n")


def test_a_table_may_have_rows_by_category(finished, tmp_path):
    threads = {"a": 3, "b": 1, "c": 5}
    cached = {"a": 60, "b": 90, "c": 20}  # tokens, of 100 without threads
    answers = {}
    for id in "abc":
        counters = {
            "threads": threads[id],
            "apar": {"max_cached_tokens": cached[id]},
            "flattened": {"max_cached_tokens": 100},
        }
        answers[id] = {
            **COLUMNS,
            "text": "x",
            "counters": json.dumps(counters),
        }
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "APAR").symlink_to(finished("apar", "generation", answers))
    categories = {"a": "writing", "b": "coding", "c": "math"}
    rows_by_id = [{"id": id, "category": category} for id, category in categories.items()]
    write_rows(tmp_path / "kinds.jsonl", rows_by_id)
    groups = ["all", "without coding, math", "coding", "math", "writing"]
    table = {
        "title": "T",
        "columns": ["threads", "parallel", "cached saved"],
        "categories": {"file": "kinds.jsonl", "left_out": ["coding", "math"]},
        "runs": {"APAR": {"paper": dict.fromkeys(groups, "p"), "run": "-"}},
    }
    says(
        tables.section("t", table, tables.Maker(tmp_path, tmp_path, None), {}),
        "| APAR, all | p | 3.00 | 67% | 43.3% |\n",
        "| APAR, without coding, math (1) | p | 3.00 | 100% | 40.0% |",
        "| APAR, coding (1) | p | 1.00 | 0% | 10.0% |",
    )


def test_a_table_may_describe_data(tmp_path):
    questions = [{"question": "Who?", "answers": ["me"]}, {"question": "Why?", "answers": []}]
    write_rows(tmp_path / "q.jsonl", [{"context": "It was me.", "questions": questions}])
    table = {
        "title": "S",
        "columns": [],
        "sets": {"S": {"paper": "1", "file": "q.jsonl"}},
    }
    section = tables.section("s", table, tables.Maker(tmp_path, tmp_path, None), {})
    assert "| S | 1 | 1 | 2.00 | 4.00 | 2.00 | 1.00 |" in section


def test_a_part_of_a_file_is_named_by_its_lines(tmp_path):
    write_rows(
        tmp_path / "kinds.jsonl",
        [
            {"id": "a"},
            {"id": "b"},
            {"id": "c"},
        ],
    )
    part = tables.Maker(tmp_path, tmp_path, None).file("kinds.jsonl[1:2]")
    assert json.loads(part.read_text()) == {"id": "b"}


def test_the_ratios_of_ippd_follow_its_appendix():
    prefill, decode, products = tables.intra_prompt_ratios(2, 6, 2, 4)
    assert prefill == 2 * 8 / 10
    assert decode == 2 * 10 / 14
    assert products == 10**2 / (8**2 + 2 * 8)


NEAR = "it is a brown dog"
FAR = "no idea"


@pytest.fixture
def rouge_url(tmp_path):
    """The URL of a judge by ROUGE-L that knows one prompt."""
    prompts = [{"turns": ["Name a pet. "], "reference": ["a small brown dog"]}]
    write_rows(tmp_path / "p.jsonl", prompts)
    with rouge_judge.server(rouge_judge.references(tmp_path / "p.jsonl"), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask_rouge(url, question):
    return requests.post(
        url,
        json={"messages": [{"content": question}]},
        timeout=9,
    )


@pytest.mark.parametrize(
    ("first", "second", "word"), [(NEAR, FAR, "first"), (FAR, NEAR, "second"), (NEAR, NEAR, "tie")]
)
def test_the_answer_closer_to_the_reference_is_better(rouge_url, first, second, word):
    request = "[user] Name a pet."
    question = preference._PROMPT.format(
        request=request,
        first=first,
        second=second,
    )
    choice = ask_rouge(rouge_url, question).json()["choices"][0]
    assert choice["message"]["content"] == word


def test_a_question_of_no_preference_round_is_refused(rouge_url):
    assert ask_rouge(rouge_url, "Who?").status_code == 400
