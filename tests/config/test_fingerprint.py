"""For the same answers the same digits, in every raypd; and `raypd config show` has every key."""

import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from raypd import storage
from raypd.config import (
    KINDS,
    METHODS,
    OWN_COLUMNS,
    DecodingConfig,
    EndpointConfig,
    RunConfig,
)
from raypd.config.load import make_config
from raypd.config.model import METHOD_OPTIONS
from raypd.config.render import render
from raypd.config.run import _ANSWERS
from raypd.config.secrets import Uri
from raypd.errors import ConfigError
from raypd.run import manifest
from tests.runs import config_tree, decoding_section, extraction, run_config

SHOES = extraction(shoes=["Brand", {"name": "Size", "type": "number"}])
EXTRACTION = config_tree(SHOES, decoding={"method": "hyper_parallel"})
QUESTIONS = config_tree("question_answering")
WORDS = {"text", "integer", "number", "true", "false", "null", "list", "mapping", "value"}
TASKS: dict[str, dict[str, Any]] = {
    "extraction": extraction(c=["a"]),
    "question_answering": {},
    "generation": {},
}


def keys(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, str]]:
    """All keys, dotted, as the classes have them, and how Python writes what they take."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from keys(info.annotation, f"{at}{name}.")
        elif name != "task":
            yield f"{at}{name}", str(info.annotation)


DECODING_KEYS = [key for key, _ in keys(DecodingConfig)]


def test_it_is_what_it_was() -> None:
    """A change here makes every user's next nightly do its whole corpus again."""
    fingerprints = [make_config(task).fingerprint() for task in (EXTRACTION, QUESTIONS)]
    advice = (
        "is it meant that no run of an earlier raypd can be resumed? Then raise _ANSWERS in "
        f"raypd/config/run.py, write the new fingerprints {fingerprints} into this test, and say "
        "so in CHANGELOG.md"
    )
    assert fingerprints == ["8ebfeecebd42", "56407a0284c0"], advice


def test_a_column_that_is_new_in_every_table_ends_the_resuming_of_earlier_runs() -> None:
    """One table must not hold units with different columns: raise _ANSWERS with the change."""
    columns = ["id", "status", "error", "source", "row", "attempts"]
    advice = (
        "raise _ANSWERS in raypd/config/run.py with every change of OWN_COLUMNS; then write both "
        "into this test"
    )
    assert list(OWN_COLUMNS) == columns, advice
    assert _ANSWERS == 5, advice


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("decoding.method=hyper_parallel", False),  # defaults that are written out
        ("model.dtype=auto", False),
        (
            (
                "task.categories.shoes.attributes=[{name: Brand, type: text}, {name: Size, "
                "type: number}]"
            ),
            False,
        ),
        ("model.dtype=float32", True),
        ("model.name=other", True),
        ("task.categories.shoes.attributes=[{name: Brand}, {name: Size}]", True),
        ("output.path=elsewhere", False),
        ("engine.max_num_seqs=3", False),
        ("model.fake.step_seconds=3", False),
        ("cluster.max_workers=9", False),
        ("input.path=b.jsonl", False),
    ],
)
def test_it_changes_with_what_changes_answers_alone(key: str, changes: bool) -> None:
    assert (
        make_config(EXTRACTION, [key]).fingerprint() != make_config(EXTRACTION).fingerprint()
    ) is changes


def others(config: RunConfig, key: str) -> list[Any]:
    """Other values that a key of `decoding` may have."""
    model: Any = DecodingConfig
    value: Any = config.decoding
    if key.startswith("options."):
        key = key.removeprefix("options.")
        model = METHOD_OPTIONS[config.decoding.method]
        value = config.decoding.method_options
    for name in key.split("."):
        annotation = model.model_fields[name].annotation
        model, value = annotation, getattr(value, name)
    if key == "method":
        return [method for method in METHODS[config.task.kind] if method != value]
    if typing.get_origin(annotation) is typing.Literal:
        return [choice for choice in typing.get_args(annotation) if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value / 2 or 0.5]
    kinds = (annotation, *typing.get_args(annotation))
    assert str in kinds or Uri in kinds, f"decoding.{key}: give this test another value for it"
    return ["another"]


def option_keys(method: str) -> list[str]:
    """The keys of `decoding` that are options of a method alone."""
    return [f"options.{name}" for name in METHOD_OPTIONS[method].model_fields]


def uses() -> Iterator[tuple[str, str, str, float]]:
    """(kind, method, isolate, temperature): all that decides which keys of `decoding` count."""
    for kind, methods in METHODS.items():
        for method, temperature in itertools.product(methods, (0.0, 0.7)):
            for isolate in (
                ("none", "documents", "values") if method == "hyper_parallel" else ("documents",)
            ):
                yield kind, method, isolate, temperature


