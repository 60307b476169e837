"""The registry of input formats: what adding one takes, and that the configuration knows it."""

import gzip
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from raypd.cli import init
from raypd.config import InputConfig
from raypd.config.data import ENDINGS
from raypd.config.yaml_file import parse
from raypd.dataset.formats import (
    FORMATS,
    Columns,
    Fields,
    RowFormat,
    SeenColumns,
    SourceRow,
    settings_by_ending,
)
from raypd.dataset.formats.ranges import RowGroups
from raypd.dataset.jsonl import open_lines
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from raypd.run.unit import Part
from tests.processes import ended, start

KV = """id: mug
title: Mug of clay
description: A mug of clay that holds 0.3 l

id: lamp
title: Lamp
description: A lamp of brass with a cord of two metres

id: vase
title broken
"""


# A new class and a new line of the registry, before anything else of raypd is imported.
ONE_LINE = """
import sys, types
from raypd.config.input_formats import INPUT_FORMATS, InputFormat

INPUT_FORMATS["records"] = InputFormat("records:Records", (".rec",))
INPUT_FORMATS["notes"] = InputFormat("records:Notes", (".note",), setting="files")
module = types.ModuleType("raypd.dataset.formats.records")

def class_named(name):
    if name not in ("Records", "Notes"):
        raise AttributeError(name)
    from raypd.dataset.formats.csv_files import Csv
    return type(name, (Csv,), {})

module.__getattr__ = class_named
sys.modules[module.__name__] = module

from raypd.config import InputConfig
from raypd.dataset.formats import FORMATS, Detector

assert InputConfig(path="goods", format="records").format == "records"
assert InputConfig(path="goods/*.note").format == "files"
assert Detector("auto").detect("goods.rec.gz") == (FORMATS["records"], "gz")
assert Detector("files").detect("goods.note") == (FORMATS["notes"], None)
assert Detector("auto").detect("goods.csv") == (FORMATS["csv"], None)
assert FORMATS["records"].name == "records"
"""


class KeyValue(RowFormat):
    """Blocks of "key: value" lines with a blank line between them."""

    name = "kv"
    endings = (".kv",)

    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        blocks = list(self._blocks(part))
        names = {line.partition(": ")[0] for line in blocks[0].splitlines()}
        return [(1, len(block)) for block in blocks], SeenColumns(sorted(names), is_schema=True)

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        blocks = list(self._blocks(part))
        for number in range(part.start, min(part.end, len(blocks))):
            yield SourceRow(number, f"block {number}", partial(self._fields, blocks[number]))

    def _blocks(self, part: Part) -> Iterator[str]:
        with open_lines(part.path, part.compression, version=part.version) as file:
            yield from file.read().decode().split("\n\n")

    def _fields(self, block: str) -> Fields:
        fields: Fields = {}
        for line in block.splitlines():
            key, separator, value = line.partition(": ")
            if not separator:
                raise ValueError(f"no colon in {line!r}")
            fields[key] = value
        return fields


@pytest.fixture
def kv_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of a format that was added to the registry."""
    monkeypatch.setitem(FORMATS, "kv", KeyValue())
    folder = tmp_path / "goods"
    folder.mkdir()
    (folder / "goods.kv").write_text(KV)
    return folder


def test_an_added_format_is_planned_in_units_of_the_configured_size(kv_folder, config):
    planned = plan(config(str(kv_folder), unit_documents=2))
    assert [unit.expected for unit in planned] == [2, 1]
    assert planned.exact


def test_an_added_format_is_read_and_a_bad_row_is_a_document_with_an_error(kv_folder, config):
    run = config(str(kv_folder), unit_documents=2)
    documents = [document for unit in plan(run) for document in read_unit(unit, run)]
    assert [document.id for document in documents] == ["mug", "lamp", "goods.kv:2"]
    assert documents[1].fields["title"] == "Lamp"
    assert documents[2].error == "goods.kv, block 2: no colon in 'title broken'"


def test_a_missing_column_of_an_added_format_is_reported_when_planning(kv_folder, config):
    with pytest.raises(InputError, match="no column 'body'"):
        plan(config(str(kv_folder), text_columns=["body"]))


def test_an_added_format_may_be_compressed(kv_folder, config, tmp_path):
    (kv_folder / "goods.kv").unlink()
    (kv_folder / "goods.kv.gz").write_bytes(gzip.compress(KV.encode()))
    assert plan(config(str(kv_folder))).documents == 3


def test_raypd_init_finds_the_columns_of_an_added_format(kv_folder, monkeypatch):
    monkeypatch.chdir(kv_folder.parent)
    message = init.run("goods", None, None)
    assert "reads title, description, id id" in message
    section = parse((kv_folder.parent / "goods.yaml").read_text())["input"]
    assert section["id_column"] == "id"
    assert section["text_columns"] == ["title", "description"]
    assert "format" not in section


def test_an_added_format_is_named_in_the_message_about_a_file_of_unknown_type(kv_folder, config):
    (kv_folder / "goods.kv").rename(kv_folder / "goods.xyz")
    with pytest.raises(InputError, match=r"raypd reads \.jsonl, .*\.kv\b.* \(also with"):
        plan(config(str(kv_folder)))


def test_a_line_of_the_registry_tells_the_configuration_and_the_planner_of_a_format():
    ended(start("-c", ONE_LINE))


def test_every_format_is_registered_under_its_name():
    assert {name: format.name for name, format in FORMATS.items()} == {
        name: name for name in FORMATS
    }


def test_no_two_formats_of_one_setting_take_the_same_ending():
    seen = [(format.setting, end) for format in FORMATS.values() for end in format.endings]
    assert len(seen) == len(set(seen))


def test_the_configuration_accepts_every_format_that_a_setting_names():
    settings = set(get_args(InputConfig.model_fields["format"].annotation))
    by_default = {format.name for format in FORMATS.values() if format.setting == "auto"}
    assert by_default <= settings
    assert set(settings_by_ending()) <= settings


def test_the_configuration_tells_a_setting_from_the_same_endings_as_the_formats():
    endings: dict[str, dict[str, str]] = {}
    for format in FORMATS.values():
        if format.setting in settings_by_ending():
            endings.setdefault(format.setting, {}).update(
                dict.fromkeys(format.endings, format.name)
            )
    assert endings == ENDINGS
