"""Arrow files, and files that a function of the user's reads."""

from pathlib import Path

import pyarrow as pa
import pytest

from raypd.config import RunConfig
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, InputError
from tests.runs import config_tree

READER = """
import csv, io
def cards(name, file):
    for number, block in enumerate(file.read().decode().split("---")):
        if block == "end": raise ValueError("unknown card")
        yield {"id": f"{name}/{number}", "title": block} if block != "?" else [block]
"""


def config(folder: Path, **source) -> RunConfig:
    given = {"category": "c", "category_column": None, "text_columns": ["title"], **source}
    return RunConfig.model_validate(config_tree(path=folder, input=given, cluster={"unit_documents": 70}))


def documents(config: RunConfig) -> list[list]:
    return [read_unit(unit, config) for unit in plan(config)]


@pytest.mark.parametrize("write", [pa.ipc.new_stream, pa.ipc.new_file])
def test_rows_of_arrow_files(tmp_path: Path, write) -> None:
    table = pa.Table.from_pylist([{"id": n, "title": f"t{n}", "more": [n]} for n in range(200)])
    with write(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=30)
    units = documents(config(tmp_path))
    assert [d.fields for unit in units for d in unit] == [{"id": n, "title": f"t{n}"} for n in range(200)]
    assert max(map(len, units)) <= 70
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"ARROW1 and nothing more")
    with pytest.raises(InputError, match=r"data-00000-of-00001.arrow: cannot be read as Arrow: "):
        plan(config(tmp_path))


def test_files_that_a_function_of_ones_own_reads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_cards.py").write_text(READER)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.cards").write_text("---".join(["x", "?", *"y" * 98]))
    made = config(tmp_path / "in", reader="shop_cards:cards")
    units = documents(made)
    assert [len(unit) for unit in units] == [70, 30]
    assert [(d.id, d.error) for d in units[0][:3]] == [
        ("a.cards/0", None), ("a.cards:1", "a.cards, row 1: input.reader gave a list, not a dict"), ("a.cards/2", None),
    ]  # fmt: skip
    (tmp_path / "in/a.cards").write_text("x---end")
    with pytest.raises(InputError, match=r"a.cards: input.reader shop_cards:cards: ValueError: unknown card"):
        plan(made)
    with pytest.raises(ConfigError, match=r"input.reader: shop_cards:card: cannot be imported: AttributeError"):
        plan(config(tmp_path / "in", reader="shop_cards:card"))
