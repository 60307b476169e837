"""`model.endpoint.batch`: a server in this process keeps files and batches as OpenAI's API has them."""

import email
import json
import time

import pyarrow.dataset as ds
import pytest

from raypd.answering.components import build
from raypd.cluster import driver
from raypd.decoding.program import Feed
from raypd.errors import ConfigError
from raypd.models import endpoint_batch
from raypd.models.endpoint import byte_tokenizer
from raypd.models.endpoint_batch import BatchEngine
from raypd.verify.retry import retry_errors
from tests.decoding.drivers import finished
from tests.models.test_endpoint import KEY, completion, configuration
from tests.servers import Reply, serving


class Vendor:
    def __init__(self) -> None:
        self.files, self.batches, self.answered, self.down = {}, {}, {}, False
        self.status, self.refused = "completed", set()  # of batches made from now on; words whose prompts get an error

    def __call__(self, call) -> Reply:
        if self.down:
            return Reply(503)
        path = call.path.removeprefix("/v1").split("?")[0]
        if path == "/files" and call.method == "GET":
            return Reply(200)
        if path == "/files":
            head = f"Content-Type: {call.headers['Content-Type']}\n\n".encode()
            form = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
                    for part in email.message_from_bytes(head + call.body).get_payload()}  # fmt: skip
            assert form["purpose"] == b"batch"
            return self.put(self.files, form["file"].decode())
        if path == "/batches" and call.method == "POST":
            batch = json.loads(call.body)
            assert (batch["endpoint"], batch["completion_window"]) == ("/v1/chat/completions", "24h")
            return self.put(self.batches, {**batch, "created_at": time.time(), "status": self.status})
        if path == "/batches":
            return self.told({"data": [self.shown(name) for name in reversed(self.batches)], "has_more": False})
        if path.startswith("/batches/"):
            return self.told(self.shown(path.rpartition("/")[2]))
        kind, _, name = path.split("/")[2].partition("-of-")
        return Reply(200, (self.answers(name)[kind == "errors"] if name else self.files[kind]).encode())

    def put(self, store, value) -> Reply:
        name = f"{'f' if store is self.files else 'b'}{len(store)}"
        store[name] = value
        return self.told({"id": name})

    def told(self, tree) -> Reply:
        return Reply(200, json.dumps(tree).encode())

    def shown(self, name):
        over = {"output_file_id": f"answers-of-{name}", "error_file_id": f"errors-of-{name}"}
        batch = self.batches[name]
        return {"id": name, **batch, **(over if batch["status"] in ("completed", "expired") else {})}

    def answers(self, name):
        if name in self.answered:
            return self.answered[name]
        good, bad = "", ""
        for line in map(json.loads, self.files[self.batches[name]["input_file_id"]].splitlines()):
            text = line["body"]["messages"][-1]["content"]
            if any(word in text for word in self.refused):
                bad += json.dumps({"custom_id": line["custom_id"], "error": {"message": f"not that one, {KEY}"}}) + "\n"
            elif self.batches[name]["status"] == "completed" or "0" in text:
                body = completion('{"Brand": "Acme", "Size": 7}')[1]
                reply = {"status_code": 200, "body": body}
                good += json.dumps({"custom_id": line["custom_id"], "response": reply}) + "\n"
        self.answered[name] = (good, bad)
        return good, bad


