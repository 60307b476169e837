"""Questions as people have them: the same for every context, or one a row of a flat table."""

import json
from pathlib import Path

import pytest

from raypd.answering.components import build
from raypd.cli.run import config_over, read_questions
from raypd.cluster import driver
from raypd.config import QuestionAnsweringConfig
from raypd.dataset import unit_rows
from raypd.errors import ConfigError
from raypd.tasks.documents import questions_of
from tests.runs import write_rows

FAKE = ["model.name=fake", "model.fake.load_seconds=0"]


def answers(source: str, **options) -> list[dict]:
    """The rows of a run over a file, answered by the fake model."""
    config = config_over(
        source, "question_answering", FAKE, method=None, model=None, output="out", **options
    )
    driver.run_extract(config, build=build)
    return list(unit_rows.rows_of(config.output.path))


def test_a_file_of_questions_is_asked_of_every_context(tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", [{"id": n, "context": f"Room {n}"} for n in range(3)])
    Path("questions.txt").write_text("Which room?\n\nHow many beds?\n")
    rows = answers("in.jsonl", questions="questions.txt")
    asked = [(row["id"], row["question"]) for row in rows]
    assert asked == [
        (str(n), question) for n in range(3) for question in ("Which room?", "How many beds?")
    ]
    assert {row["status"] for row in rows} == {"ok"}


def test_a_flat_csv_has_a_question_and_its_choices_in_each_row(tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["1,Room 1,Which?,a; b", "2,Room 1,Which?,c; d", "3,Room 2,Where?,"]
    Path("flat.csv").write_text("\n".join(["id,context,question,choices", *lines, ""]))
    rows = answers("flat.csv")
    assert [row["question"] for row in rows] == ["Which?", "Which?", "Where?"]
    assert {row["status"] for row in rows} == {"ok"}


TASK = QuestionAnsweringConfig(questions_column="question")


@pytest.mark.parametrize("cell", ["a; b", "a | b", "a\nb", '["a", "b"]', ["a", "b"]])
def test_choices_of_a_row_are_read_as_people_write_them(cell):
    row = {"question": "Which?", "choices": cell, "multi_select": "yes", "question_id": "q7"}
    assert questions_of(row, TASK) == [
        {
            "question": "Which?",
            "choices": ["a", "b"],
            "multi_select": True,
            "id": "q7",
        }
    ]


def test_a_row_without_a_question_is_named():
    with pytest.raises(ValueError, match="'question' holds neither a list of questions"):
        questions_of({"question": None}, TASK)


@pytest.mark.parametrize(
    ("name", "text", "questions"),
    [
        ("q.txt", "One?\n\nTwo?\n", ["One?", "Two?"]),
        ("q.json", json.dumps(["One?", {"question": "Two?", "choices": ["a"]}]), None),
        (
            "q.csv",
            "question,choices\nOne?,\nTwo?,a; b\n",
            [{"question": "One?"}, {"question": "Two?", "choices": ["a", "b"]}],
        ),
    ],
)
def test_files_of_questions_are_read(name, text, questions, tmp_path):
    (tmp_path / name).write_text(text)
    expected = questions or ["One?", {"question": "Two?", "choices": ["a"]}]
    assert read_questions(str(tmp_path / name)) == expected


def test_a_file_without_questions_is_refused(tmp_path):
    (tmp_path / "q.txt").write_text("\n")
    with pytest.raises(ConfigError, match="contains no questions"):
        read_questions(str(tmp_path / "q.txt"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(str(tmp_path / "none.txt"))
