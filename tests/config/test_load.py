"""What YAML makes of a word without quotes; and what is left open is as the card beside the weights
says.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from raypd.config import RunConfig
from raypd.config.load import load_config, make_config, value_at, with_changes
from raypd.config.model_card_file import CARD
from raypd.config.sections import with_current_keys
from raypd.errors import ConfigError, ModelError
from raypd.tasks.model_card import check_card, untrained
from raypd.tasks.prompting import messages, template_text
from tests.processes import ROOT
from tests.runs import config_tree

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
TEMPLATE = hashlib.sha256(template_text(None, "extraction.j2").encode()).hexdigest()[:16]


def load(
    folder: Path, attribute: str = "{name: Color}", deadline: str = "null", *overrides: str
) -> RunConfig:
    (folder / "run.yaml").write_text(RUN.format(attribute=attribute, deadline=deadline))
    return load_config(folder / "run.yaml", list(overrides))


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        (
            "{name: Lit, type: enum, values: [true, no]}",
            "values.0: YAML reads it as the boolean true, not as text",
        ),
        (
            "{name: Lit, type: enum, values: [1, 2.50]}",
            "values.1: YAML reads it as the number 2.5, not as text",
        ),
        (
            "{name: Day, type: enum, values: [2026-11-30]}",
            "values.0: YAML reads it as the date 2026-11-30, not as",
        ),
        ("{name: false}", "name: YAML reads it as the boolean false, not as text: quote it"),
        (
            "{name: Lit, type: enum, values: ['on ', false]}",
            "values.1: YAML reads it as the boolean false",
        ),
        (
            "{name: Lit, type: enum, values: ['red ', blue]}",
            "'Lit': enum values .* without blanks at either end",
        ),
        ("{name: '   '}", "'   ': a name .* without blanks at either end"),
        ("{name: 'Color '}", "'Color ': a name .* without blanks at either end"),
        (
            "{name: BRAND}",
            "two attributes are named 'Brand': 'BRAND' and 'Brand' differ only in case or "
            "punctuation",
        ),
        (
            "{name: brand_}",
            "two attributes are named 'Brand': 'brand_' and 'Brand' differ only in case or "
            "punctuation",
        ),
        ("{name: Brand}", "two attributes are named 'Brand'$"),
        (
            f"{{name: {'9' * 5000}}}",
            r"run.yaml:8: not valid YAML: a number has more digits than can be read$",
        ),
    ],
)
def test_names_and_values_that_are_no_text_or_not_told_apart(
    tmp_path: Path, attribute: str, words: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"run\.yaml:\d+: .*{words}" if "run.yaml" not in words else words
    ):
        load(tmp_path, attribute)


def test_quoted_they_are_values(tmp_path: Path) -> None:
    made = load(
        tmp_path, "{name: Lit, type: enum, values: ['yes', 'no', '1', '2.50']}"
    ).task.categories["shoes"]
    assert made.attributes[0].values == ["yes", "no", "1", "2.50"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cost.budgit_usd=3",
            "cost.budgit_usd=... on the command line: unknown key; did you mean 'budget_usd'?",
        ),
        (
            "cost.budget_usd=-3",
            "cost.budget_usd=... on the command line: Input should be greater than 0 (it is -3)",
        ),
        (
            "cost={budgit_usd: 3}",
            "cost=... on the command line: cost.budgit_usd: unknown key; did you mean "
            "'budget_usd'?",
        ),
        (
            "cluster.min_workers=3",
            "cluster.min_workers=... on the command line: cluster: min_workers is above "
            "max_workers",
        ),
        (
            "input.reader=module:read",
            "{file}:1, with input.reader=... on the command line: input: reader: reads files of "
            "any format; leave format at auto",
        ),
    ],
)
def test_a_wrong_override_is_named_in_place_of_a_line_of_the_file(
    tmp_path: Path, override: str, message: str
) -> None:
    # The file has a section `cost`, but none `cluster`.
    file = tmp_path / "run.yaml"
    text = RUN.format(attribute="{name: Color}", deadline="null")
    file.write_text(text.replace("{path: a.jsonl}", "{path: a.jsonl, format: jsonl}"))
    with pytest.raises(ConfigError) as error:
        load_config(file, [override])
    assert str(error.value) == message.format(file=file)


def test_a_wrong_key_of_the_file_keeps_its_line_beside_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(attribute="{name: Color}", deadline="soon"))
    with pytest.raises(ConfigError) as error:
        load_config(file, ["cost.budget_usd=1", "input.path=b.jsonl"])
    assert str(error.value).startswith(f"{file}:3: cost.deadline: ")


SCHEMA_RUN = """\
input: {path: a.jsonl}
output: {path: out}
task: {KEY: schema.yaml}
"""


@pytest.mark.parametrize(
    ("key", "schema", "message"),
    [
        ("schema", "- Brand\n- {name: Color, typ: text}\n", "2: task.schema.attributes.1.typ"),
        (
            "schema",
            "attributes:\n- Brand\n- name: Color\n  typ: text\n",
            "4: task.schema.attributes.1.typ",
        ),
        (
            "categories_file",
            "shoes:\n  attributes:\n  - {name: Color, typ: text}\n",
            "3: task.categories.shoes.attributes.0.typ",
        ),
    ],
)
@pytest.mark.parametrize("by_override", [False, True])
def test_a_mistake_in_the_file_of_a_schema_is_named_with_its_line_there(
    tmp_path: Path, key: str, schema: str, message: str, by_override: bool
) -> None:
    file = tmp_path / "schema.yaml"
    file.write_text(schema)
    run = tmp_path / "run.yaml"
    run.write_text(SCHEMA_RUN.replace("KEY", key))
    overrides = []
    if by_override:
        run.write_text(SCHEMA_RUN.replace("{KEY: schema.yaml}", "{}"))
        overrides = [f"task.{key}={file}"]
    with pytest.raises(ConfigError) as error:
        load_config(run, overrides)
    assert str(error.value) == f"{file}:{message}: unknown key; did you mean 'type'?"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2026-11-30", "2026-11-30"),
        ("2026-11-30 18:00:00", "2026-11-30T18:00:00"),
        ("2026-11-30T18:00:00Z", "2026-11-30T18:00:00+00:00"),
        ("2026-11-30T18:00", "2026-11-30T18:00"),
        ("8h", "8h"),
    ],
)
def test_a_deadline_is_taken_as_yaml_reads_it(tmp_path: Path, written: str, meant: str) -> None:
    assert load(tmp_path, deadline=written).cost.deadline == meant
    assert (
        load(tmp_path, "{name: Color}", "null", f"cost.deadline={written}").cost.deadline == meant
    )


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("soon", r"run.yaml:3: cost.deadline: 'soon' is neither a time .* nor a duration"),
        ("18:00", r"run.yaml:3: cost.deadline: '18:00' is neither a time"),
        ("2026-13-45", r"run.yaml:3: not valid YAML: month must be in 1..12"),
    ],
)
def test_a_deadline_that_is_none_is_refused_with_its_line(
    tmp_path: Path, written: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, deadline=written)


@pytest.mark.parametrize(
    ("words", "override"),
    [
        (r"cuda_graphs needs engine\.attention: triton", "engine.cuda_graphs=true"),
        (
            r"stable: needs engine\.kind: raypd and engine\.attention",
            "engine={stable: true, attention: sdpa}",
        ),
        (r"stable: needs engine\.kind: raypd", "engine={stable: true, kind: vllm}"),
    ],
)
def test_an_engine_that_cannot_be_so_is_refused(tmp_path: Path, words: str, override: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.* {words}"):
        load(tmp_path, "{name: Color}", "null", override)


@pytest.mark.parametrize(
    ("words", "override"),
    [
        ("model.kv_cache=.*choose from auto, fp8", "model.kv_cache=int8"),
        (
            "model=.* kv_cache fp8: the server of model.endpoint has its own cache",
            "model={kv_cache: fp8, endpoint: {url: 'http://host/v1'}}",
        ),
        (
            "cascade.model=.* kv_cache fp8: the server of model.endpoint",
            "cascade.model={kv_cache: fp8, endpoint: {url: 'http://host/v1'}}",
        ),
    ],
)
def test_a_cache_that_cannot_be_so_is_refused(tmp_path: Path, words: str, override: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, "{name: Color}", "null", override)


@pytest.mark.parametrize(
    ("words", "key"),
    [("engine.stable", "stable: true"), ("engine.attention avx512", "attention: avx512")],
)
def test_kernels_for_bfloat16_alone_take_no_cache_in_8_bits(
    tmp_path: Path, words: str, key: str
) -> None:
    engine = f"engine={{{key}}}"
    load(tmp_path, "{name: Color}", "null", engine)
    with pytest.raises(ConfigError, match=f"model.kv_cache fp8: {words} computes only with keys"):
        load(tmp_path, "{name: Color}", "null", engine, "model.kv_cache=fp8")


def config(*overrides: str, **task: Any) -> Any:
    if not task.get("kind"):
        tree = {"categories": {"shoes": {"attributes": [{"name": "Brand"}]}}}
    else:
        tree = {}
    return make_config(
        {
            "input": {"path": "-"},
            "output": {"path": "-"},
            "task": {**tree, **task},
        },
        list(overrides),
    )


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / CARD).write_text(
        json.dumps({"task": "extraction", "method": "hyper_parallel", "template": TEMPLATE})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "kind", "method"),
    [
        ([], None, "guided"),
        (["decoding.method=auto"], None, "guided"),
        (["model=fake"], None, "hyper_parallel"),
        (["training.epochs=1"], None, "guided"),
        (["model.endpoint.url=http://host/v1"], None, "autoregressive"),
        (["engine.kind=vllm"], None, "guided"),
        (["engine.kind=vllm"], "question_answering", "autoregressive"),
        ([], "question_answering", "intra_prompt"),
        ([], "generation", "autoregressive"),
        (["decoding.method=hyper_parallel"], None, "hyper_parallel"),
    ],
)
def test_without_a_card_the_method_is_one_that_any_weights_can_do(overrides, kind, method) -> None:
    assert config(*overrides, **({"kind": kind} if kind else {})).decoding.method == method


@pytest.mark.parametrize(
    ("given", "method", "bare"),
    [
        ([], "hyper_parallel", True),
        (["decoding.skeleton=keys"], "hyper_parallel", False),
        (["fit.documents=9"], "hyper_parallel", True),
        (["decoding.method=autoregressive"], "autoregressive", False),
        (["decoding.isolate=none"], "hyper_parallel", False),
        (["decoding.method=guided"], "guided", False),
    ],
)
def test_a_training_takes_a_method_that_can_be_trained_and_slots(
    given, method, bare, tmp_path: Path
) -> None:
    dump = {
        "input": {"path": "-"},
        "output": {"path": "-"},
        "task": {"attributes": ["Brand"]},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(dump))
    decoding = load_config(tmp_path / "run.yaml", given, trains=True).decoding
    assert decoding.method == method
    assert decoding.bare == bare


def test_a_card_says_the_method(adapter: Path, monkeypatch) -> None:
    trained = config(f"model.adapter={adapter}")
    assert trained.decoding.method == "hyper_parallel"
    assert untrained(trained) is None
    assert config(f"model={adapter}").decoding.method == "hyper_parallel"
    assert config(f"model.adapter={adapter}", "decoding.method=guided").decoding.method == "guided"
    # Of another task.
    assert config(f"model.adapter={adapter}", kind="generation").decoding.method == "autoregressive"
    monkeypatch.chdir(adapter)  # a card in the current folder is none of the weights
    assert config("model.adapter=null").decoding.method == "guided"
    (adapter / CARD).write_text("[")  # which the check of the card refuses
    assert config(f"model.adapter={adapter}").decoding.method == "guided"


def test_a_card_says_the_skeleton_and_another_is_refused(adapter: Path) -> None:
    card = json.loads((adapter / CARD).read_text()) | {"decoding": {"skeleton": "slots"}}
    (adapter / CARD).write_text(json.dumps(card))
    name = f"model.adapter={adapter}"
    assert [config(name, *keys).decoding.skeleton for keys in ([], ["decoding.method=guided"])] == [
        "slots",
        "keys",
    ]
    check_card(config(name))
    second = config(
        name, "cascade.model=smollm2-135m-instruct", "cascade.decoding.method=hyper_parallel"
    )
    assert second.second_model().decoding.skeleton == "keys"
    with pytest.raises(ModelError, match=r"decoding\.skeleton slots.*the run has keys"):
        check_card(config(name, "decoding.skeleton=keys"))


def test_the_quickstart_is_decoded_as_its_adapter_was_trained_and_weights_without_a_card_are_no_match() -> (  # noqa: E501
    None
):
    quickstart = load_config(ROOT / "configs/quickstart/extract.yaml")
    assert quickstart.decoding.method == "hyper_parallel"
    assert quickstart.decoding.skeleton == "slots"
    check_card(quickstart)
    assert (
        load_config(
            ROOT / "configs/quickstart/extract.yaml", ["model.adapter=null"]
        ).decoding.method
        == "guided"
    )
    assert "has no model card that says it was trained for this method" in str(
        untrained(config("decoding.method=hyper_parallel"))
    )
    assert untrained(config()) is untrained(config("model=fake")) is None


def test_the_prompt_begins_with_the_instruction() -> None:
    made = config(instruction="Read support tickets.")
    (message,) = messages(made.task, made.model).values()
    assert message.startswith("Read support tickets.\n")


@pytest.mark.parametrize(
    ("override", "replacement"),
    [
        ("storage.profile=nightly", "storage.options.profile"),
        ("storage.region=eu-west-1", "storage.options.region"),
        ("storage.endpoint_url=http://host:9000", "storage.options.endpoint_url"),
        ("fit.validation_share=0.2", "training.validation_share"),
        ("training.lora_rank=3", "training.lora.rank"),
        ("training.accumulate=3", "training.trainer.gradient_accumulation_steps"),
        ("decoding.max_threads=3", "decoding.options.max_threads"),
        ("decoding.speculative.draft_tokens=3", "decoding.options"),
        ("cascade.decoding.mask_tokens=3", "decoding.options.mask_tokens"),
    ],
)
def test_a_key_of_an_earlier_release_is_refused_with_its_replacement(override, replacement):
    overrides = [override]
    if override.startswith("cascade"):
        overrides.append("cascade.model=fake")
    with pytest.raises(ConfigError) as error:
        make_config(config_tree(), overrides)
    assert f"this key is now {replacement}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.executor=ray_data", "this key was removed.*cluster\\.readers"),
        ("cost.bill_head=false", "this key was removed.*cost\\.prices"),
        ("training.batch_tokens=9", "this key was removed.*training\\.batch_size"),
        ("cost.reserve_seconds=1", "this key was removed.*cost\\.budget_usd"),
    ],
)
def test_a_removed_key_is_refused_with_what_to_use_and_read_in_records(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_config(config_tree(), [override])
    assert len(str(error.value).splitlines()) == 1
    section, _, key = override.partition("=")[0].partition(".")
    recorded = config_tree(**{section: {key: "recorded"}, "fit": {"documents": 3}})
    assert make_config(with_current_keys(recorded)).fit.documents == 3


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["decoding.method=space", "decoding.options.mask_token=3"], "mask_token", "'mask_tokens'"),
        (
            ["decoding.method=space", "decoding.options.max_threads=3"],
            "max_threads",
            "of apar, pas",
        ),
        (["decoding.method=space", "decoding.options.mask_tokens=-1"], "mask_tokens", "equal to 0"),
        (["decoding.method=autoregressive", "decoding.options.x=1"], "x", "it has none"),
    ],
)
def test_an_option_that_the_method_does_not_have_is_refused_with_a_hint(overrides, key, words):
    with pytest.raises(ConfigError) as error:
        make_config(config_tree("generation"), overrides)
    assert str(error.value).startswith(f"decoding.options.{key}=... on the command line: ")
    assert words in str(error.value)


def test_options_are_of_the_method_that_the_file_names(tmp_path):
    file = tmp_path / "run.yaml"
    decoding = {"method": "pasta", "options": {"max_threads": 3}}
    file.write_text(json.dumps(config_tree("generation", decoding=decoding)))
    pasta = load_config(file).decoding
    assert pasta.method_options.max_threads == 3
    assert pasta.method_options.max_async_tokens == 256
    # Another method on the command line replaces the options, in whatever order they are given.
    overrides = ["decoding.options.mask_tokens=4", "decoding.method=space"]
    assert load_config(file, overrides).decoding.options == {"mask_tokens": 4}
    changed = with_changes(load_config(file), {"decoding.method": "autoregressive"})
    assert changed.decoding.options == {}


def test_an_option_at_its_default_changes_no_fingerprint():
    tree = config_tree("generation", decoding={"method": "space"})
    default = make_config(tree, ["decoding.options.mask_tokens=5"])
    assert default.fingerprint() == make_config(tree).fingerprint()
    other = make_config(tree, ["decoding.options.mask_tokens=4"])
    assert other.fingerprint() != make_config(tree).fingerprint()


def test_a_record_of_an_earlier_release_is_read_with_todays_keys():
    recorded = make_config(config_tree("generation", decoding={"method": "apar"})).model_dump()
    del recorded["decoding"]["options"]
    recorded["decoding"] |= {
        "max_threads": 7,
        "mask_tokens": 3,
        "speculative": {"max_ngram": 2},
    }
    recorded["storage"] = {"region": None, "max_attempts": 4}
    config = make_config(with_current_keys(recorded))
    assert config.decoding.options == {"max_threads": 7}
    assert config.storage.requests.max_attempts == 4
    recorded["storage"] = {"endpoint_url": "http://host:9000", "options": {"max_attempts": 4}}
    recorded["fit"]["validation_share"] = 0.3
    del recorded["training"]
    config = make_config(with_current_keys(recorded))
    assert config.storage.requests.endpoint_url == "http://host:9000"
    assert config.storage.requests.max_attempts == 4
    assert config.training.validation_share == 0.3


@pytest.mark.parametrize(
    ("task", "old", "new"),
    [
        (None, "windows", "split"),
        (None, "refuse", "reject"),
        ("question_answering", "truncate", "head"),
    ],
)
def test_too_long_of_an_earlier_release_is_read_as_long_documents(task, old, new):
    recorded = make_config(config_tree(task)).model_dump()
    del recorded["task"]["long_documents"]
    recorded["task"]["too_long"] = old
    assert make_config(with_current_keys(recorded)).task.long_documents == new
    with pytest.raises(ConfigError, match=r"task\.long_documents \(truncate is head, windows is"):
        make_config(config_tree(task), [f"task.too_long={old}"])


def test_the_value_of_a_key_has_the_default_of_an_option_that_is_not_set():
    decoding = {"method": "apar", "options": {"max_threads": 7}}
    config = make_config(config_tree("generation", decoding=decoding))
    values = {
        "decoding.options.max_threads": 7,
        "training.lora.rank": 16,
        "storage.options.max_attempts": 10,
        "model.fake.load_seconds": 0.0,
        "model.name": config.model.name,
        "training.trainer.weight_decay": None,
    }
    assert {key: value_at(config, key) for key in values} == values


def test_every_path_that_is_read_is_relative_to_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "run.yaml").write_text(
        RUN.format(attribute="{name: Color}", deadline="null")
        + "fit: {labels: labels.csv}\ntraining: {labels: ../runs/teacher}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/run.yaml")
    assert config.fit.labels == "configs/labels.csv"
    assert config.training.labels == "configs/../runs/teacher"
    assert config.input.path == "configs/a.jsonl"
    # What is given on the command line, or is written, is relative to the current folder.
    assert config.output.path == "out"
    config = load_config("configs/run.yaml", ["fit.labels=labels.csv", "training.labels=runs/a"])
    assert config.fit.labels == "labels.csv"
    assert config.training.labels == "runs/a"
