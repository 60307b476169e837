"""A new kind of task is a class in tasks/ and a section in config/tasks.py, and no other file knows
of it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import raypd
from raypd.tasks.columns import OWN, SHAPES, RowValue, row_values, shape_of

ROOT = Path(raypd.__file__).parent
SECTION = '''
class ToyConfig(TaskSection):
    """The document in capital letters."""

    methods = ("autoregressive",)
    kind: Literal["toy"] = "toy"
    mark: str = "!"


TaskConfig = Annotated[
    ToyConfig |'''
TASK = '''
"""What a document is called, shouted."""

from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.text import Prompt
from raypd.tasks.base import Record, Request, seed_of
from raypd.tasks.documents import text_of
from raypd.tasks.prompting import encode, end_of_turn


class ToyTask:
    def __init__(self, config, tokenizer, context_length, model=None):
        self.config, self.tokenizer = config, tokenizer

    def plan(self, documents):
        for document in documents:
            prompt = text_of(document, self.config.text_columns()) + self.config.task.mark
            tokens = encode(self.tokenizer, prompt.upper(), special=False)
            length, end = self.config.decoding.max_new_tokens, end_of_turn(self.tokenizer)
            program = autoregressive(Prompt(tokens), length, lambda answer: answer[-1] == end)
            finish = lambda answer, document=document, prompt=prompt: [  # noqa: E731
                Record(document.index, {"prompt": prompt, "shout": self.tokenizer.decode(answer.tokens)})
            ]
            yield Request([document.index], program, finish, seed_of(0, [document.id]))
'''  # noqa: E501
EDITS = {
    "config/tasks.py": ("\nTaskConfig = Annotated[\n   ", SECTION),
    "tasks/build.py": ("\nTASKS = {", '\nTASKS = {\n    "toy": "raypd.tasks.toy:ToyTask",'),
    "tasks/columns.py": (
        "\nSHAPES = {",
        '\nTOY = pa.schema([("prompt", pa.string()), ("shout", pa.string())])'
        '\nSHAPES = {\n    "toy": RowShape(TOY, "shout", '
        'name="prompt"),',
    ),
}
SCRIPT = """
import json, runpy, sys
runpy.run_module("tests.decoding.toy_method", run_name="__main__")
from raypd.answering.components import WorkerComponents, build
from raypd.config.load import load_config
from raypd.dataset import writer
from raypd.decoding.engine import Engine
from raypd.decoding.sampling import Sampling
from raypd.tasks import build_task
from raypd.tasks.columns import row_values
from tests.runs import run_here, with_keys
from tests.tiny import tiny_model, tiny_tokenizer

def real(config, threads):
    return WorkerComponents(Engine(tiny_model("llama")), build_task(config, tiny_tokenizer(), 512), Sampling(), 4)

for make in (build, real):
    config = with_keys(load_config("toy.yaml", []), output={"path": f"out-{make.__name__}"})
    for unit in run_here(config, make):
        for row in writer.read_rows(config.output.path, unit.id, 9):
            print(json.dumps([row["id"], *([v.name, v.value, v.status] for v in row_values(row))]))
"""  # noqa: E501


def test_a_toy_task_touches_tasks_and_its_section_alone_and_a_toy_method_is_a_file_and_an_entry(
    tmp_path: Path,
) -> None:
    package = tmp_path / "raypd"
    shutil.copytree(ROOT, package)
    (package / "tasks" / "toy.py").write_text(TASK)
    for name, (before, after) in EDITS.items():
        text = (package / name).read_text()
        assert text.count(before) == 1, (name, before)
        (package / name).write_text(text.replace(before, after))
    (tmp_path / "in.jsonl").write_text('{"id": "a", "title": "tea"}\n{"id": "b", "title": "oak"}\n')
    tree = {
        "input": {"path": "in.jsonl", "text_columns": ["title"]},
        "output": {"path": "out"},
        "task": {"kind": "toy", "mark": "?"},
        "decoding": {"max_new_tokens": 5},
        "model": {"name": "fake", "fake": {"load_seconds": 0}},
    }
    (tmp_path / "toy.yaml").write_text(json.dumps(tree))
    (tmp_path / "toy.py").write_text(SCRIPT)
    path = os.pathsep.join([str(tmp_path), str(ROOT.parent)])
    done = subprocess.run(
        [sys.executable, "-P", "toy.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    method, *lines = done.stdout.splitlines()
    row = json.loads(method)
    counters = {"prompt_tokens": 19, "repeated": 3}
    assert row["tokens"] == 6
    assert json.loads(row["counters"]) == counters
    assert row["finish_reason"] == "length"
    assert row["text"][0] == row["text"][1]
    faked, decoded = (list(map(json.loads, pair)) for pair in zip(*[iter(lines)] * 2, strict=True))
    assert faked == [["a", ["fake", "fake", "ok"]], ["b", ["fake", "fake", "ok"]]]
    assert [(id, value[0], value[2]) for id, value in decoded] == [
        ("a", "tea?", "ok"),
        ("b", "oak?", "ok"),
    ]
    assert all(value[1] for _, value in decoded)


def test_rows_are_known_by_their_columns() -> None:
    for shape in SHAPES.values():
        assert shape_of([*OWN.names, *shape.schema.names]) is shape
    typed = [
        "category",
        *(f"{name}{end}" for name in ("turn", "question", "text") for end in ("", "__status")),
    ]
    assert shape_of([*OWN.names, *typed, "truncated"]) is None
    row = {
        "status": "ok",
        "sample": 1,
        "turn": 0,
        "text": "Ice",
        "finish_reason": "length",
        "confidence": 0.5,
    }
    assert row_values(row) == [RowValue("turn 0, sample 1", "", "Ice", "truncated", 0.5)]
    assert row_values({**row, "status": "error"}) == []
    twice = {"question_id": "7", "question": "Who?", "answer": None, "answer_status": "null"}
    assert row_values(twice) == [RowValue("7", "Who?", None, "null")]
