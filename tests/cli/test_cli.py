"""The command line as a user types it: errors that name what is wrong, exit codes, nothing printed
twice; and a job.
"""

import io
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pyarrow.dataset as ds
import pytest
import yaml
from rich.console import Console

from raypd.cli.summary import _table, _values
from raypd.config import RunConfig
from raypd.config.load import load_config
from raypd.config.render import known_keys, render, render_key
from raypd.tasks.columns import value_row
from raypd.verify.verification import verify
from tests.faults.trial import Trial
from tests.processes import ROOT, ended, start
from tests.runs import says, write_jsonl

RUN = """\
input:
  path: in/*.jsonl
  text_columns: [title]
  category_column: null
output:
  path: out
task:
  categories:
    book:
      attributes:
        - name: author
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"id": 1, "title": "Dune"}\n')
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["in/a.jsonl"],
            "in/a.jsonl: give a run's YAML, or say what to extract from this data: --schema",
        ),
        (["run.yaml", "--schema", "s.json"], "run.yaml: has its own task"),
        (
            ["run.yaml", "task.categories.book.attributes=[5]"],
            "expected a name, or a mapping such as {name: Brand, type: text} (it is 5)",
        ),
        (
            ["run.yaml", "output.partition={_x: y}"],
            "use only a-z, 0-9 and _, as Athena requires, and begin with",
        ),
        (["nope.yaml"], "nope.yaml: no such configuration file; did you mean run.yaml?"),
        (
            ["run.yaml", "engine.unit_documents=8"],
            "unit_documents=... on the command line: unknown key; there is cluster.unit_documents",
        ),
        (
            ["run.yaml", "decoding.metod=autoregressive"],
            "decoding.metod=... on the command line: unknown key; did you mean 'method'?",
        ),
        (["run.yaml", "input.path=in/*.parquet"], "in/*.parquet: no file matches"),
        (
            ["wrong.yaml"],
            "wrong.yaml:11: task.categories.book.attributes.0.nmae: unknown key; did you mean "
            "'name'?",
        ),
        (
            ["run.yaml", "engine.max_num_seqs=0"],
            "engine.max_num_seqs=... on the command line: give a whole number of at least 1",
        ),
        (["run.yaml", "input.path=in/b.jsonl"], "no such file or folder; did you mean"),
        (
            ["run.yaml", "input.text_columns=[titel]"],
            "a.jsonl: no column 'titel' (input.text_columns 'titel'): did",
        ),
        (
            ["in/c.jsonl", "--schema", "s.json", "-m", "fake"],
            "the default): it has n; set input.text_columns=[NAME] to the",
        ),
        (
            ["run.yaml", "decoding.method=hyper_paralel"],
            "decoding.method=... on the command line: did you mean 'hyper_parallel'? choose from",
        ),
        (
            ["run.yaml", "decoding.max_value_tokens=0"],
            "decoding.max_value_tokens=... on the command line: Input should be greater",
        ),
        (["run.yaml", "output.path=run.yaml"], "run.yaml: is a file; give a folder"),
        (["run.yaml", "input.path=ftp://b/a.jsonl"], "ftp:// is not a storage"),
        (
            ["run.yaml", "task.categories.book.attributes=[{name: 'a\tb'}]"],
            "a name is printable text without quotes",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_plain_words(
    folder: Path, raypd, words: list[str], message: str
) -> None:
    (folder / "in/c.jsonl").write_text('{"n": 1}\n')
    (folder / "s.json").write_text('{"properties": {"author": {"type": "string"}}}')
    (folder / "wrong.yaml").write_text(RUN.replace("name: author", "nmae: author"))
    code, out, err = raypd("extract", *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert not (folder / "out").exists()


def test_data_and_a_schema_need_no_yaml(folder: Path, raypd, in_process) -> None:
    (folder / "book.json").write_text(
        '{"title": "book", "properties": {"author": {"type": "string"}}}'
    )
    words = [
        "in/a.jsonl",
        "--schema",
        "book.json",
        "-o",
        "out",
        "--model",
        "fake",
        "input.text_columns=[title]",
    ]
    code, out, err = raypd("extract", *words)
    assert code == 0, err
    assert "1 document" in out


def test_an_interruption_while_python_imports_is_one_line(folder: Path) -> None:
    slow = folder / "typer.py"  # in place of the library, which takes long to import
    slow.write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    process = start("-m", "raypd", "--version", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert process.stdout is not None
    while "importing" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert ended(process, 130) == "interrupted\n"


def test_what_c_does_at_the_very_end_cannot_abort_it() -> None:
    lines = (
        "import ctypes as c, raypd.__main__ as m; "
        "c.CDLL(None).__cxa_atexit(c.CDLL(None).abort, None, None); m.main()"
    )
    assert ended(start("-c", lines, "--version")).startswith("raypd 0.")
    assert "no such configuration" in ended(start("-c", lines, "extract", "nope.yaml"), 2)


def test_an_interruption_is_one_line(folder: Path, raypd, monkeypatch) -> None:
    monkeypatch.setattr("raypd.cli.run.load_config", Mock(side_effect=KeyboardInterrupt))
    assert raypd("extract", "run.yaml") == (130, "", "interrupted\n")


def test_version_help_and_mistyped_commands(raypd) -> None:
    assert raypd("--version").out.startswith("raypd 0.")
    assert "extract" in raypd("--help").out
    code, _, err = raypd("extrakt")
    assert code == 2
    assert "extract" in err


def test_the_help_of_estimate_fits_80_columns(raypd, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = raypd("estimate", "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    for option in (
        "--throughput [GPU=]RATE",
        "--tokens SHARED OWN KEYS VALUES PASSES",
        "--baseline / --no-baseline",
    ):
        assert any(line.startswith(f"  {option}") for line in lines), option


def test_help_uses_the_width_of_the_terminal(raypd, monkeypatch) -> None:
    """An explanation that takes two lines in 80 columns takes one in 150."""
    text = "--schema product.json. A second run with the same output.path resumes."
    monkeypatch.setenv("COLUMNS", "80")
    assert text not in raypd("extract", "--help").out
    monkeypatch.setenv("COLUMNS", "150")
    lines = raypd("extract", "--help").out.splitlines()
    assert any(line.endswith(text) and len(line) > 80 for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_config_show_wraps_and_still_reads_back(raypd, monkeypatch, tmp_path, width) -> None:
    """No word is lost, and what is shown is the same configuration."""
    file = tmp_path / "run.yaml"
    tree = {
        "input": {"path": str(tmp_path / "a.jsonl"), "text_columns": ["t"]},
        "task": {"attributes": [{"name": "a", "description": "x  # " + "long " * 40 + "end"}]},
        "output": {"path": str(tmp_path / "out")},
    }
    file.write_text(yaml.safe_dump(tree))
    monkeypatch.setenv("COLUMNS", str(width))
    shown = raypd("config", "show", str(file)).out
    whole = render(load_config(file))
    assert yaml.safe_load(shown) == yaml.safe_load(whole)
    too_long = [line for line in shown.splitlines() if len(line) > width and "  # " in line]
    assert [line for line in too_long if "long long" not in line] == []
    note = "auto: by their names; json: each .json holds an object or an array"
    words = " ".join(part.strip(" #") for part in shown.splitlines())
    assert note in whole
    assert note in " ".join(words.split())


@pytest.mark.parametrize(
    ("overrides", "open_method"),
    [([], True), (["decoding.method=auto"], True), (["decoding.method=guided"], False)],
)
def test_config_show_names_the_method_that_will_run(
    raypd, monkeypatch, tmp_path, overrides, open_method
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "input: {path: a.jsonl, text_columns: [t]}\ntask: {attributes: [a]}\n"
        f"output: {{path: {tmp_path}/out}}\nmodel: {{name: fake}}\n"
    )
    monkeypatch.setenv("COLUMNS", "100")
    shown = raypd("config", "show", str(file), *overrides).out
    method = load_config(file, overrides).decoding.method
    assert f"\n  method: {method} " in shown
    assert (f"auto (here: {method})" in shown) == open_method


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_preview_of_answers_fits_and_shows_them(width: int) -> None:
    """A long question does not push its answer out of the terminal."""
    row = {
        "id": "context-" + "9" * 40,
        "status": "ok",
        "question_id": "0",
        "question": "Which of the following is said of the city " + "in the text " * 10 + "?",
        "answer": "Oslo" + " and more" * 30,
        "answer_status": "ok",
        "truncated": False,
    }
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        highlight=False,
        markup=False,
    )
    console.print(_table([row]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "Which of the" in lines[-1]
    assert "Oslo" in lines[-1]


def test_the_readme_puts_the_command_on_the_path() -> None:
    """The line that it names, in a new shell, after `make setup`."""
    (line,) = [
        line.strip()
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"\s+\. .*/activate", line)
    ]
    if not (ROOT / line.split()[1]).exists():
        pytest.skip("needs the virtual environment of `make setup`")
    command = f"{line} && command -v raypd"
    path = subprocess.check_output(
        ["bash", "-c", command], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, text=True
    )
    assert Path(path.strip()).parent.name == "bin"
    assert ".venv" in path


def test_config_show_is_yaml_that_reads_back_or_a_section_of_it(folder: Path, raypd) -> None:
    (folder / "run.yaml").write_text(RUN + "engine:  # which the override fills\n")
    shown = raypd("config", "show", "run.yaml", "engine.max_num_seqs=3").out
    assert "# integer | auto. b: maximum prompts that decode at the same time" in shown
    run = RunConfig.model_validate(yaml.safe_load(shown))
    assert run.engine.max_num_seqs == 3
    assert run.task.categories["book"].attributes[0].name == "author"
    defaults = yaml.safe_load(raypd("config", "show").out)
    assert defaults["decoding"]["stacked_documents"] == 6
    assert defaults["input"]["path"] is None
    (folder / "training").mkdir()
    shown = raypd("config", "show", "training")
    assert shown.code == 0
    assert shown.out.startswith("training:") is True
    assert "\ntask:" not in shown.out
    assert len(re.findall(r"^(?:# )?task:", raypd("config", "show", "task").out, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("cluster.unit_documents", {"cluster": {"unit_documents": 256}}),
        ("decoding.options.draft_tokens", {"decoding": {"options": {"draft_tokens": 5}}}),
        ("task.examples.count", {"task": {"examples": {"count": 3}}}),
        ("task.kind", {"task": {"kind": "extraction"}}),
        ("cascade.model.adapter", {"cascade": {"model": {"adapter": None}}}),
    ],
)
def test_config_show_prints_one_key(key: str, shown: dict[str, object], raypd) -> None:
    out = raypd("config", "show", key).out
    assert yaml.safe_load(out) == shown
    assert "# " in out.splitlines()[key.count(".")]


def test_config_show_prints_what_a_key_means(raypd) -> None:
    out = raypd("config", "show", "cluster.unit_documents").out
    says(" ".join(out.split()), "unit_documents: 256 # integer. Maximum documents of a unit")
    out = raypd("config", "show", "decoding.options").out
    assert "# draft_tokens: 5" in out


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("cluster.unit_document", "did you mean 'cluster.unit_documents'?"),
        ("clustr", "did you mean 'cluster'?"),
        ("unit_documents", "did you mean 'cluster.unit_documents'?"),
        ("xyzzy.plugh", "`raypd config show` lists all keys"),
    ],
)
def test_config_show_of_a_misspelt_key_says_which_was_meant(
    misspelt: str, meant: str, raypd
) -> None:
    refused = raypd("config", "show", misspelt)
    assert refused.code == 2
    says(refused.err, f"{misspelt}: no such configuration file, section or key; {meant}")


def test_every_key_can_be_shown() -> None:
    for key in known_keys():
        shown = yaml.safe_load(render_key(key))
        for name in key.split("."):
            assert name in shown
            shown = shown[name]


def test_a_job_is_the_same_command_and_needs_no_installation(folder: Path) -> None:
    job = str(ROOT / "jobs/extract.py")
    said = ended(start(job, str(folder / "run.yaml"), "input.path=in/*.parquet", PYTHONPATH=""), 2)
    assert "in/*.parquet: no file matches" in said
    assert "Traceback" not in said
    assert "Usage: raypd extract" in ended(start(job, "--help", PYTHONPATH=""))


def test_the_quickstart_is_written_into_a_new_folder(folder: Path, raypd) -> None:
    written = raypd("quickstart", "start")
    assert written.code == 0
    assert "raypd extract start/quickstart/extract.yaml" in written.out
    assert (folder / "start/quickstart/adapter/adapter_model.safetensors").exists()
    # The commands in its comments name the copies.
    named = set()
    for path in (folder / "start").rglob("*.yaml"):
        text = path.read_text()
        assert "configs/" not in text
        named |= set(re.findall(r"start/[\w/]+\.yaml", text))
    assert "start/quickstart/extract.yaml" in named
    assert all((folder / name).exists() for name in named)
    again = raypd("quickstart", "start")
    assert again.code == 2
    assert "start already exists" in again.err


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    titles = ["" if i == 3 else f"title {i}" for i in range(40)]
    return Trial(
        tmp_path, titles, model={"name": "fake", "fake": {"load_seconds": 0, "step_seconds": 0.001}}
    ).file


def test_extract_verify_errors_retry(configuration, tmp_path, raypd, in_process) -> None:
    out = str(tmp_path / "out")
    for words, printed in (
        (("extract", str(configuration)), "1 of 40 documents failed"),
        (("verify", out), "\nok: "),
        (("errors", out), "1  no text in title  [caused by the input]"),
        (("extract", str(configuration), "--retry-errors"), "1 not retried"),
        (
            ("extract", str(configuration), "--all-errors"),
            "retried 1 failed document: 0 ok now, 1 failed again",
        ),
        (("errors", out), "attempts 2"),
    ):
        ended = raypd(*words)
        assert ended.code == 0, (words, ended)
        assert printed in ended.out + ended.err, (words, ended)
        assert ended.out.splitlines()[-1].startswith("Next: "), (words, ended)
    assert verify(out, load_config(configuration)).passed


@pytest.mark.slow
def test_two_nights_as_a_job(configuration, tmp_path) -> None:
    job = ("jobs/nightly.py", str(configuration), f"output.path={tmp_path / 'nightly'}")
    assert "40 new, 0 changed, 0 removed, 0 unchanged; 40 extracted" in ended(start(*job))
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write('{"id": 7, "title": "changed"}\n')
    job += ("cluster.unit_documents=7",)
    assert "0 new, 1 changed, 0 removed, 39 unchanged; 1 extracted" in ended(start(*job))
    assert "nothing new since" in ended(start(*job))
    files = (tmp_path / "nightly/current/files.txt").read_text().splitlines()
    ids = ds.dataset(files, format="parquet").to_table()["id"].to_pylist()
    assert sorted(ids) == sorted(str(i) for i in range(40))


@pytest.mark.parametrize(
    ("titles", "share", "code", "said"),
    [
        (["a"] * 12, 1.0, 0, "12 documents: 12 answered"),
        (
            ["a"] * 14 + [""] * 5 + ["program"],
            1.0,
            0,
            "6 of 20 documents failed (30%), most often because: no text in title\n"
            "`raypd errors {out}` lists them; --retry-errors retries those that may "
            "succeed\n",
        ),
        (
            ["a"] * 9 + [""] * 3,
            1.0,
            0,
            "`raypd errors {out}` lists them; all of them are caused by the input\n",
        ),
        (
            [""] * 12,
            1.0,
            1,
            "no document was answered: 12 of 12 documents failed (100%), most often because: no",
        ),
        (
            ["a"] * 9 + [""] * 3,
            0.2,
            1,
            "more documents failed than cluster.max_failed_share, 0.2: 3 of 12 documents",
        ),
    ],
)
def test_what_a_run_that_has_ended_tells(
    tmp_path, config, in_process, raypd, titles, share, code, said
) -> None:
    made = config(str(write_jsonl(tmp_path / "a.jsonl", titles)), max_failed_share=share)
    (tmp_path / "run.yaml").write_text(made.model_dump_json())
    ended = raypd("extract", str(tmp_path / "run.yaml"))
    assert f"{len(titles)} documents: " in ended.out  # the summary comes first
    assert ended.code == code, ended
    assert said.format(out=tmp_path / "out") in ended.out + ended.err, ended
    assert ("documents failed" in ended.out + ended.err) == ("" in titles)


def test_a_boolean_is_that_of_the_record() -> None:
    record = {
        "Waterproof": True,
        "Decaf": False,
        "Brand": "Acme",
        "Weight in g": 7,
        "Color": None,
    }
    values = [value_row(name, value, "ok", None) for name, value in record.items()]
    row = {
        "id": "1",
        "status": "ok",
        "record": json.dumps(record),
        "values": values,
        "truncated": False,
    }
    assert str(_values(row)) == "Waterproof: true  Decaf: false  Brand: Acme  Weight in g: 7"