# The keys that can change an answer, by task and method, at temperature 0 without isolation.
COUNTING = {
    ("extraction", "hyper_parallel"): "isolate max_value_tokens skeleton stacked_documents",
    ("extraction", "autoregressive"): "max_new_tokens",
    ("extraction", "speculative"): (
        "max_new_tokens options.draft_model options.draft_tokens options.max_ngram"
    ),
    ("extraction", "guided"): "max_value_tokens",
    ("question_answering", "intra_prompt"): "",
    ("question_answering", "autoregressive"): "",
    ("generation", "autoregressive"): "max_new_tokens",
    ("generation", "speculative"): (
        "max_new_tokens options.draft_model options.draft_tokens options.max_ngram"
    ),
    ("generation", "apar"): "max_new_tokens options.max_threads",
    ("generation", "pasta"): (
        "max_new_tokens options.fixed_length options.max_async_tokens options.max_threads "
        "options.promised_length"
    ),
    ("generation", "space"): "max_new_tokens options.mask_tokens",
    ("generation", "medusa"): "max_new_tokens options.heads",
    ("generation", "skeleton_of_thought"): (
        "max_new_tokens options.max_point_tokens options.max_skeleton_tokens"
    ),
    ("generation", "apar_medusa"): "max_new_tokens options.heads options.max_threads",
}
# Those that count in addition when tokens are sampled.
COUNTING_WHEN_SAMPLED = "sampling.top_k sampling.top_p sampling.seed"
# A sampled answer depends on the questions that its prompt holds.
COUNTING_OF_METHOD_WHEN_SAMPLED = {"intra_prompt": "options.contexts_per_prompt"}


def expected_keys(kind: str, method: str, isolate: str, temperature: float) -> set[str]:
    """Return the keys of `decoding` that must be part of a fingerprint."""
    assert (kind, method) in COUNTING, (
        f"add to COUNTING which keys of `decoding` can change an answer of {method}: what its "
        "answer_keys say in raypd/decoding/methods/registry.py, and its options as options.NAME"
    )
    keys = {"method", "sampling.temperature", *COUNTING[kind, method].split()}
    if isolate != "none":
        keys -= {"stacked_documents"}
    if temperature:
        keys |= {*COUNTING_WHEN_SAMPLED.split()}
        keys |= {*COUNTING_OF_METHOD_WHEN_SAMPLED.get(method, "").split()}
    return keys


@pytest.mark.parametrize(("kind", "method", "isolate", "temperature"), uses())
def test_a_key_counts_where_the_table_says(
    kind: str, method: str, isolate: str, temperature: float
) -> None:
    task = EXTRACTION["task"] if kind == "extraction" else {"kind": kind}

    def config_with(key: str, value: Any) -> RunConfig:
        chosen = value if key == "method" else method
        tree = decoding_section(chosen, heads="heads", isolate=isolate)
        tree["sampling"] = {"temperature": temperature}
        *above, last = key.split(".")
        if above:
            tree[above[0]] = {**tree.get(above[0], {}), last: value}
        else:
            tree[last] = value
        return RunConfig.model_validate({**EXTRACTION, "task": task, "decoding": tree})

    config = config_with("method", method)
    own = config.fingerprint()
    counting = set()
    for key in [*DECODING_KEYS, *option_keys(method)]:
        if key == "options":
            continue
        prints = {config_with(key, value).fingerprint() for value in others(config, key)}
        assert own not in prints or prints == {own}, f"decoding.{key}: counts for some values"
        if own not in prints:
            counting.add(key)
    assert counting == expected_keys(kind, method, isolate, temperature), (
        "say by answer_keys in raypd/decoding/methods/registry.py of which methods a key of "
        "decoding can change an answer and, if it does so only for some values of other keys, in "
        "DecodingConfig.idle_keys; then add it to COUNTING in this test"
    )


@pytest.mark.parametrize("key", ["input.text_columns=[x]", "input.category=shoes"])
def test_what_only_extraction_reads_counts_for_it_alone(key: str) -> None:
    assert make_config(EXTRACTION, [key]).fingerprint() != make_config(EXTRACTION).fingerprint()
    for task in (QUESTIONS, config_tree("generation")):
        assert make_config(task, [key]).fingerprint() == make_config(task).fingerprint()


def test_every_key_counts_unless_it_is_known_that_it_cannot() -> None:
    """A new section or key is in the fingerprint until somebody says that it changes no answer."""
    idle = make_config(EXTRACTION).idle_keys()
    for section, info in RunConfig.model_fields.items():
        if section in idle or section in ("task", "decoding"):
            continue
        names = set(info.annotation.model_fields)  # type: ignore[union-attr]
        left = names - {key.partition(".")[2] for key in idle if key.startswith(f"{section}.")}
        counting = {
            "input": "format reader encoding id_column text_columns html_columns category_column "
            "category max_document_bytes ocr attachments",
            "output": "columns min_confidence",
            "engine": "kind vllm",
            "model": (
                "name revision dtype adapter calibration quantization kv_cache trust_remote_code "
                "endpoint"
            ),
        }.get(section, "")
        words = (
            f"{section}: say in RunConfig.idle_keys which of its keys cannot change an answer, "
            "or here"
        )
        assert left == set(counting.split()), words


