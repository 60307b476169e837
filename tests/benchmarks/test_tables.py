"""The registry of the papers' tables: every command of it can run, and a page keeps the sections that it had."""

from pathlib import Path
from types import SimpleNamespace

from benchmarks import tables
from raypd.config.load import load_config
from raypd.config.yaml_file import parse
from tests.benchmarks.test_judge import finished, texts  # noqa: F401
from tests.processes import ROOT


def test_every_command_is_one_and_every_need_a_step(tmp_path, monkeypatch):
    registry, asked = parse((ROOT / "benchmarks" / "tables.yaml").read_text()), []
    monkeypatch.chdir(ROOT)
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(tables.subprocess, "run", lambda words, **_: asked.append(words[3:]) or done)
    maker = tables.Maker(Path("/data"), tmp_path, None)
    monkeypatch.setattr(maker, "file", lambda name: Path("/data") / name)
    for name, table in registry["tables"].items():
        for step in table.get("needs", []):
            maker.make(step, registry["steps"][step])
        for key, run in table["runs"].items():
            maker.make(f"{name}/{tables._file(key)}", run["run"])
    outputs = [load_config(file, keys).output.path for command, file, *keys in asked if command != "model"]
    assert all(output.startswith(str(tmp_path)) for output in outputs)


def test_a_section_and_its_page(texts, tmp_path):  # noqa: F811
    table = {"title": "T", "columns": ["same answers", "ROUGE-L"], "labels": "labels.jsonl",
             "runs": {"a": {"paper": "1", "run": "-"}, "b": {"paper": 2, "run": "-"}}}  # fmt: skip
    (tmp_path / "labels.jsonl").write_text('{"id": "a", "reference": ["good answers", ""]}\n')
    (tmp_path / "t").mkdir()
    for name, run in zip("ab", texts, strict=True):
        (tmp_path / "t" / name).symlink_to(run)
    text = tables.section("t", table, tables.Maker(tmp_path, tmp_path, None), {})  # nothing is to be made
    assert "| a | 1 |  | 1.000 (1.000 to 1.000) |\n| b | 2 | 25.0% [4-74%] of 4 values | 0.500 (0.500" in text
    registry = {"tables": {"t": table, "u": {"title": "U"}}, "missing": {"V": "no GPU"}}
    page = tables.page("", registry, {"t": text})
    assert "* `u`: U" in page
    assert text in tables.page(page, registry, {"u": "## U\n"})
