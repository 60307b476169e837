"""`python -m benchmarks` on a tiny model: every engine in its own process, on the same tokens."""

import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
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
    WorkConfig,
    load_benchmark,
)
from benchmarks.engines import _programs, load_raypd
from benchmarks.table import chart, markdown
from benchmarks.works import Work, attended, make_work
from raypd.errors import InputError
from tests.processes import ROOT, ended, start
from tests.runs import write_rows
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
    folder = tmp_path_factory.mktemp("benchmark")
    save_tiny(folder / "model")
    write_rows(folder / "titles.jsonl", TITLES)
    write_rows(folder / "pages.jsonl", PAGES)
    return folder


def config(folder: Path, works: dict[str, Any], **settings: Any) -> Path:
    """Write a configuration; return its path."""
    benchmark = {
        "output": str(folder / "out"),
        "data": str(folder),
        "repeats": 2,
        "max_num_seqs": [2],
        "batch_sizes": [2],
        "threads": 1,
        **settings,
        "works": works,
    }
    model = {"name": str(folder / "model"), "device": "cpu"}
    file = folder / "benchmark.yaml"
    file.write_text(yaml.safe_dump({"model": model, "benchmark": benchmark}))
    return file


def run(file: Path, *overrides: str) -> tuple[str, dict[str, Any]]:
    """Run a configuration; return what it printed, and the results by work."""
    printed = ended(start("-m", "benchmarks", str(file), *overrides))
    results = json.loads((file.parent / "out/results.json").read_text())
    return printed, {work["name"]: work for work in results["works"]}


def rows(work: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["engine"]: row for row in work["rows"]}


def work_of(config: WorkConfig, data: Path | None = None) -> Work:
    """Make a work with the tokens of the tiny model."""
    return make_work(config, None if data is None else str(data), tiny_tokenizer(), 4096, 100)


def once(engine: str, work: Work, folder: Path) -> dict[str, Any]:
    """Return the result of an engine over a work, in this process."""
    # The engines' processes read works as JSON.
    tree = json.loads(json.dumps({**asdict(work), "units": [0] * work.count}))
    job = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "setting": 2,
        "guided": engine == "raypd-guided",
    }
    requests = tree[shape_of(engine, work)]
    if engine.startswith("raypd"):
        run, forget = load_raypd(job, tree)
    else:
        run, forget = peers.ENGINES[engine](job)
    first = peers.counted(run(requests), requests, True)
    forget()
    second = peers.counted(run(requests), requests, True)
    # After `forget`, nothing of the first run is in a cache.
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    return second


def test_engines_decode_the_same_random_slots(folder: Path) -> None:
    work = work_of(RandomSlots(**SLOTS))
    ours = once("raypd", work, folder)
    theirs = once("generate", work, folder)
    batched = once("generate_batch", work, folder)
    # 8 shared tokens once; per document 6 of its own and 2 keys of 2 tokens.
    assert work.unavoidable == 8 + 3 * (6 + 2 * 2)
    # 3 x 2 values of 3 tokens, the last of which is not fed.
    assert ours["fed"] == work.unavoidable + 3 * 2 * 2
    assert ours["decoded"] == 3 * 2 * 3
    # A whole answer has the keys, too, and is fed but for its last token.
    assert theirs["fed"] == 3 * (8 + 6 + 10 - 1)
    assert theirs["decoded"] == 3 * 10
    assert batched["answers"] == theirs["answers"]


def test_engines_answer_the_same_random_questions(folder: Path) -> None:
    config = RandomQuestions(
        kind="random_questions",
        shared=9,
        contexts=2,
        context_tokens=5,
        questions=3,
        question_tokens=2,
        answer_tokens=3,
    )
    work = work_of(config)
    ours = once("raypd", work, folder)
    theirs = once("generate", work, folder)
    assert ours["fed"] == 9 + 2 * (5 + 3 * 2) + 2 * 3 * 2
    assert ours["decoded"] == 2 * 3 * 3
    assert theirs["decoded"] == 2 * 3 * 3


