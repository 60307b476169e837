"""What YAML makes of a word without quotes is taken as it was meant, or named with its line and with what to write."""

from pathlib import Path

import pytest

from raypd.config import RunConfig
from raypd.config.load import load_config
from raypd.errors import ConfigError

RUN = """\
input: {{path: a.jsonl}}
output: {{path: out}}
cost: {{deadline: {deadline}}}
task:
  categories:
    shoes:
      attributes:
        - {attribute}
        - {{name: Brand}}
"""


def load(folder: Path, attribute: str = "{name: Color}", deadline: str = "null", *overrides: str) -> RunConfig:
    (folder / "run.yaml").write_text(RUN.format(attribute=attribute, deadline=deadline))
    return load_config(folder / "run.yaml", list(overrides))


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("{name: Lit, type: enum, values: [true, no]}", "values.0: YAML reads it as the boolean true, not as text"),
        ("{name: Lit, type: enum, values: [1, 2.50]}", "values.1: YAML reads it as the number 2.5, not as text"),
        ("{name: Day, type: enum, values: [2026-11-30]}", "values.0: YAML reads it as the date 2026-11-30, not as"),
        ("{name: false}", "name: YAML reads it as the boolean false, not as text: quote it"),
        ("{name: Lit, type: enum, values: ['on ', false]}", "values.1: YAML reads it as the boolean false"),
        ("{name: Lit, type: enum, values: ['red ', blue]}", "'Lit': enum values .* without blanks at their ends"),
        ("{name: '   '}", "'   ': a name .* without blanks at its ends"),
        ("{name: 'Color '}", "'Color ': a name .* without blanks at its ends"),
        ("{name: BRAND}", "two attributes are named 'Brand': 'BRAND' and 'Brand' differ in case or punctuation alone"),
        ("{name: brand_}", "two attributes are named 'Brand': 'brand_' and 'Brand' differ in case or punctuation"),
        ("{name: Brand}", "two attributes are named 'Brand'$"),
        (f"{{name: {'9' * 5000}}}", r"run.yaml:8: not valid YAML: a number has more digits than can be read$"),
    ],
)
def test_names_and_values_that_are_no_text_or_not_told_apart(tmp_path: Path, attribute: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml:\d+: .*{words}" if "run.yaml" not in words else words):
        load(tmp_path, attribute)


def test_quoted_they_are_values(tmp_path: Path) -> None:
    made = load(tmp_path, "{name: Lit, type: enum, values: ['yes', 'no', '1', '2.50']}").task.categories["shoes"]
    assert made.attributes[0].values == ["yes", "no", "1", "2.50"]


@pytest.mark.parametrize(("written", "meant"), [
    ("2026-11-30", "2026-11-30"), ("2026-11-30 18:00:00", "2026-11-30T18:00:00"),
    ("2026-11-30T18:00:00Z", "2026-11-30T18:00:00+00:00"), ("2026-11-30T18:00", "2026-11-30T18:00"),
    ("8h", "8h")])  # fmt: skip
def test_a_deadline_is_taken_as_yaml_reads_it(tmp_path: Path, written: str, meant: str) -> None:
    assert load(tmp_path, deadline=written).cost.deadline == meant
    assert load(tmp_path, "{name: Color}", "null", f"cost.deadline={written}").cost.deadline == meant


@pytest.mark.parametrize(("written", "words"), [
    ("soon", r"run.yaml:3: cost.deadline: 'soon' is neither a time .* nor a duration"),
    ("18:00", r"run.yaml:3: cost.deadline: '18:00' is neither a time"),
    ("2026-13-45", r"run.yaml:3: not valid YAML: month must be in 1..12")])  # fmt: skip
def test_a_deadline_that_is_none_is_refused_with_its_line(tmp_path: Path, written: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, deadline=written)


def test_cuda_graphs_are_of_one_attention(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.* cuda_graphs needs engine\.attention: triton"):
        load(tmp_path, "{name: Color}", "null", "engine.cuda_graphs=true")
