"""The scripts of `make gpu`, rehearsed on a CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import exactness, key_reads, peer_rows, profile, speed
from benchmarks.gpu.peers.power import PowerMeter
from benchmarks.gpu.results import OutOfTime, Results
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.works import WORKS, works
from raypd.decoding.engine import Engine
from raypd.decoding.scheduler import Scheduler
from tests.benchmarks.rows_in_processes import squared
from tests.processes import ended, start
from tests.runs import says
from tests.tiny import tiny_model

FAKE_PEERS = Path(__file__).parent / "fake_peers"
WITHOUT_PEERS = "^(?!.*(vllm|sglang))"


@pytest.fixture
def results_file(tmp_path) -> Path:
    return tmp_path / "results.jsonl"


def rehearse(script, results_file: Path, only: str, *more: str) -> int:
    options = ["--rehearse", "--results", str(results_file), "--only", only]
    return script.main([*options, *more])


def written(results_file: Path) -> list[dict]:
    return [json.loads(line) for line in results_file.read_text().splitlines()]


# A row


def results_of(file: Path, seconds: float = 60, machine: str = "one", retry: bool = False):
    return Results(file, "a script", machine, seconds, retry)


def test_a_row_is_measured_once_and_a_failure_is_kept_until_it_is_retried(results_file):
    def measured():
        return {"speed": 3}

    def failing():
        raise ValueError("no memory")

    first = results_of(results_file)
    first.measure("a", 0, measured)
    first.measure("b", 0, failing)
    assert first.failed == ["b"]
    again = results_of(results_file)
    again.measure("a", 0, failing)
    again.measure("b", 0, measured)
    assert again.rows["a"] == {"speed": 3}
    assert again.rows["b"] == {"failed": "ValueError: no memory"}
    retried = results_of(results_file, retry=True)
    retried.measure("b", 0, measured)
    assert retried.failed == []
    assert results_of(results_file).rows["b"] == {"speed": 3}
    # Rows of another machine are not this machine's.
    assert results_of(results_file, machine="two").rows == {}


def test_a_row_that_was_cut_off_is_measured_again(results_file):
    results_of(results_file).measure("a", 0, lambda: {"speed": 3})
    whole = results_file.read_text()
    results_file.write_text(whole + whole[: len(whole) // 2])
    results = results_of(results_file)
    results.measure("b", 0, lambda: {"speed": 4})
    assert results_of(results_file).rows == {"a": {"speed": 3}, "b": {"speed": 4}}


def test_a_budget_is_obeyed(results_file):
    began = time.monotonic()
    results = results_of(results_file, seconds=3)
    results.measure("long", 60, lambda: {"never": 1})
    results.measure("slower than it says", 0, lambda: time.sleep(60) or {})
    results.measure("behind it", 0.1, lambda: {"never": 1})
    assert time.monotonic() - began < 10
    assert results.rows == {}
    assert results.left == ["long", "slower than it says", "behind it"]
    says(results.describe_left(), "3 rows", "long", "Run the same command again")


def test_rows_are_measured_side_by_side_within_the_budget(results_file):
    began = time.monotonic()
    results = results_of(results_file, seconds=10)
    results.measure_in_processes(["2", "3", "9"], 0, squared, workers=2)
    assert time.monotonic() - began < 25
    assert results.rows == {"2": {"square": 4}, "3": {"square": 9}}
    assert results.left == ["9"]


def retrying(seconds: float) -> None:
    """Try again after every error, as a library might."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(1)
        except Exception:
            continue


def test_no_handler_of_errors_takes_the_end_of_the_time_for_one(results_file):
    results = results_of(results_file, seconds=2.2)
    began = time.monotonic()
    with pytest.raises(OutOfTime), results.limited():
        retrying(30)
    assert time.monotonic() - began < 10


# Exactness


def test_exactness_is_rehearsed(results_file, capsys):
    methods = ["--methods", "autoregressive", "hyper_parallel", "medusa"]
    assert rehearse(exactness, results_file, "^(llama|gpt_oss)$", *methods) == 0
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.startswith(("| llama", "| gpt_oss"))]
    assert len(rows) == 2
    for row in rows:
        assert row.count("3 of 3") == 5
    assert rehearse(exactness, results_file, "^llama$", *methods) == 0
    assert "... llama" not in capsys.readouterr().out


