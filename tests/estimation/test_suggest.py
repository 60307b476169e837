"""`raypd schema suggest`: what a model lists of documents becomes categories that an extraction
takes.
"""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from raypd.cli.main import app
from raypd.errors import ConfigError, InputError, RunError
from raypd.estimation import suggest
from tests.runs import run_config, says, write_rows
from tests.tiny import save_tiny

COLORS = ("red", "blue", "green")
WORDS = ["input.text_columns=[title]", "model.name=fake"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Fifteen boots and four teas."""
    boot = "Acme{0} boot, {1}, size {2} mm, waterproof, made with much care for long walks"
    rows = [
        {"category": "boots", "title": boot.format(n, COLORS[n % 3], 30 + n)} for n in range(15)
    ]
    rows += [
        {"category": "tea", "title": f"Leaf {n}: a tea of kind {kind}"}
        for n, kind in enumerate("abcd")
    ]
    return str(write_rows(tmp_path / "in.jsonl", rows))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a model: it lists what the boots state, in many ways, and what they do not."""
    monkeypatch.setattr(
        suggest, "_answers", lambda _, texts: [_listed(n, text) for n, text in enumerate(texts)]
    )


def _listed(n: int, text: str) -> str:
    words = text.replace(",", "").replace(":", "").split()
    if "tea" in text:
        return "\n".join(f"fact {k}: {word}" for k, word in enumerate(words * 3))
    brand, _, color, _, size = words[:5]
    name = ("Colour tone", "colour-tone", "Colour tone")[n % 3]
    listed = (
        f"Here is the list\n- brand: {brand}\n{n}. **{name}**: {color}\nsize: {size} "
        "mm\nwaterproof: yes\n"
    )
    others = "warranty: 2 year\nbrand: Acme\nprice: N/A\na very long name of an attribute"
    return f"{listed}{others}: {color}\nsole: rubber\ntitle: {text}\n"


def test_what_many_documents_state_is_proposed_with_a_type(data: str, listed: None) -> None:
    result, again = (CliRunner().invoke(app, ["schema", "suggest", data, *WORDS]) for _ in range(2))
    assert result.exception is None, result.output
    text = result.stdout
    assert again.stdout == text
    tree = yaml.safe_load(text)
    assert [one["name"] for one in tree["boots"]["attributes"]] == [
        "brand",
        "Colour tone",
        "size",
        "waterproof",
    ]
    brand, color, size, waterproof = tree["boots"]["attributes"]
    # A text.
    assert set(brand) == {"name", "description"}
    assert brand["description"][:12] == "such as Acme"
    assert color["type"] == "enum"
    assert sorted(color["values"]) == sorted(COLORS)
    # Of 24.
    assert size["type"] == "number"
    assert waterproof["type"] == "boolean"
    assert len(tree["tea"]["attributes"]) == 16
    # of a boot: the first line, the long name and the title are none, and warranty, price and sole
    # are not in it
    says(
        text,
        "# in 15 of 15 documents, 100%",
        "45 are not of the form `attribute: value`",
        "45 name a value that is not in the document",
    )
    # an extraction takes it as it is
    made = run_config({"categories": tree}, data, input={"text_columns": ["title"]})
    assert len(made.task.categories["boots"].attributes) == 4  # type: ignore[union-attr]


def test_one_category_and_a_file_that_is_not_written_over(
    data: str, listed: None, tmp_path: Path
) -> None:
    to = tmp_path / "schema.yaml"
    words = [
        "schema",
        "suggest",
        data,
        *WORDS,
        "--category",
        "boots",
        "--output",
        str(to),
    ]
    assert CliRunner().invoke(app, words).exception is None
    assert list(yaml.safe_load(to.read_text())) == ["boots"]
    to.write_text("mine")
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, ConfigError)
    assert "already exists" in str(refused)
    assert to.read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "--force"]).exception is None
    assert list(yaml.safe_load(to.read_text())) == ["boots"]
    with pytest.raises(
        InputError, match="no document has the category 'shoes'; the categories are boots, tea"
    ):
        suggest.suggest(data, "shoes", 8, WORDS)


def test_a_model_that_lists_nothing_is_told_so(data: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    overrides = ["input.text_columns=[title]", f"model.name={model}", "decoding.max_new_tokens=20"]
    with pytest.raises(
        RunError, match=r"named nothing that several documents state: of .* lines? that it wrote"
    ):
        suggest.suggest(data, None, 4, overrides)


@pytest.mark.slow
def test_the_small_model_proposes_what_stands_in_the_documents(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "configs/quickstart/products.jsonl"
    found, about = suggest.suggest(str(source), "headphones", 8, ["decoding.max_new_tokens=64"])
    tree = yaml.safe_load(found.as_yaml(about))
    titles = [json.loads(line) for line in source.read_text().splitlines()]
    there = suggest.bare(" ".join(f"{row['title']} {row['description']}" for row in titles))
    assert tree["headphones"]["attributes"]
    for attribute in found.categories["headphones"].proposed():
        assert all(
            suggest.bare(value) in there or value in ("yes", "no") for value in attribute.values
        )