def test_a_difference_is_one_that_counts_also_from_a_run_of_another_raypd() -> None:
    stored = manifest.recorded(make_config(EXTRACTION))
    idle = ["decoding.stacked_documents=3", "decoding.max_new_tokens=9", "engine.max_num_seqs=3"]
    assert manifest.differences(stored, make_config(EXTRACTION, idle)) == []
    for key in ("decoding.max_value_tokens=9", "model.dtype=float32", "input.id_column=null"):
        assert manifest.differences(stored, make_config(EXTRACTION, [key, *idle])) == [
            key.partition("=")[0]
        ]
    stored = manifest.recorded(
        make_config(EXTRACTION, ["decoding.isolate=none", "decoding.stacked_documents=3"])
    )
    # One that counted in the stored run.
    found = manifest.differences(stored, make_config(EXTRACTION))
    assert sorted(found) == ["decoding.isolate", "decoding.stacked_documents"]
    config, other = make_config(EXTRACTION), make_config(EXTRACTION, ["model.dtype=float32"])
    stored = manifest.recorded(config)
    for section, key in (
        ("decoding", "max_value_tokens"),
        ("model", "adapter"),
        ("input", "max_document_bytes"),
    ):
        del stored[section][key]  # keys that it did not have yet
    assert manifest.differences(stored, config) == []
    assert manifest.differences(stored, other) == ["model.dtype"]
    stored = manifest.recorded(config)
    stored["decoding"]["retired"] = 1  # a key that is gone
    assert manifest.differences(stored, other) == ["model.dtype", "decoding.retired"]


def test_labels_of_a_fit_are_recorded_with_a_path_that_holds_in_any_folder() -> None:
    config = make_config(EXTRACTION, ["fit.labels=mine.csv"])
    stored = manifest.recorded(config)
    assert stored["fit"]["labels"] == storage.absolute("mine.csv")
    assert stored["fit"]["labels"] != "mine.csv"
    # It does not change the run.
    assert manifest.differences(stored, make_config(EXTRACTION)) == []


def test_a_run_of_a_raypd_that_answers_otherwise_is_told_from_a_changed_key(
    tmp_path: Path, monkeypatch: Any
) -> None:
    config = make_config(EXTRACTION, [f"output.path={tmp_path}"])
    assert not any(manifest.claim(config, str(tmp_path), held=again) for again in (False, True))
    monkeypatch.setattr("raypd.config.run._ANSWERS", 99)
    manifest.check(config, str(tmp_path))  # nothing was committed
    storage.put(f"{tmp_path}/units/a.parquet", b"")
    with pytest.raises(
        ConfigError, match=r"a file that prompts come from, or raypd itself changed"
    ):
        manifest.check(config, str(tmp_path))


def notes(shown: str) -> dict[str, str]:
    """Key, dotted -> what it takes; of several tasks, all keys, and of one that several have all
    that it takes.
    """
    found: dict[str, str] = {}
    above: list[str] = []
    for line in shown.splitlines():
        match = re.match(r"( *)(\w+):.*?  # (.*)", line.removeprefix("# "))
        if match:
            above = [*above[: len(match[1]) // 2], match[2]]
            key, takes = ".".join(above), match[3].partition(". ")[0]
            parts = [*found[key].split(" | ")] if key in found else []
            found[key] = " | ".join(dict.fromkeys([*parts, *takes.split(" | ")]))
    return found


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_every_key_tells_what_it_takes_in_words_of_yaml(kind: str | None) -> None:
    found = notes(render(run_config({"kind": kind, **TASKS[kind]}) if kind else None))
    every = [
        *keys(RunConfig),
        *[key for one in ([kind] if kind else KINDS) for key in keys(KINDS[one], "task.")],
    ]
    for key in dict(every):
        # Of each task that has it.
        written = " ".join(own for name, own in every if name == key and "Literal" in own)
        choices = set(re.findall(r"'([^']+)'", written))
        choices = set(KINDS) if key == "task.kind" else choices
        assert choices <= set(re.split(r" \| | of | to ", found[key])) <= choices | WORDS, (
            f"{key}: {found[key]}"
        )


@pytest.mark.parametrize(
    ("key", "takes"),
    [
        ("cost.market", "on-demand | spot | null"),
        ("input.path", "text | list of text"),
        ("output.partition", "mapping of text to text"),
        ("task.kind", "extraction | question_answering | generation"),
        ("task.categories", "mapping of text to mapping"),
        ("task.max_document_tokens", "integer | null"),
        ("model.trust_remote_code", "true | false"),
        ("decoding.sampling.top_p", "number"),
    ],
)
def test_some_of_them(key: str, takes: str) -> None:
    assert notes(render(run_config()))[key] == takes


def test_the_keys_of_an_optional_section_stand_in_comments_below_it() -> None:
    shown = render(run_config())
    section = shown[shown.index("\n  endpoint: null") : shown.index("\ndecoding:")]
    written = re.findall(r"^    # (\w+): ", section, re.MULTILINE)
    assert written == list(EndpointConfig.model_fields)


def test_what_is_shown_reads_back() -> None:
    for kind, task in TASKS.items():
        config = run_config({"kind": kind, **task})
        assert RunConfig.model_validate(yaml.safe_load(render(config))) == config