def test_the_counted_pairs_are_those_of_raypds_own_feeds() -> None:
    config = RandomQuestions(
        kind="random_questions",
        shared=9,
        contexts=2,
        context_tokens=5,
        questions=3,
        question_tokens=2,
        answer_tokens=3,
    )
    work = work_of(config)
    first_feeds = [next(program) for program, _ in _programs(asdict(work), False, None)()]
    pairs, keys = attended(first_feeds)
    assert pairs == work.attended
    assert keys == work.keys - 1.5  # half of an answer's tokens


def test_labels_are_decoded_as_they_stand(folder: Path) -> None:
    config = Extraction(kind="extraction", data="titles.jsonl", answers="labels")
    work = work_of(config, folder)
    ours = once("raypd", work, folder)
    theirs = once("generate", work, folder)
    decoded = 2 * (len(' "Acme"') + len(" null"))
    assert work.decoded == decoded
    assert ours["decoded"] == decoded
    assert ours["fed"] == work.unavoidable + decoded - work.values
    assert theirs["decoded"] == decoded + 2 * len('{\n"Brand":,\n"Size":}')


def test_raypd_and_generate_give_the_same_answers_to_questions(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    work = work_of(
        Questions(
            kind="questions",
            data="pages.jsonl",
            answer_tokens=4,
        ),
        folder,
    )
    ours = answers.read(once("raypd", work, folder)["answers"], "units", work, tokenizer)
    theirs = answers.read(once("generate", work, folder)["answers"], "each", work, tokenizer)
    assert answers.agreement(ours, theirs) == 1.0


@pytest.mark.parametrize("engine", ["raypd", "raypd-guided"])
def test_raypd_s_answers_have_a_value_per_attribute(folder: Path, engine: str) -> None:
    work = work_of(
        Extraction(
            kind="extraction",
            data="titles.jsonl",
            value_tokens=8,
        ),
        folder,
    )
    first, second = once(engine, work, folder)["answers"]
    assert set(first) == {"Brand", "Size"}
    assert set(second) == {"Brand", "Size"}


@pytest.mark.slow
def test_an_engine_that_cannot_run_says_why_and_the_others_continue(folder: Path) -> None:
    works = {
        "slots": SLOTS,
        "gone": {"kind": "extraction", "data": "nowhere.jsonl"},
        "many": {**SLOTS, "documents": 10_001},
    }
    overrides = [f"benchmark.vllm_python={sys.executable}", "benchmark.max_num_seqs=[1,2]"]
    printed, results = run(config(folder, works), *overrides)
    slots = rows(results["slots"])
    assert set(slots) == set(ENGINES) - {"raypd-guided"}  # random slots have nothing to guide
    for engine in ("raypd", "generate", "generate_batch"):
        assert slots[engine]["error"] is None
        assert len(slots[engine]["seconds"]) == 2
    # A single setting is not tried; of several the fastest is taken.
    assert slots["raypd"]["tried"] == {}
    assert slots["raypd"]["setting"] == "auto"
    assert slots["generate"]["tried"] == {}
    assert slots["generate"]["setting"] == 2
    tried = slots["generate_batch"]["tried"]
    assert set(tried) == {"1", "2"}
    assert str(slots["generate_batch"]["setting"]) == min(tried, key=tried.get)
    if importlib.util.find_spec("vllm") is None:
        assert "vllm is not installed" in slots["vllm-whole"]["error"]
        assert "vllm-whole: vllm is not installed" in printed
    assert results["slots"]["floor"] > 0
    assert "nowhere.jsonl: cannot be read (No such file" in results["gone"]["skipped"]
    assert "benchmark.most_documents (10,000)" in results["many"]["skipped"]
    assert f"| raypd | {slots['raypd']['setting']} |" in (folder / "out/table.md").read_text()
    assert ElementTree.parse(folder / "out/slots.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("peer", ["vllm", "openvino"])
def test_another_engine_decodes_the_same_tokens(folder: Path, peer: str) -> None:
    variable = f"RAYPD_{peer.upper()}_PYTHON"
    package = peers.PACKAGES[peer]
    python = os.environ.get(variable)
    if not python and importlib.util.find_spec(package):
        python = "null"
    if not python:
        pytest.skip(f"needs {package}: {variable}=/its/environment/bin/python (docs/benchmark.md)")
    save_tiny(folder / "wide", head_dim=64)  # vLLM has no attention for heads of 16
    works = {
        "slots": SLOTS,
        "titles": {"kind": "extraction", "data": "titles.jsonl", "value_tokens": 4},
    }
    _, results = run(
        config(folder, works, repeats=1),
        f"benchmark.engines=[raypd,raypd-guided,{peer}-whole,{peer}-each]",
        f"model.name={folder / 'wide'}",
        f"benchmark.{peer}_python={python}",
    )
    slots = rows(results["slots"])
    titles = rows(results["titles"])
    assert [row["error"] for row in titles.values()] == [None] * 4
    assert titles[f"{peer}-each"]["agrees_with"] == "raypd-guided"
    assert [row["error"] for row in slots.values()] == [None] * 3
    assert [row["decoded"] for row in slots.values()] == [18, 30, 18]


# Seconds of (max_num_seqs, block_size, VLLM_ENABLE_V1_MULTIPROCESSING). Others fail.
FORM_SECONDS = {
    (1, 32, "0"): 9.0,
    (2, 32, "0"): 7.0,
    (2, 32, "1"): 8.0,
    (2, 16, "0"): 5.0,
}


def start_form(command: list[str], environment: dict[str, str], log: Path) -> Mock:
    """Start a process of vLLM that takes the seconds of its form."""
    job = json.loads(Path(command[-1]).read_text())
    variable = environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    form = (job["setting"], job["arguments"]["block_size"], variable)
    process = Mock(form=form)
    process.answer.return_value = {"versions": {}}
    if form in FORM_SECONDS:
        process.ask.return_value = {"seconds": FORM_SECONDS[form]}
    else:
        process.ask.side_effect = compare._Failed("no such pages")
    return process


def test_forms_are_tried_at_the_best_number_and_the_fastest_stays(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(compare, "_Process", start_form)
    forms = {"VLLM_ENABLE_V1_MULTIPROCESSING": [0, 1], "block_size": [32, 16, 128]}
    file = config(
        folder,
        {"slots": SLOTS},
        vllm_forms=forms,
        max_num_seqs=[1, 2],
    )
    lines: list[str] = []
    comparison = compare.Comparison(load_benchmark(file), tmp_path, lines.append)
    row = Row("vllm-each")
    work = work_of(RandomSlots(**SLOTS))
    fastest: Any = comparison._tuned(row, work, tmp_path / "work.json", None)
    assert fastest.form == (2, 16, "0")
    assert not fastest.close.called
    assert row.setting == 2
    assert row.form["block_size"] == 16
    assert [*row.tried.values()] == [9.0, 7.0, 8.0, 5.0]
    assert "  vllm-each, 2, block_size: 128 at a time: no such pages" in lines


@pytest.mark.parametrize("name", ["workloads", "growth"])
def test_a_shipped_configuration_loads(name: str) -> None:
    benchmark = load_benchmark(ROOT / f"benchmarks/{name}.yaml").benchmark
    for key, work in benchmark.works.items():
        assert varied(key, work)


def test_the_shipped_workloads_are_w1_to_w6() -> None:
    benchmark = load_benchmark(ROOT / "benchmarks/workloads.yaml").benchmark
    assert set(benchmark.works) == {f"W{n}" for n in range(1, 7)}


def test_stacked_documents_share_one_prompt() -> None:
    work = work_of(RandomSlots(**{**SLOTS, "stack": 2}))
    assert [len(prompt["ends"]) for prompt in work.raypd["prompts"]] == [4, 2]
    assert [request["max_tokens"] for request in work.whole] == [4 * 5, 2 * 5]
    first_request = work.each[0]["tokens"]
    slotted = work.raypd["prompts"][0]["tokens"]
    assert slotted[: len(first_request)] == first_request
    fourth_request = work.each[3]["tokens"]
    assert fourth_request[:-2] == work.whole[0]["tokens"]


def test_a_work_that_is_too_long_for_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="the model's context is 20"):
        make_work(RandomSlots(**SLOTS), None, tiny_tokenizer(), 20, 100)


@pytest.fixture
def result() -> Result:
    ours = Row("raypd", 24, [1.0, 2.0, 4.0], fed=5)
    theirs = Row("vllm-whole", 64, [2.0, 4.0, 7.0], fed=7)
    failed = Row("generate", error="MemoryError")
    rows = [ours, theirs, failed]
    return Result(
        "W1",
        "W1",
        None,
        "documents",
        8,
        floor=0.5,
        flops=4e11,
        rows=rows,
    )


def test_ratios_are_medians_over_repeats(result: Result) -> None:
    text = markdown(result)
    assert "| raypd | 24 | 4 [2-8] | 1.00 | 25% | 5 | 0 |" in text
    assert "| vllm-whole | 64 | 2 [1.14-4] | 0.50 | 12% | 7 |" in text
    assert "generate: MemoryError" in text


def test_a_work_has_a_chart(result: Result, tmp_path: Path) -> None:
    assert chart([result], tmp_path / "W1.svg")
    text = (tmp_path / "W1.svg").read_text()
    assert "vllm-whole" in text
    assert "generate" not in text


def test_a_key_that_varies_has_a_line_per_engine(result: Result, tmp_path: Path) -> None:
    results = [
        replace(
            result,
            name=f"W1 attributes={value}",
            varied=value,
        )
        for value in (4, 16)
    ]
    assert chart(results, tmp_path / "W1.svg")
    text = (tmp_path / "W1.svg").read_text()
    assert "attributes" in text
    assert "seconds / documents" in text


def test_answers_of_all_shapes_are_read_in_one_order(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    work = work_of(Extraction(kind="extraction", data="titles.jsonl"), folder)
    records = [{"Brand": "Acme", "Size": None}, {"Brand": "X", "Size": "42"}]
    ours = answers.read(records, "units", work, tokenizer)
    texts = ['{"Brand": "Acme", "Size": null}', '{"Brand": "X"']
    whole = answers.read([tokenizer.encode(text) for text in texts], "whole", work, tokenizer)
    values = [' "Acme"', " null", ' "X"', ' "42"']
    each = answers.read([tokenizer.encode(text) for text in values], "each", work, tokenizer)
    assert answers.agreement(ours, whole) == 0.5
    assert answers.agreement(ours, each) == 1.0


def test_whole_answers_may_have_the_layout_that_raypd_trains(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    opening = tokenizer.encode("{\n", add_special_tokens=False)
    config = Extraction(kind="extraction", data="titles.jsonl", layout="lines")
    work = work_of(config, folder)
    schema = work_of(config.model_copy(update={"layout": "schema"}), folder)
    texts = ['"Brand": "Acme",\n"Size": null\n}', '"Brand": "X",\n"Size": "42"\n}']
    for request, schema_request, text in zip(work.whole, schema.whole, texts, strict=True):
        assert request["tokens"] == schema_request["tokens"] + opening
        assert re.fullmatch(request["regex"], text)
        assert "json" not in request
    values = answers.read([tokenizer.encode(text) for text in texts], "whole", work, tokenizer)
    assert values == ["Acme", None, "X", "42"]