def test_exactness_of_recurrent_layers_is_rehearsed(results_file, capsys):
    precisions = ["--precisions", "float64", "bfloat16"]
    assert rehearse(exactness, results_file, "^qwen3_5_text$", *precisions) == 0
    says(capsys.readouterr().out, "| qwen3_5_text | 4 | 4 of 4", "4 of 4, ")


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_an_engine_that_shows_too_much_is_told(precision, results_file, capsys, monkeypatch):
    """In a tenth of the passes a sequence loses what its last token was."""
    schedule = Scheduler.schedule
    passes = 0

    def wrong(scheduler):
        nonlocal passes
        chunks, finished = schedule(scheduler)
        passes += 1
        if passes % 5 == 0:
            for chunk in chunks:
                chunk.seq.table[0, chunk.table_index] += 1
        return chunks, finished

    monkeypatch.setattr(Scheduler, "schedule", wrong)
    options = ["--methods", "autoregressive", "--precisions", precision]
    assert rehearse(exactness, results_file, "^llama$", *options) == 1
    says(capsys.readouterr().out, "NOT autoregressive")


def test_every_family_and_every_method_has_a_cell():
    assert set(exactness.FAMILIES) >= {"llama", "qwen3_moe", "gpt_oss", "qwen3_5_text", "lfm2"}
    for kind in exactness.FAMILIES:
        family = exactness.Family(kind)
        assert len(family.methods) == (4 if family.is_recurrent else 13)


# Speed


def test_speed_is_rehearsed(results_file, capsys):
    assert rehearse(speed, results_file, WITHOUT_PEERS + "(Qwen3-0.6B|Qwen3.5)") == 0
    output = capsys.readouterr().out
    for model in ("Qwen3-0.6B, bfloat16", "Qwen3-0.6B, fp8", "Qwen3.5-4B, bfloat16"):
        for work in WORKS:
            assert f"| {model} | {work} | raypd | " in output
    assert "failed" not in output
    says(output, "MHz, W and tokens/J are empty: no GPU", "has no vllm: pip install vllm")
    rows = [row["figures"] for row in written(results_file)]
    assert all(row["planned_bytes"] > 0 for row in rows)
    assert all(row["fed"] > row["sampled"] / 2 for row in rows)


def test_the_tokens_of_a_work_are_those_that_the_engine_counts():
    for name, work in works(rehearse=True).items():
        engine = Engine(tiny_model("llama"), max_num_batched_tokens=64)
        for prompt in work.draw(work.documents, 200, seed=1):
            engine.submit(work.program(prompt, 200, isolate=False))
        prefilled = 0
        decoded = 0
        while engine.pending:
            for program in engine.step():
                prefilled += program.counts.prefill_tokens
                decoded += program.counts.decode_tokens
        assert decoded == work.documents * work.sampled
        # The last token of a value is not fed.
        values = work.documents * work.branches
        assert prefilled + decoded - values == work.shared + work.documents * work.fed, name


def test_the_requests_of_peers_ask_for_the_same_values():
    work = WORKS["W1 keys"]
    prompts = work.draw(2, 1000, seed=1)
    whole, new_tokens = work.whole_requests(prompts, 1000)
    assert (len(whole), new_tokens) == (2, 160)
    single, new_tokens = work.single_requests(prompts, 1000)
    assert (len(single), new_tokens) == (32, 5)
    assert {len(request) for request in single} == {705}
    tree = WORKS["W6"].tree(WORKS["W6"].draw(1, 1000, seed=1)[0], 1000)
    requests, _ = WORKS["W6"].whole_requests(WORKS["W6"].draw(1, 1000, seed=1), 1000)
    questions = [question.tokens for context in tree.contexts for question in context.questions]
    assert [request[3490:] for request in requests] == questions


