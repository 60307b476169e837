"""`raypd init` over files as people have them, and the run that its configuration is."""

import gzip
import json
import shlex
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raypd import storage
from raypd.answering.components import build
from raypd.cli import init
from raypd.cli.run import config_over
from raypd.cluster import driver
from raypd.config.load import load_config
from raypd.errors import ConfigError, InputError
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
        "next: `raypd extract letters.yaml`"
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


def test_columns_of_html_are_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(SCHEMA)
    Path("shop.csv").write_text(
        "id,title,description\n" + '1,Mug,"<p>Made of clay, for coffee</p>"\n' * 2
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
    keys = [f"storage.endpoint_url={storage.default.settings.endpoint_url}"]
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
        f"a.yaml: reads {text}, documents are numbered"
    )
    assert config_over(
        "a.csv", "extraction", [], None, "fake", None, schema="s.json"
    ).input.text_columns == [text]


def test_a_schema_that_is_none_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text('{"properties": {"a": {"type": "nonsense"}}}')
    with pytest.raises(ConfigError, match="nonsense"):
        init.run(written(tmp_path, "csv"), "s.json", None)
    assert not Path("letters.yaml").exists()


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
        ("a.csv", "note,note\nx,y\n", "2 columns are called 'note'"),
    ],
)
def test_what_has_no_texts_is_refused(name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    with pytest.raises(InputError, match=message):
        init.run(name, None, None)
    assert not Path("a.yaml").exists()
