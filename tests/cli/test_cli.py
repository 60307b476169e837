"""The command line as a user types it: errors that name what is wrong, exit codes, nothing printed twice."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from raypd.config import RunConfig
from tests.processes import ROOT, ended, start

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
        (["in/a.jsonl"], "in/a.jsonl: give the YAML of a run, or say what to extract from this data: --schema"),
        (["run.yaml", "--schema", "s.json"], "run.yaml: has its own task"),
        (["run.yaml", "output.partition={_x: y}"], "a key is of a-z, 0-9 and _, as Athena wants it, and begins with"),
        (["nope.yaml"], "nope.yaml: no such configuration file; did you mean run.yaml?"),
        (["run.yaml", "engine.unit_documents=8"], "unit_documents: unknown key; there is cluster.unit_documents"),
        (["run.yaml", "decoding.metod=autoregressive"], "decoding.metod: unknown key; did you mean 'method'?"),
        (["run.yaml", "input.path=in/*.parquet"], "in/*.parquet: no file matches"),
        (["wrong.yaml"], "wrong.yaml:11: task.categories.book.attributes.0.nmae: unknown key; did you mean 'name'?"),
        (["run.yaml", "engine.max_num_seqs=0"], "engine.max_num_seqs: give a whole number from 1 on, or auto"),
        (["run.yaml", "input.path=in/b.jsonl"], "no such file or folder; did you mean"),
        (["run.yaml", "input.text_columns=[titel]"], "a.jsonl: no column 'titel'"),
        (["run.yaml", "decoding.method=hyper_paralel"], "decoding.method: did you mean 'hyper_parallel'? choose from"),
        (["run.yaml", "decoding.max_value_tokens=0"], "decoding.max_value_tokens: Input should be greater"),
        (["run.yaml", "output.path=run.yaml"], "run.yaml: is a file; give a folder"),
        (["run.yaml", "input.path=ftp://b/a.jsonl"], "ftp:// is not a storage"),
        (["run.yaml", "task.categories.book.attributes=[{name: 'a\tb'}]"], "a name is printable text without quotes"),
    ],
)
def test_what_cannot_run_is_refused_in_plain_words(folder: Path, raypd, words: list[str], message: str) -> None:
    (folder / "wrong.yaml").write_text(RUN.replace("name: author", "nmae: author"))
    code, out, err = raypd("extract", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert not (folder / "out").exists()


def test_data_and_a_schema_need_no_yaml(folder: Path, raypd, in_process) -> None:
    (folder / "book.json").write_text('{"title": "book", "properties": {"author": {"type": "string"}}}')
    words = ["in/a.jsonl", "--schema", "book.json", "-o", "out", "--model", "fake", "input.text_columns=[title]"]
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


def test_an_interruption_is_one_line(folder: Path, raypd, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raypd.cli.run.load_config", interrupted)
    assert raypd("extract", "run.yaml") == (130, "", "interrupted\n")


def test_version_help_and_mistyped_commands(raypd) -> None:
    assert raypd("--version").out.startswith("raypd 0.")
    assert "extract" in raypd("--help").out
    code, _, err = raypd("extrakt")
    assert code == 2
    assert "extract" in err


def test_the_readme_puts_the_command_on_the_path() -> None:
    """The line that it names, in a new shell, after `make setup`."""
    (line,) = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if "/activate" in line]
    if not (ROOT / line.split()[1]).exists():
        pytest.skip("needs the virtual environment of `make setup`")
    command = f"{line} && command -v raypd"
    path = subprocess.check_output(["bash", "-c", command], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, text=True)
    assert Path(path.strip()).parent.name == "bin"
    assert ".venv" in path


def test_config_show_is_yaml_that_reads_back(folder: Path, raypd) -> None:
    (folder / "run.yaml").write_text(RUN + "engine:  # which the override fills\n")
    shown = raypd("config", "show", "run.yaml", "engine.max_num_seqs=3").out
    assert "# integer | auto. b: most prompts in decoding at the same time" in shown
    run = RunConfig.model_validate(yaml.safe_load(shown))
    assert run.engine.max_num_seqs == 3
    assert run.task.categories["book"].attributes[0].name == "author"
    defaults = yaml.safe_load(raypd("config", "show").out)
    assert (defaults["decoding"]["stacked_documents"], defaults["input"]["path"]) == (6, None)


def test_config_show_prints_a_section(folder: Path, raypd) -> None:
    shown = raypd("config", "show", "training")
    assert (shown.code, shown.out.startswith("training:"), "\ntask:" in shown.out) == (0, True, False)
    assert len(re.findall(r"^(?:# )?task:", raypd("config", "show", "task").out, re.MULTILINE)) == 3


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
    again = raypd("quickstart", "start")
    assert (again.code, "start: is there already" in again.err) == (2, True)
