"""`python -m benchmarks` on a tiny model: every engine in its own process, on the same tokens."""

import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from benchmarks import answers, compare, peers
from benchmarks.compare import Result, Row, shape_of, varied
from benchmarks.config import (
    ENGINES,
    Extraction,
    Questions,
    RandomQuestions,
    RandomSlots,
    load_benchmark,
)
from benchmarks.engines import _programs, load_raypd
from benchmarks.table import chart, markdown
from benchmarks.works import Work, attended, make_work
from raypd.errors import InputError
from tests.processes import ROOT, ended, start
from tests.tiny import save_tiny, tiny_tokenizer

SLOTS = {
    "kind": "random_slots",
    "documents": 3,
    "shared": 8,
    "own": 6,
    "attributes": 2,
    "key_tokens": 2,
    "value_tokens": 3,
}
TITLES = [
    {
        "id": f"t{n}",
        "category": "shoe",
        "title": title,
        "description": "",
        "target": {"Brand": "Acme", "Size": None},
    }
    for n, title in enumerate(["Acme runner", "Acme boot 42"])
]
ASKED = [{"id": "1", "question": "Who?"}, {"id": "2", "question": "How?"}]
PAGES = [{"id": "p", "context": "A cat sat.", "questions": ASKED}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("benchmark")
    save_tiny(made / "model")
    for name, rows in (("titles", TITLES), ("pages", PAGES)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def config(folder: Path, works: dict[str, Any], **settings: Any) -> Path:
    file = folder / "benchmark.yaml"
    sizes = {
        "data": str(folder),
        "repeats": 2,
        "max_num_seqs": [2],
        "batch_sizes": [2],
        "threads": 1,
    }
    tree = {"output": str(folder / "out"), **sizes, **settings, "works": works}
    file.write_text(
        yaml.safe_dump(
            {"model": {"name": str(folder / "model"), "device": "cpu"}, "benchmark": tree}
        )
    )
    return file


def run(file: Path, *words: str) -> tuple[str, dict[str, Any]]:
    printed = ended(start("-m", "benchmarks", str(file), *words))
    found = json.loads((file.parent / "out/results.json").read_text())
    return printed, {work["name"]: work for work in found["works"]}


def rows(work: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["engine"]: row for row in work["rows"]}


def once(engine: str, work: Work, folder: Path, setting: int = 2) -> dict[str, Any]:
    """What an engine says of a work, here and not in a process of its own."""
    tree = json.loads(json.dumps({**asdict(work), "units": [0] * work.count}))
    job = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "setting": setting,
    }
    requests = tree[shape_of(engine, work)]
    if engine.startswith("raypd"):
        run, forget = load_raypd({**job, "guided": engine == "raypd-guided"}, tree)
    else:
        run, forget = peers.ENGINES[engine](job)
    first = peers.counted(run(requests), requests, True)
    forget()
    found = peers.counted(run(requests), requests, True)
    # Nothing of the first run is in a cache.
    assert {**first, "seconds": 0} == {**found, "seconds": 0}
    return found


def test_engines_do_the_same_tokens(folder: Path) -> None:
    work = make_work(RandomSlots(**SLOTS), None, tiny_tokenizer(), 4096, 100)
    ours, theirs, batched = (
        once(engine, work, folder) for engine in ("raypd", "generate", "generate_batch")
    )
    # 8 shared once, 3 x (6 own + 2 x 2 of keys), 3 x 2 values of 3 tokens, whose last is not fed
    assert (
        (ours["fed"], ours["decoded"])
        == (work.unavoidable + 3 * 2 * 2, 18)
        == (8 + 3 * 10 + 3 * 2 * 2, 18)
    )
    assert (theirs["fed"], theirs["decoded"]) == (3 * (14 + 10 - 1), 3 * 10)
    assert batched["answers"] == theirs["answers"]
    asked = RandomQuestions(
        kind="random_questions",
        shared=9,
        contexts=2,
        context_tokens=5,
        questions=3,
        question_tokens=2,
        answer_tokens=3,
    )
    work = make_work(asked, None, tiny_tokenizer(), 4096, 100)
    ours, theirs = once("raypd", work, folder), once("generate", work, folder)
    assert (ours["fed"], ours["decoded"], theirs["decoded"]) == (
        9 + 2 * (5 + 3 * 2) + 2 * 3 * 2,
        18,
        18,
    )
    assert attended([next(p) for p, _ in _programs(asdict(work), False, None)()]) == (
        work.attended,
        work.keys - 1.5,
    )


def test_labels_are_decoded_as_they_stand(folder: Path) -> None:
    config = Extraction(kind="extraction", data="titles.jsonl", answers="labels")
    work = make_work(config, str(folder), tiny_tokenizer(), 4096, 100)
    ours, theirs = once("raypd", work, folder), once("generate", work, folder)
    assert ours["decoded"] == work.decoded == 2 * (len(' "Acme"') + len(" null"))
    assert ours["fed"] == work.unavoidable + work.decoded - work.values
    assert theirs["decoded"] == ours["decoded"] + 2 * len('{\n"Brand":,\n"Size":}')


def test_own_answers_are_held_against_raypds(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    questions = Questions(kind="questions", data="pages.jsonl", answer_tokens=4)
    work = make_work(questions, str(folder), tokenizer, 4096, 100)
    ours, theirs = (once(engine, work, folder)["answers"] for engine in ("raypd", "generate"))
    alone = answers.read(theirs, "each", work, tokenizer)
    # The same prompts, in float32.
    assert answers.agreement(answers.read(ours, "units", work, tokenizer), alone) == 1.0
    config = Extraction(kind="extraction", data="titles.jsonl", value_tokens=8)
    work = make_work(config, str(folder), tokenizer, 4096, 100)
    for engine in ("raypd", "raypd-guided"):
        (one, other) = once(engine, work, folder)["answers"]
        assert set(one) == set(other) == {"Brand", "Size"}


@pytest.mark.slow
def test_what_cannot_run_says_why_and_the_others_go_on(folder: Path) -> None:
    works = {
        "slots": SLOTS,
        "gone": {"kind": "extraction", "data": "nowhere.jsonl"},
        "many": {**SLOTS, "documents": 10_001},
    }
    keys = f"benchmark.vllm_python={sys.executable}", "benchmark.max_num_seqs=[1,2]"
    printed, found = run(config(folder, works), *keys)
    slots = rows(found["slots"])
    assert set(slots) == set(ENGINES) - {"raypd-guided"}  # it has nothing to guide there
    for engine in ("raypd", "generate", "generate_batch"):
        row = slots[engine]
        assert (len(row["seconds"]), row["error"]) == (2, None)
        # the fastest of several settings; one alone is not run to choose it
        several = engine == "generate_batch"
        assert set(row["tried"]) == ({"1", "2"} if several else set())
        alone = {"raypd": "auto", "generate": "2"}.get(engine)
        assert str(row["setting"]) == (
            min(row["tried"], key=row["tried"].get) if several else alone
        )
    if importlib.util.find_spec("vllm") is None:
        assert "vllm is not installed" in slots["vllm-whole"]["error"]
        assert "vllm-whole: vllm is not installed" in printed
    assert found["slots"]["floor"] > 0
    assert "nowhere.jsonl: cannot be read (No such file" in found["gone"]["skipped"]
    assert "benchmark.most_documents (10,000)" in found["many"]["skipped"]
    assert f"| raypd | {slots['raypd']['setting']} |" in (folder / "out/table.md").read_text()
    assert ElementTree.parse(folder / "out/slots.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("peer", ["vllm", "openvino"])
def test_a_peer_does_the_same(folder: Path, peer: str) -> None:
    variable, package = f"RAYPD_{peer.upper()}_PYTHON", peers.PACKAGES[peer]
    python = os.environ.get(variable) or (importlib.util.find_spec(package) and "null")
    if not python:
        pytest.skip(f"needs {package}: {variable}=/its/environment/bin/python (docs/benchmark.md)")
    save_tiny(folder / "wide", head_dim=64)  # vLLM has no attention for heads of 16
    engines = f"benchmark.engines=[raypd,raypd-guided,{peer}-whole,{peer}-each]"
    works = {
        "slots": SLOTS,
        "titles": {"kind": "extraction", "data": "titles.jsonl", "value_tokens": 4},
    }
    model = f"model.name={folder / 'wide'}"
    _, found = run(
        config(folder, works, repeats=1), engines, model, f"benchmark.{peer}_python={python}"
    )
    slots, titles = rows(found["slots"]), rows(found["titles"])
    assert [titles[name]["error"] for name in titles] == [None] * 4
    assert titles[f"{peer}-each"]["agrees_with"] == "raypd-guided"
    assert [slots[name]["error"] for name in slots] == [None] * 3
    assert [slots[name]["decoded"] for name in slots] == [18, 30, 18]


def test_forms_are_tried_at_the_best_number_and_the_fastest_stays(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    seconds = {(1, 32, "0"): 9.0, (2, 32, "0"): 7.0, (2, 32, "1"): 8.0, (2, 16, "0"): 5.0}

    def started(command: list[str], environment: dict[str, str], log: Path) -> Mock:
        job = json.loads(Path(command[-1]).read_text())
        form = (
            job["setting"],
            job["arguments"]["block_size"],
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"],
        )
        done = {"seconds": seconds[form]} if form in seconds else compare._Failed("no such pages")
        return Mock(
            form=form, **{"answer.return_value": {"versions": {}}, "ask.side_effect": [done]}
        )

    monkeypatch.setattr(compare, "_Process", started)
    forms = {"VLLM_ENABLE_V1_MULTIPROCESSING": [0, 1], "block_size": [32, 16, 128]}
    given, said = (
        load_benchmark(config(folder, {"slots": SLOTS}, vllm_forms=forms, max_num_seqs=[1, 2])),
        list[str](),
    )
    row, work = Row("vllm-each"), make_work(RandomSlots(**SLOTS), None, tiny_tokenizer(), 4096, 100)
    kept: Any = compare.Comparison(given, tmp_path, said.append)._tuned(
        row, work, tmp_path / "work.json", None
    )
    assert (kept.form, kept.close.called) == ((2, 16, "0"), False)
    assert (row.setting, row.form["block_size"], [*row.tried.values()]) == (
        2,
        16,
        [9.0, 7.0, 8.0, 5.0],
    )
    assert "  vllm-each, 2, block_size: 128 at a time: no such pages" in said


def test_the_shipped_configurations_load_in_both_shapes_and_a_work_that_does_not_fit_is_said():
    for name in ("workloads", "growth"):
        made = load_benchmark(ROOT / f"benchmarks/{name}.yaml")
        assert all(varied(key, work) for key, work in made.benchmark.works.items())
    assert set(load_benchmark(ROOT / "benchmarks/workloads.yaml").benchmark.works) == {
        f"W{n}" for n in range(1, 7)
    }
    work = make_work(RandomSlots(**{**SLOTS, "stack": 2}), None, tiny_tokenizer(), 100, 100)
    assert [len(prompt["ends"]) for prompt in work.raypd["prompts"]] == [4, 2]
    assert [one["max_tokens"] for one in work.whole] == [4 * 5, 2 * 5]
    first, slotted = work.each[0]["tokens"], work.raypd["prompts"][0]["tokens"]
    assert (slotted[: len(first)], work.each[3]["tokens"][:-2]) == (first, work.whole[0]["tokens"])
    with pytest.raises(InputError, match="the model's context is 20"):
        make_work(RandomSlots(**SLOTS), None, tiny_tokenizer(), 20, 100)


def test_ratios_are_those_of_each_repeat(tmp_path: Path) -> None:
    ours, theirs = (
        Row("raypd", 24, [1.0, 2.0, 4.0], fed=5),
        Row("vllm-whole", 64, [2.0, 4.0, 7.0], fed=7),
    )
    broken = Row("generate", error="MemoryError")
    result = Result(
        "W1", "W1", None, "documents", 8, floor=0.5, flops=4e11, rows=[ours, theirs, broken]
    )
    text = markdown(result)
    assert "| raypd | 24 | 4 [2-8] | 1.00 | 25% | 5 | 0 |" in text
    assert "| vllm-whole | 64 | 2 [1.14-4] | 0.50 | 12% | 7 |" in text
    assert "generate: MemoryError" in text
    assert chart([result], tmp_path / "W1.svg")


def test_answers_of_all_shapes_are_read_alike(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    work = make_work(
        Extraction(kind="extraction", data="titles.jsonl"), str(folder), tokenizer, 4096, 100
    )
    ours = answers.read(
        [{"Brand": "Acme", "Size": None}, {"Brand": "X", "Size": "42"}], "units", work, tokenizer
    )
    whole = ['{"Brand": "Acme", "Size": null}', '{"Brand": "X"']
    theirs = answers.read([tokenizer.encode(text) for text in whole], "whole", work, tokenizer)
    values = [' "Acme"', " null", ' "X"', ' "42"']
    each = answers.read([tokenizer.encode(text) for text in values], "each", work, tokenizer)
    assert (answers.agreement(ours, theirs), answers.agreement(ours, each)) == (0.5, 1.0)


def test_whole_answers_in_the_layout_that_raypd_trains(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = Extraction(kind="extraction", data="titles.jsonl", layout="lines")
    work = make_work(config, str(folder), tokenizer, 4096, 100)
    schema = make_work(
        config.model_copy(update={"layout": "schema"}), str(folder), tokenizer, 4096, 100
    )
    written = ['"Brand": "Acme",\n"Size": null\n}', '"Brand": "X",\n"Size": "42"\n}']
    for one, other, text in zip(work.whole, schema.whole, written, strict=True):
        assert one["tokens"] == other["tokens"] + tokenizer.encode("{\n", add_special_tokens=False)
        assert re.fullmatch(one["regex"], text)
        assert "json" not in one
    found = answers.read([tokenizer.encode(text) for text in written], "whole", work, tokenizer)
    assert found == ["Acme", None, "X", "42"]