@pytest.mark.slow
def test_vllm_is_searched_for_its_best_form(results_file, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{FAKE_PEERS}")
    monkeypatch.setattr(peer_rows, "SHAPES", {"Qwen3-8B": SHAPES["Qwen3-8B"]})
    options = ["--vllm-python", sys.executable]
    assert rehearse(speed, results_file, "vllm", *options) == 1  # n-gram speculation fails
    output = capsys.readouterr().out
    rows = {row["row"]: row["figures"] for row in written(results_file)}
    failed = [name for name, figures in rows.items() if "failed" in figures]
    assert failed == ["Qwen3-8B: vllm, n-gram speculation"]
    assert "no n-gram speculation here" in rows[failed[0]]["failed"]
    best = peer_rows.best_form("vllm", results_in(results_file, "speed, rehearsed"))
    # The faster one of two numbers of tokens, and not what is as fast as the default.
    assert best.arguments == {"max_num_batched_tokens": 32_768}
    assert best.environment == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert set(rows["Qwen3-8B: vllm, best form"]["works"]) == set(WORKS)
    in_fp8 = rows["Qwen3-8B: vllm, best form, fp8"]
    assert in_fp8["form"] == {"max_num_batched_tokens": 32_768, "quantization": "fp8"}
    says(output, "a request per document", "a request per value", "W6", '"quantization": "fp8"')


def results_in(file: Path, script: str) -> Results:
    return Results(file, script, speed.machine(), 60, retry=False)


def test_the_best_form_is_not_known_before_the_search_is_complete(results_file):
    results = results_in(results_file, "speed")
    assert peer_rows.best_form("vllm", results) is None


def test_an_interpreter_that_is_not_there_is_named(results_file, capsys):
    options = ["--vllm-python", "/nowhere/python"]
    assert rehearse(speed, results_file, "nothing", *options) == 0
    says(capsys.readouterr().out, "/nowhere/python: No such file", "has no sglang")


# Power


def test_power_is_the_counter_of_nvml(monkeypatch):
    millijoules = iter([0, 5000, 12_000])
    names = []

    def handle(name):
        names.append(name)
        return "a handle"

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: next(millijoules),
        nvmlDeviceGetClockInfo=lambda *_: 1980,
        NVML_CLOCK_SM=1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    power = PowerMeter("12ab").measure(lambda: time.sleep(0.2))
    assert names == ["GPU-12ab"]
    assert power == (7.0, 1980, "")


def test_where_nvml_is_missing_the_run_is_made_and_the_reason_is_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    runs = []
    power = PowerMeter("GPU-12ab").measure(lambda: runs.append(1))
    assert runs == [1]
    assert power.joules is None
    says(power.refusal, "pip install nvidia-ml-py")


# Profile


def test_the_profile_is_rehearsed(results_file, capsys):
    assert rehearse(profile, results_file, "Qwen3-0.6B") == 0
    output = capsys.readouterr().out
    for kind in ("prefill", "decode"):
        assert f"| Qwen3-0.6B | {kind} | " in output
    (row,) = written(results_file)
    for one in row["figures"].values():
        parts = one["plan"] + one["start"] + one["wait"] + one["resume"]
        assert one["seconds"] == pytest.approx(parts)
        assert one["tokens"] > 0
        assert one["longest"]


def test_the_busy_time_counts_kernels_that_run_at_the_same_time_once():
    assert profile.busy_seconds(
        [
            (0, 10),
            (5, 20),
            (30, 40),
            (32, 35),
        ]
    ) == pytest.approx(30e-6)


# How often keys are read


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_decode_pass_reads_its_prefix_once_for_many_documents():
    shape = SHAPES["Qwen3-1.7B"]
    work = WORKS["W1 keys"]
    reads = key_reads.decode_pass(shape, work, "H100", documents=16)
    queries = 16 * work.attributes
    # Two query heads share a key head: a block of 128 rows holds 64 queries, four documents.
    own = reads.unshared - 16 * work.shared
    assert reads.read == own + queries * 2 // 128 * work.shared
    assert reads.distinct == own + work.shared
    assert reads.per_query > 10 * reads.read


def test_the_scripts_need_nothing_that_a_machine_for_torch_lacks():
    missing = ("pydantic", "ray", "peft")
    scripts = ("exactness", "speed", "profile")
    code = [f"import sys; sys.modules.update(dict.fromkeys({missing}))"]
    code += [f"import benchmarks.gpu.{script}" for script in scripts]
    ended(start("-c", "\n".join(code)))


def test_a_script_asks_for_a_gpu(capsys):
    for script in (exactness, speed, profile):
        if torch.cuda.is_available():
            continue
        with pytest.raises(SystemExit):
            script.main(["--results", "unused.jsonl"])
        assert "--rehearse runs anywhere" in capsys.readouterr().err
