"""infra/fill.py, and that every placeholder of every file has its line in the example settings."""

import subprocess
import sys

import pytest

from tests.infra.filled import FILL, INFRA, ROOT, SETTINGS

FILES = [p for p in sorted(INFRA.rglob("*")) if p.is_file() and p.suffix in {".yaml", ".yml", ".json", ".service"}]


def test_every_placeholder_is_in_the_example_settings_and_every_setting_is_used():
    used = {name for path in FILES for name in FILL.PLACEHOLDER.findall(path.read_text())}
    assert used <= set(SETTINGS)
    assert set(SETTINGS) - used == set()


def test_shell_variables_and_policy_variables_stay():
    text = "$HOME ${HOME} ${aws:username} "
    assert FILL.fill(text + "${RAYPD_RUN}", {"RAYPD_RUN": "a"}) == text + "a"


def test_missing_values_are_named_all_at_once():
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
    command = [sys.executable, "-S", str(INFRA / "fill.py"), str(settings)]
    done = subprocess.run([*command, str(INFRA / "cluster.yaml")], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RAYPD_AMI" in done.stderr
    (tmp_path / "f").write_text("run: ${RAYPD_RUN}\n")
    done = subprocess.run([*command, str(tmp_path / "f")], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "run: trial\n")
