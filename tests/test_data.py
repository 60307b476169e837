"""raypd as a stage of Ray Data: every row comes out with what it had and its answer, whatever it
holds.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import pytest
import ray.data
from ray.data.checkpoint import CheckpointConfig

from raypd.answering.request_queue import UnitState
from raypd.data import AnswerStage, Processor, ProcessorConfig, build_processor, read
from raypd.errors import ConfigError, InputError
from raypd.tasks.base import Document, Record
from raypd.tasks.columns import columns_of
from tests import s3
from tests.processes import ROOT, wait_for
from tests.runs import extraction, read_all, run_config, write_jsonl, write_rows

pytestmark = pytest.mark.usefixtures("ray_here")
FAKE = {"model.fake.load_seconds": 0, "model.fake.step_seconds": 0.001}
ADDED = {
    *(
        name + kind
        for name in ("Brand", "Colour")
        for kind in ("", "__confidence", "__status", "__span")
    ),
    "truncated",
    "status",
    "error",
    "prompt_tokens",
    "decoded_tokens",
    "seconds",
    "cost_usd",
}


def processor(pre: Any = None, post: Any = None, settings: Any = None, **keys: Any) -> Processor:
    keys = {
        "model": "fake",
        "text_columns": ["title"],
        "schema": [{"name": "Brand"}, {"name": "Colour"}],
        **keys,
    }
    return build_processor(
        ProcessorConfig(settings={**FAKE, **(settings or {})}, **keys), pre, post
    )


def titles(count: int) -> pa.Table:
    return pa.table(
        {"number": range(count), "title": [f"a red lamp of Acme, number {n}" for n in range(count)]}
    )


@pytest.mark.parametrize(
    "kind", ["parquet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("csv", "json"))]
)
def test_files_on_s3_come_out_whole_and_take_what_was_estimated(
    kind: str, bucket: str, s3_server: s3.Server
) -> None:
    keys = {"access_key": s3.KEY_ID, "secret_key": s3.SECRET}
    files = pyarrow.fs.S3FileSystem(
        **keys,
        endpoint_override=s3_server.url,
        region="us-east-1",
    )
    at = bucket.removeprefix("s3://")
    write = {"csv": pyarrow.csv.write_csv, "parquet": pyarrow.parquet.write_table}
    for part in range(3):
        with files.open_output_stream(f"{at}/in/{part}.{kind}") as out:
            table = titles(150).slice(50 * part, 50)
            if kind == "json":
                out.write("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode())
            else:
                write[kind](table, out)
    dataset = getattr(ray.data, f"read_{kind}")(f"{at}/in", filesystem=files)
    stage = processor(settings={"cost.prices": {"local": 36.0}, "engine.max_num_seqs": 4})
    stage(dataset).write_parquet(f"{at}/out", filesystem=files)
    rows = pyarrow.dataset.dataset(f"{at}/out", filesystem=files).to_table().to_pylist()
    assert sorted(row["number"] for row in rows) == list(range(150))
    assert set(rows[0]) == {"number", "title"} | ADDED
    for row in rows:
        assert row["title"].endswith(f"number {row['number']}")
        assert row["status"] == "ok"
        assert row["error"] is None
        assert row["Brand"] == "fake"
        assert row["prompt_tokens"] > row["decoded_tokens"] > 0
        assert row["seconds"] > 0
    found = stage.estimate(dataset, sample=50)
    assert found.documents == 150
    for figure, name in (
        (found.prompt_tokens, "prompt_tokens"),
        (found.decoded_tokens, "decoded_tokens"),
    ):
        assert figure.value == pytest.approx(sum(row[name] for row in rows), rel=0.15)
    assert found.usd is not None
    assert found.usd.value == pytest.approx(found.seconds.value * 0.01 / 4)


def test_a_bad_row_is_an_error_row_of_the_same_columns() -> None:
    frame = pd.DataFrame(
        {
            "title": [
                "good",
                None,
                "",
                "x" * 2000,
                7,
                b"\xff",
                {"a": 1},
                "good",
            ],
            "n": range(8),
        }
    )
    rows = processor(settings={"input.max_document_bytes": 1000})(
        ray.data.from_pandas(frame)
    ).take_all()
    by_number = {row["n"]: row for row in rows}
    assert len(by_number) == len(rows) == 8
    errors = {n: row["error"] for n, row in by_number.items() if row["status"] == "error"}
    assert {n: (error or "").partition(";")[0] for n, error in errors.items()} == {
        1: "no text in title",
        2: "no text in title",
        3: "the document has 2000 bytes",
        5: "column 'title' holds a bytes, not text",
        6: "column 'title' holds an object, not text",
    }
    assert {frozenset(row) for row in rows} == {frozenset({"title", "n"} | ADDED)}
    assert by_number[1]["Brand"] is None


def test_a_row_has_the_tokens_of_a_cascade_s_second_model_and_their_price() -> None:
    prices = {"usd_per_million_prompt_tokens": 2, "usd_per_million_answer_tokens": 10}
    server = {"name": "large", "endpoint": {"url": "http://h/v1", **prices}}
    stage = object.__new__(AnswerStage)
    counts = {"prefill_tokens": 90, "shared_tokens": 10, "decode_tokens": 10}
    stage.config = run_config(
        extraction(c=["Brand"]), model={"name": "fake"}, cascade={"model": server}
    )
    stage.prefix = ""
    stage.usd_per_second = None
    stage.schema = columns_of(stage.config)
    usage_by_row = {(0, "first"): Counter(counts), (0, "second"): Counter(counts)}
    stage.meter = mock.Mock(totals=lambda: (1.0, 1.0, 100, 10))
    table = stage._rows(
        pa.table({"title": ["x"]}),
        [Document(0, "0")],
        UnitState(
            0,
            "u",
            records=[Record(0, error="no")],
            usage_by_row=usage_by_row,
        ),
    )
    (row,) = table.to_pylist()
    assert row["prompt_tokens"] == 200
    assert row["decoded_tokens"] == 20
    assert row["cost_usd"] == pytest.approx(0.0003)


def test_an_empty_dataset_stays_empty() -> None:
    frame = pd.DataFrame({"title": pd.Series([], dtype=str)})
    answered = processor()(ray.data.from_pandas(frame))
    assert answered.take_all() == []


@pytest.mark.slow
@pytest.mark.ci
def test_columns_that_both_have_are_refused_and_a_prefix_keeps_two_stages_apart() -> None:
    with pytest.raises(ConfigError, match="the dataset has no column 'text'"):
        processor(text_columns=["text"])(ray.data.from_arrow(titles(1)))
    with_status = titles(1).append_column("status", pa.array(["mine"]))
    with pytest.raises(ConfigError, match="the input and the answers both have columns status"):
        processor()(ray.data.from_arrow(with_status))
    # The columns of this dataset are only known when it runs.
    unknown = ray.data.from_arrow(titles(1)).map(lambda row: {**row, "Brand": "mine"})
    with pytest.raises(
        ray.exceptions.RayTaskError, match="the input and the answers both have columns Brand"
    ):
        processor()(unknown).take_all()
    # Some blocks of this dataset are empty.
    blocks = ray.data.from_arrow(titles(40)).repartition(4)
    few = blocks.filter(lambda row: row["number"] >= 35)
    second = processor(prefix="second_", text_columns=["Brand"])
    rows = second(processor()(few)).take_all()
    assert set(rows[0]) == {"number", "title"} | ADDED | {f"second_{name}" for name in ADDED}
    assert sorted(row["number"] for row in rows) == list(range(35, 40))
    assert {(row["status"], row["second_status"]) for row in rows} == {("ok", "ok")}


def test_functions_before_and_after_and_several_rows_of_a_document() -> None:
    asked = processor(
        pre=lambda row: {
            "n": row["id"],
            "context": "Paris is in France",
            "questions": ["Where?", "What?", "Why?"],
        },
        post=lambda row: {"n": row["n"], "q": row["question"], "tokens": row["decoded_tokens"]},
        schema=None,
        config=run_config("question_answering"),
        method="autoregressive",  # a prompt a question
        text_columns=None,
    )
    rows = asked(ray.data.range(100)).take_all()
    every = [(n, question) for n in range(100) for question in ("What?", "Where?", "Why?")]
    assert sorted((row["n"], row["q"]) for row in rows) == every
    assert sum(row["tokens"] for row in rows) == asked.bill().decoded_tokens


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_worker_costs_its_batches_alone_and_the_bill_says_so() -> None:
    settings = {"model.fake.step_seconds": 0.05, "cost.prices": {"local": 36.0}}
    slow = processor(
        batch_size=10,
        concurrency=(1, 2),
        settings=settings,
    )
    killed: list[int] = []

    def kill() -> None:
        def busy() -> list[int]:
            if slow._ledger is None:
                return []
            reports = ray.get(
                slow._ledger.__ray_call__.remote(lambda ledger: [*ledger.book.workers.values()])
            )
            return [report.pid for report in reports if report.ok]

        killed.append(wait_for(busy)[0])
        os.kill(killed[0], signal.SIGKILL)

    beside = threading.Thread(target=kill)
    beside.start()
    rows = slow(ray.data.from_arrow(titles(80))).take_all()
    beside.join()
    assert killed
    assert sorted(row["number"] for row in rows) == list(range(80))
    assert {row["status"] for row in rows} == {"ok"}
    bill = slow.bill()
    assert bill.documents >= 80
    assert bill.failed == 0
    assert bill.seconds["prefill"] + bill.seconds["decode"] > 0.2
    worked = sum(row["seconds"] for row in rows)
    assert 0.5 * worked < bill.seconds["prefill"] + bill.seconds["decode"] < 2 * worked
    # 36 dollars an hour on the four places of this machine
    # Each worker pays whole micro-dollars.
    assert bill.usd == pytest.approx(sum(bill.seconds.values()) * 0.01 / 4, abs=2e-6)
    assert sum(row["cost_usd"] for row in rows) == pytest.approx(worked * 0.01 / 4)


@pytest.mark.slow
def test_a_pipeline_that_ended_goes_on_under_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "done").mkdir()
    pyarrow.parquet.write_table(titles(40), tmp_path / "in.parquet")
    checkpoint = CheckpointConfig(
        "number", str(tmp_path / "done"), delete_checkpoint_on_success=False
    )
    monkeypatch.setattr(ray.data.DataContext.get_current(), "_checkpoint_config", checkpoint)

    def breaks(row: dict[str, Any]) -> dict[str, Any]:
        if row["number"] == 39:
            wait_for(
                lambda: [
                    path for path in (tmp_path / "done").iterdir() if ".pending" not in path.name
                ]
            )
            raise ValueError("the power fails")
        return row

    def written(stage: Processor) -> list[int]:
        rows = ray.data.read_parquet(str(tmp_path / "in.parquet")).repartition(
            target_num_rows_per_block=5
        )
        stage(rows).write_parquet(str(tmp_path / "out"))
        return sorted(
            pyarrow.dataset.dataset(tmp_path / "out").to_table(["number"])["number"].to_pylist()
        )

    with pytest.raises(ray.exceptions.RayTaskError, match="the power fails"):
        written(processor(post=breaks, batch_size=5))
    again = processor(batch_size=5)
    assert written(again) == list(range(40))
    assert 0 < again.bill().documents < 40


class Deadly(AnswerStage):
    """Dies of row 7 each time."""

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        if 7 in batch["number"].to_pylist():
            Path(batch["marks"][0].as_py(), str(time.time_ns())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().__call__(batch)


@pytest.mark.slow
def test_a_row_that_kills_its_worker_each_time_ends_the_pipeline(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("raypd.data.AnswerStage", Deadly)
    table = titles(20).append_column("marks", pa.array([str(tmp_path)] * 20))
    with pytest.raises(ray.exceptions.RayError):
        processor()(ray.data.from_arrow(table)).take_all()
    # three times; two where a retry met its actor before it was up again, which Ray counts as one
    assert len(list(tmp_path.iterdir())) in (2, 3)


@pytest.mark.slow  # `make demo` runs it over all listings
def test_the_embedded_model_fills_in_what_listings_say() -> None:
    quickstart = ROOT / "configs/quickstart"
    lines = (quickstart / "products.jsonl").read_text().splitlines()
    listings = [json.loads(line) for line in lines[:6]]
    expected = {}
    for line in (quickstart / "expected.jsonl").read_text().splitlines():
        labelled = json.loads(line)
        expected[labelled["id"]] = labelled["target"]
    stage = build_processor(ProcessorConfig(config=quickstart / "extract.yaml", batch_size=4))
    rows = stage(ray.data.from_items(listings)).take_all()
    assert [row["status"] for row in rows] == ["ok"] * 6
    right = []
    for row in rows:
        for name, value in json.loads(row["record"]).items():
            right.append(expected[row["id"]].get(name) == value)
    assert sum(right) > 0.6 * len(right)


def test_read_gives_the_documents_that_a_run_reads(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", [f"lamp {n}" for n in range(300)] + [""])
    write_rows(
        tmp_path / "in/b.jsonl",
        [
            {
                "id": "x",
                "title": "desk",
                "price": 3.5,
            }
        ],
    )
    table = pa.table(
        {
            "id": ["p", "q"],
            "title": ["rug", "sofa"],
            "price": [1.0, None],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "in/c.parquet")
    run = run_config(
        None, tmp_path / "in", input={"text_columns": ["title"], "category_column": None}
    )
    dataset = read(
        config=run,
        columns=["price"],
        settings={"cluster.unit_documents": 50},
    )
    # Ray Data keeps the order of rows only where it is told to.
    rows = sorted(dataset.take_all(), key=lambda row: (row["source"], row["row"]))
    documents = sorted(read_all(run), key=lambda document: (document.source, document.row))
    assert [row["id"] for row in rows] == [document.id for document in documents]
    assert [row["title"] for row in rows] == [
        document.fields.get("title") for document in documents
    ]
    assert [row["read_error"] for row in rows] == [document.error for document in documents]
    assert [(row["source"], row["row"]) for row in rows] == [
        (document.source, document.row) for document in documents
    ]
    assert [row["price"] for row in rows[-3:]] == [3.5, 1.0, None]
    # A processor takes the rows as they are.
    answered = processor(schema=[{"name": "Brand"}])(dataset.limit(5)).take_all()
    assert [row["status"] for row in answered] == ["ok"] * 5


def test_read_takes_files_that_are_documents_and_refuses_damaged_ones(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>A lamp")
    (tmp_path / "b.txt").write_text("A desk")
    path = [str(tmp_path / "a.html"), str(tmp_path / "b.txt")]
    assert [row["text"] for row in read(path).take_all()] == ["A lamp", "A desk"]
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(InputError, match=r"c\.parquet"):
        read(str(tmp_path / "c.parquet"))
    with pytest.raises(ConfigError, match="give a path or a configuration"):
        read()
