"""The table of families of models, as it is printed and as it is in the documentation."""

from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.decoding import FAMILIES
from raypd.models import families_table
from tests.processes import ROOT


def test_the_page_has_the_table_of_the_registry() -> None:
    output = CliRunner().invoke(app, ["model", "list"]).output.strip()
    printed, _, last_line = output.rpartition("\n")
    assert last_line.startswith("Next: ")
    assert printed == families_table()
    assert printed in (ROOT / "docs" / "models.md").read_text(), (
        "put the table that `raypd model list` prints into docs/models.md, under Families"
    )
    for family in FAMILIES:
        assert f"| {family.name} |" in printed
