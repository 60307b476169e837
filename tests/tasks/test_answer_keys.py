"""ANSWER_KEYS against what the tasks do: a key that it leaves out changes no row, one that it names
arrives.
"""

import dataclasses
from importlib import import_module

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raypd.answering.components import WorkerComponents, build
from raypd.config import METHODS, ModelConfig, RunConfig
from raypd.config.load import make_config
from raypd.dataset import planner
from raypd.dataset.reader import read_unit
from raypd.decoding.methods.medusa import MedusaHeads
from raypd.decoding.methods.registry import REGISTRY
from raypd.models.control_tokens import add_control_tokens
from raypd.models.load import LoadedModel
from raypd.models.medusa_heads import save_heads
from raypd.tasks import extraction, question_answering
from raypd.tasks.base import Document
from tests.config.test_fingerprint import DECODING_KEYS, option_keys, others, uses
from tests.runs import answer, config_tree, decoding_section, run_config, write_rows
from tests.tasks import test_extraction, test_question_answering
from tests.tiny import tiny_model, tiny_tokenizer

CONTEXT = 4096
PROMPTS = ["Hi", "größe {}", ["1?", "2?"]]
DOCUMENTS = {
    "extraction": [test_extraction.document(i, f"title {i} " * (i + 1)) for i in range(4)],
    "question_answering": test_question_answering.RAGGED,
    "generation": [Document(i, f"id{i}", {"prompt": text}) for i, text in enumerate(PROMPTS)],
}
SMALL = {"max_value_tokens": 9, "max_new_tokens": 14, "stacked_documents": 2, "mask_tokens": 3}
OTHERS = ("pasta", "apar_medusa")  # the program of the latter is that of apar
PROGRAMS = [
    *(
        (task, name)
        for task in (extraction, question_answering)
        for name in METHODS[task.__name__.split(".")[-1]]
    ),
    *(
        (import_module(REGISTRY[n].text_method.partition(":")[0]), n)
        for n in METHODS["generation"]
        if n not in OTHERS
    ),
    (import_module("raypd.decoding.methods.pasta"), "Interpreter"),
    (import_module("raypd.decoding.methods.speculative"), "PromptLookup"),
    (extraction, "PromptLookup"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Two folders of Medusa heads that guess otherwise."""
    made = [str(tmp_path_factory.mktemp("heads")) for _ in range(2)]
    for count, folder in enumerate(made, 1):
        save_heads(MedusaHeads.for_model(load(ModelConfig()).model, count=count), folder)
    return made


def load(config: ModelConfig) -> LoadedModel:
    """A tiny model that has all control tokens; of the name "small" another one."""
    model = tiny_model(
        "llama", seed=1 if config.name == "small" else 0, max_position_embeddings=CONTEXT
    )
    tokenizer = tiny_tokenizer()
    for method in ("apar", "space"):
        add_control_tokens(model, tokenizer, method)
    model = model.double() if config.dtype == "float64" else model
    return LoadedModel(model, tokenizer, config.name, model.dtype, torch.device("cpu"), CONTEXT)


def config_of(kind: str, folders: list[str], **decoding) -> RunConfig:
    tasks = {
        "question_answering": {"kind": kind, "max_answer_tokens": 8},
        "generation": {"kind": kind},
    }
    task = tasks.get(kind, test_extraction.TREE["task"])
    decoding = decoding_section(
        **{
            "heads": folders[0],
            **SMALL,
            **decoding,
        }
    )
    return run_config(task, model={"dtype": "float64"}, decoding=decoding)


def changed(config: RunConfig, key: str, folders: list[str]) -> RunConfig:
    """The configuration with another value of a key of `decoding`."""
    value = {"options.heads": folders[1]}.get(key) or others(config, key)[0]
    # Not so near that answers hardly feel it.
    value = 3 * value if isinstance(value, int) else value
    tree = config.model_dump()
    *above, last = key.split(".")
    (tree["decoding"][above[0]] if above else tree["decoding"])[last] = value
    return RunConfig.model_validate(tree)


def rows_of(parts: WorkerComponents, documents: list[Document]):
    """Every output row, in an order of its own."""
    records, _ = answer(parts.task, documents, parts.engine, sampling=parts.sampling)
    rows = [(record.index, record.error, record.columns) for record in records]
    return sorted(
        rows, key=lambda row: (row[0], row[2].get("question_id", ""), row[2].get("turn", 0))
    )


def leaves(tree, at: str = ""):
    """Where every single value stands, and the value."""
    if isinstance(tree, (dict, list, tuple)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{at}.{key}")
    else:
        yield at, tree


@pytest.mark.parametrize(("kind", "method", "isolate", "temperature"), uses())
def test_what_is_left_out_changes_no_row(kind, method, isolate, temperature, folders) -> None:
    config = config_of(
        kind, folders, method=method, isolate=isolate, sampling={"temperature": temperature}
    )
    idle = config.decoding.idle_keys(kind)
    other = config
    assert idle
    for key in idle:
        if key.startswith("options.") and key not in option_keys(method):
            continue
        other = changed(other, key, folders)
    assert other.decoding.idle_keys(kind) == idle
    rows, again = (
        list(leaves(rows_of(build(c, None, load), DOCUMENTS[kind]))) for c in (config, other)
    )
    assert len(rows) > 10
    for (at, value), (where, now) in zip(rows, again, strict=True):
        expected = pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
        assert (where, now) == (at, expected), f"one of {', '.join(sorted(idle))} has changed it"


@pytest.mark.parametrize(("kind", "method", "isolate", "temperature"), uses())
def test_what_is_named_arrives(kind, method, isolate, temperature, folders, monkeypatch) -> None:
    heard = []
    for module, name in PROGRAMS:
        monkeypatch.setattr(module, name, spy(getattr(module, name), name, heard))

    def arrives(config: RunConfig):
        """All that a worker's engine and programs are told."""
        heard.clear()
        parts = build(config, None, lambda model: heard.append(model.name) or load(model))
        requests = list(parts.task.plan(DOCUMENTS[kind]))
        return [
            *heard,
            plain(parts.sampling),
            *(request.seed for request in requests),
        ]

    config = config_of(
        kind, folders, method=method, isolate=isolate, sampling={"temperature": temperature}
    )
    before = arrives(config)
    keys = {*DECODING_KEYS, *option_keys(method)} - {"method", "options"}
    for key in sorted(keys - config.decoding.idle_keys(kind)):
        assert arrives(changed(config, key, folders)) != before, (
            f"decoding.{key} is used by no program of {method}"
        )


def spy(program, name: str, heard):
    """The method, which first tells with what it was called."""

    def called(*given, **named):
        heard.append((name, plain(given), plain(named)))
        return program(*given, **named)

    return called


def plain(value):
    """What two calls can be compared by; of heads their number, of other objects their kind
    alone.
    """
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, MedusaHeads):
        return value.count
    return value if isinstance(value, (str, int, float, type(None))) else type(value).__name__


@pytest.mark.parametrize("kind", ["question_answering", "generation"])
def test_other_tasks_read_the_same_documents_whatever_extraction_would_read(kind, tmp_path) -> None:
    fields = {
        "context": "c",
        "questions": ["q"],
        "prompt": "p",
        "title": "t",
        "other": 3,
        "category": "x",
    }
    rows = [{"id": str(i), **fields} for i in range(3)]
    write_rows(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    read = []
    for changes in ([], ["input.text_columns=[other, nowhere]", "input.category=shoes"]):
        config = make_config(config_tree(kind, tmp_path), changes)
        columns = [name for key, name in config.wanted_columns().items() if key.startswith("task.")]
        read.append([(unit.id, read_unit(unit, config, columns)) for unit in planner.plan(config)])
    assert read[0] == read[1]
    assert sum(len(documents) for _, documents in read[0]) == 6
