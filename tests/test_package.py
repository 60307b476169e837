"""What is installed: the wheel has all files, and its dependencies all packages that it imports."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROUGHT = {"botocore", "markupsafe", "tokenizers", "urllib3"}  # by boto3, jinja2, transformers, requests
OPTIONAL = {"triton"}  # comes with torch where there is a GPU


def test_the_wheel_has_every_file_of_the_package_and_the_configurations(tmp_path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=240, cwd=tmp_path)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tracked = subprocess.run(["git", "ls-files", "raypd", "configs"], cwd=ROOT, check=True, capture_output=True)
    files = tracked.stdout.decode().splitlines()
    wanted = {f"raypd/{file}" if file.startswith("configs/") else file for file in files} - {"raypd/configs"}
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
            assert not {"fcntl", "resource"} & {*names}, f"{file}: not on every system: import it where it is used"
            for name in {name.partition(".")[0] for name in names} - {"raypd", *sys.stdlib_module_names, *OPTIONAL}:
                owners = {owner.lower().replace("_", "-") for owner in distributions[name]}
                assert owners & (required | BROUGHT), f"{file}: {name} is in no dependency"