@pytest.fixture
def vendor(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    vendor = Vendor()
    with serving(vendor) as url:
        vendor.url = f"{url}/v1"
        yield vendor


def engine_with(vendor, tmp_path, texts, **endpoint):
    engine = BatchEngine(configuration(tmp_path, vendor.url, batch=True, retries=0, **endpoint), byte_tokenizer())
    engine.patience = 0.01
    for number, text in enumerate(texts):
        tokens = engine.tokenizer(f"<|user|>{text}<|end|><|assistant|>")["input_ids"]
        engine.submit((feed for feed in [Feed(tokens, range(len(tokens)))]), tag=number, sampling=None, seed=0)
    return engine


def test_a_run_is_answered_by_a_batch_and_a_document_that_is_refused_is_an_error_row(tmp_path, vendor, in_process):
    vendor.refused = {"shoe 3"}
    config = configuration(tmp_path, vendor.url, batch=True, key_variable="PATH")
    summary = driver.run_extract(config, build=build)
    assert (summary.ok, summary.failed, len(vendor.batches)) == (5, 1, 1)
    rows = {row["id"]: row for row in ds.dataset(tmp_path / "out/units", format="parquet").to_table().to_pylist()}
    assert json.loads(rows["0"]["record"]) == {"Brand": "Acme", "Size": 7}
    assert ("not that one" in rows["3"]["error"], KEY in rows["3"]["error"]) == (True, False)
    vendor.refused = set()
    again = retry_errors(config, build=build)  # what failed is asked again, and nothing else
    assert (again.tried, again.ok) == (1, 1)
    assert [len(vendor.files[name].splitlines()) for name in vendor.files] == [6, 1]


def test_what_an_engine_sent_before_it_was_killed_is_not_sent_again(tmp_path, vendor):
    vendor.status = "in_progress"
    killed = engine_with(vendor, tmp_path, ["0", "1"])
    while not killed._sent:
        killed.step()
    engine = engine_with(vendor, tmp_path, ["1", "2", "0"])
    while engine._collected:
        engine.step()
    assert (len(vendor.batches), len(vendor.files["f1"].splitlines())) == (2, 1)  # the third request alone
    vendor.down, engine._look = True, 0.0
    assert (engine.step(), engine.pending) == ([], 3)  # an outage ends no batch
    vendor.down = False
    for batch in vendor.batches.values():
        batch["status"] = "completed"
    assert all(ended.error is None for ended in finished(engine).values())


@pytest.mark.parametrize(("status", "answered"), [("expired", ["0"]), ("failed", [])])
def test_a_batch_that_ends_without_all_answers_fails_the_rest_alone(tmp_path, vendor, status, answered):
    vendor.status = status
    ended = finished(engine_with(vendor, tmp_path, ["0", "1", "1"]))
    assert [str(tag) for tag, result in ended.items() if result.error is None] == answered
    assert f"batch b0 is {status}" in str(ended[1].error)
    assert len(vendor.files["f0"].splitlines()) == 2  # two that are the same are sent once
    vendor.status = "completed"
    assert all(result.error is None for result in finished(engine_with(vendor, tmp_path, ["0", "1"])).values())
    assert len(vendor.files["f1"].splitlines()) == 2 - len(answered)


def test_a_batch_holds_no_more_than_the_server_takes(tmp_path, vendor, monkeypatch):
    monkeypatch.setattr(endpoint_batch, "MOST_REQUESTS", 2)
    assert len(finished(engine_with(vendor, tmp_path, "01234"))) == 5
    assert [len(file.splitlines()) for file in vendor.files.values()] == [2, 2, 1]


def test_answers_of_another_shape_are_error_rows_that_say_what_came(tmp_path, vendor, monkeypatch):
    engine, words = engine_with(vendor, tmp_path, "0"), "expected an answer of the batch API, found"
    vendor.answered["b0"] = ('{"custom_id": "x"}\n[7]', "")
    place = f"{vendor.url}/files/answers-of-b0/content"
    assert str(finished(engine)[0].error) == f'{place}: {words} {{"custom_id": "x"}} [7]'
    engine = engine_with(vendor, tmp_path, "1")
    monkeypatch.setattr(Vendor, "told", lambda self, tree: Reply(200, b'{"data": [7], "id": 3}'))
    place = f"{vendor.url}/batches?limit=100"
    assert str(finished(engine)[0].error) == f'{place}: {words} {{"data": [7], "id": 3}}'


def test_a_file_of_many_megabytes_takes_as_long_as_its_bytes_come(tmp_path, vendor):
    """More time than timeout_seconds: bytes that come give it more."""

    def slowly(parts):
        for part in parts:
            time.sleep(0.1)
            yield part

    engine = engine_with(vendor, tmp_path, "0", timeout_seconds=1)
    part = b" " * (1 << 20)
    with serving(lambda call: Reply(200, slowly([part] * 20), {"Content-Length": str(20 << 20)})) as url:
        assert len(engine._data(url, 1 << 30)) == 20 << 20
    engine.endpoint = engine.endpoint.model_copy(update={"timeout_seconds": 30})
    started = time.process_time()
    with serving(lambda call: Reply(200, part * 60)) as url:
        assert len(engine._data(url, 1 << 30)) == 60 << 20
    assert time.process_time() - started < 3  # a copy of all for each 16 kB takes seconds


def test_a_batch_whose_file_cannot_be_fetched_for_a_day_ends_as_error_rows(tmp_path, vendor, monkeypatch):
    engine = engine_with(vendor, tmp_path, "0")
    monkeypatch.setattr(Vendor, "answers", lambda self, name: 1 / 0)
    while not engine._silent:
        engine.step()
    assert engine.pending == 1
    monkeypatch.setattr(endpoint_batch, "_DAY", 0)
    engine._look = 0.0
    assert "/files/answers-of-b0/content" in str(finished(engine)[0].error)


def test_a_server_without_a_batch_api_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda call: Reply(404)) as url, pytest.raises(ConfigError, match="no batch API"):
        driver.run_extract(configuration(tmp_path, f"{url}/v1", batch=True))
