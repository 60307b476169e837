"""What a configuration leaves open is as the card beside its weights says."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from raypd.config.card import CARD
from raypd.config.load import load_config, make_config
from raypd.errors import ConfigError, ModelError
from raypd.run import manifest
from raypd.tasks.card import check_card, untrained
from raypd.tasks.prompting import messages, tag_of, template_text
from tests.processes import ROOT

PRODUCT = hashlib.sha256(template_text("product", "extraction.j2").encode()).hexdigest()[:16]


def config(*overrides: str, **task: Any) -> Any:
    tree = {"categories": {"shoes": {"attributes": [{"name": "Brand"}]}}} if not task.get("kind") else {}
    return make_config({"input": {"path": "-"}, "output": {"path": "-"}, "task": {**tree, **task}}, list(overrides))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    card = {"task": "extraction", "method": "hyper_parallel", "template": PRODUCT}
    (tmp_path / CARD).write_text(json.dumps(card))
    return tmp_path


@pytest.mark.parametrize(("overrides", "kind", "method"), [
    ([], None, "guided"), (["decoding.method=auto"], None, "guided"), (["model=fake"], None, "hyper_parallel"),
    (["training.epochs=1"], None, "hyper_parallel"), (["model.endpoint.url=http://host/v1"], None, "autoregressive"),
    (["engine.kind=vllm"], None, "guided"), (["engine.kind=vllm"], "question_answering", "autoregressive"),
    ([], "question_answering", "intra_prompt"), ([], "generation", "autoregressive"),
    (["decoding.method=hyper_parallel"], None, "hyper_parallel")])  # fmt: skip
def test_without_a_card_the_method_is_one_that_any_weights_can_do(overrides, kind, method) -> None:
    assert config(*overrides, **({"kind": kind} if kind else {})).decoding.method == method


def test_a_card_says_method_and_template(adapter: Path) -> None:
    trained = config(f"model.adapter={adapter}")
    assert (trained.decoding.method, trained.task.template) == ("hyper_parallel", "product")
    assert "product details" in messages(trained.task)["shoes"]
    assert tag_of(trained.task) == "product"
    assert untrained(trained) is None
    assert config(f"model={adapter}").decoding.method == "hyper_parallel"
    assert config(f"model.adapter={adapter}", "decoding.method=guided").decoding.method == "guided"
    assert config(f"model.adapter={adapter}", kind="generation").decoding.method == "autoregressive"  # of another task
    (adapter / CARD).write_text("[")  # which the check of the card refuses
    assert config(f"model.adapter={adapter}").decoding.method == "guided"


def test_a_card_says_the_skeleton_and_another_is_refused(adapter: Path) -> None:
    card = json.loads((adapter / CARD).read_text()) | {"decoding": {"skeleton": "slots"}}
    (adapter / CARD).write_text(json.dumps(card))
    name = f"model.adapter={adapter}"
    assert (config(name).decoding.skeleton, config(name, "decoding.method=guided").decoding.skeleton) == (
        "slots",
        "keys",
    )
    check_card(config(name))
    with pytest.raises(ModelError, match=r"decoding\.skeleton keys.*the run has slots"):
        check_card(load_config(ROOT / "configs/quickstart/extract.yaml", ["decoding.skeleton=slots"]))
    with pytest.raises(ModelError, match=r"decoding\.skeleton slots.*the run has keys"):
        check_card(config(name, "decoding.skeleton=keys"))


def test_a_run_that_took_its_template_from_a_card_reads_back(adapter: Path) -> None:
    trained = config(f"model.adapter={adapter}")
    assert make_config(manifest.recorded(trained)).fingerprint() == trained.fingerprint()


def test_the_quickstart_gets_the_words_that_its_adapter_was_trained_with() -> None:
    quickstart = load_config(ROOT / "configs/quickstart/extract.yaml")
    assert (quickstart.decoding.method, quickstart.task.template) == ("hyper_parallel", "product")
    assert load_config(ROOT / "configs/quickstart/extract.yaml", ["model.adapter=null"]).decoding.method == "guided"


def test_weights_without_a_card_are_no_match_for_hyper_parallel() -> None:
    assert "has no card that says it was trained for it" in str(untrained(config("decoding.method=hyper_parallel")))
    assert untrained(config()) is untrained(config("model=fake")) is None


def test_the_prompt_speaks_of_documents_and_begins_with_the_instruction() -> None:
    (message,) = messages(config().task).values()
    assert "product" not in message
    assert "listing" not in message
    assert tag_of(config().task) == "document"
    (message,) = messages(config(instruction="Read support tickets.").task).values()
    assert message.startswith("Read support tickets.\n")
    made = [config(), config(instruction="Read."), config(template="product")]
    assert len({one.fingerprint() for one in made}) == 3
    with pytest.raises(ConfigError, match="the template `product` has its own"):
        config(instruction="Read.", template="product")
