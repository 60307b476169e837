"""The public surface of the room: it is complete, and importing it is cheap."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from raypd import decoding
from tests.processes import ended, start


@pytest.mark.parametrize("name", sorted(decoding._MODULE_OF))
def test_an_exported_name_is_the_one_of_its_module(name):
    module = import_module(f"raypd.decoding.{decoding._MODULE_OF[name]}")
    assert getattr(decoding, name) is getattr(module, name)


def test_type_checkers_see_the_names_that_are_exported():
    tree = ast.parse(Path(decoding.__file__).read_text())
    for_checkers = {
        (node.module.removeprefix("raypd.decoding."), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("raypd.")
        for alias in node.names
    }
    assert for_checkers == {(module, name) for name, module in decoding._MODULE_OF.items()}


def test_no_exported_name_is_hidden_by_a_module_of_the_room():
    modules = {path.stem for path in Path(decoding.__file__).parent.iterdir()}
    assert not modules & set(decoding._MODULE_OF)


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_like_this"):
        decoding.nothing_like_this  # noqa: B018


def test_the_room_and_the_registry_are_imported_without_torch():
    code = (
        "import sys; from raypd.decoding import REGISTRY; "
        "assert REGISTRY; assert 'torch' not in sys.modules"
    )
    ended(start("-c", code))


def test_other_rooms_find_what_they_use_in_the_surface():
    used = set()
    room = Path(decoding.__file__).parent
    for file in room.parent.rglob("*.py"):
        if room in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("raypd.decoding."):
                used |= {alias.name for alias in node.names}
    # avx512.is_best is read beside `native` by the check of a machine.
    assert used - {"is_best"} <= set(decoding._MODULE_OF)
    assert len(used) > 30
    assert "raypd.decoding" in sys.modules
