"""Every file of infra/: its placeholders, its line in the README, no key twice; and infra/fill.py itself."""

import subprocess
import sys

import pytest
import yaml

from tests.infra.filled import FILL, INFRA, ROOT, SETTINGS

FILES = [path for path in sorted(INFRA.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


class NoKeyTwice(yaml.CSafeLoader):
    """PyYAML takes the last of two; Kubernetes refuses."""

    def construct_mapping(self, node, deep=False):
        keys = [k.value for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {sorted(keys)}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_has_its_line_in_the_readme_and_no_key_twice(path):
    assert path.name == "README.md" or f"`{path.relative_to(INFRA)}`" in (INFRA / "README.md").read_text()
    if path.suffix in {".yaml", ".yml"}:
        assert list(yaml.load_all(path.read_text(), NoKeyTwice))


def test_every_placeholder_is_in_the_example_settings_and_every_setting_is_used():
    filled = [path for path in FILES if path.suffix in {".yaml", ".yml", ".json", ".service"}]
    assert {name for path in filled for name in FILL.PLACEHOLDER.findall(path.read_text())} == set(SETTINGS)


def test_other_variables_stay_and_missing_values_are_named_all_at_once():
    text = "$HOME ${HOME} ${aws:username} "
    assert FILL.fill(text + "${RAYPD_RUN}", {"RAYPD_RUN": "a"}) == text + "a"
    with pytest.raises(ValueError, match="RAYPD_A, RAYPD_B"):
        FILL.fill("${RAYPD_B}${RAYPD_A}", {"RAYPD_B": ""})
    assert FILL.fill("${RAYPD_A}", {}, frozenset({"RAYPD_A"})) == "${RAYPD_A}"


def test_a_line_that_is_no_setting_is_refused(tmp_path):
    (tmp_path / "s.env").write_text("# comment\n\nRAYPD_A=1=2\nexport RAYPD_B=2\n")
    with pytest.raises(ValueError, match=r"s\.env:4"):
        FILL.read_settings(tmp_path / "s.env")
    (tmp_path / "s.env").write_text("RAYPD_A=1=2\n")
    assert FILL.read_settings(tmp_path / "s.env") == {"RAYPD_A": "1=2"}


def test_command_line(tmp_path):
    settings = tmp_path / "s.env"
    settings.write_text("RAYPD_RUN=trial\n")
    (tmp_path / "f").write_text("run: ${RAYPD_RUN}\n")
    for file, said in ((INFRA / "cluster.yaml", (2, "", True)), (tmp_path / "f", (0, "run: trial\n", False))):
        command = [sys.executable, "-S", str(INFRA / "fill.py"), str(settings), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout, "RAYPD_AMI" in done.stderr) == said
