"""A whole run."""

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from raypd.config.cluster import ClusterConfig, CostConfig, NightlyConfig
from raypd.config.data import InputConfig, OutputConfig, StorageConfig
from raypd.config.model import (
    IDLE_KEYS,
    SAMPLING_KEYS,
    CascadeConfig,
    DecodingConfig,
    EngineConfig,
    ModelConfig,
)
from raypd.config.model_card_file import card_of, has_earlier_template
from raypd.config.moved import moved_to
from raypd.config.tasks import METHODS, OWN_COLUMNS, ExtractionConfig, GenerationConfig, TaskConfig
from raypd.config.training import FitConfig, TrainingConfig
from raypd.decoding import REGISTRY
from raypd.schema import Attribute, Section

# Others are of their own.
VLLM_METHODS = ("autoregressive", "guided")
_VLLM_ONLY = {
    "model.device": "auto",
    "model.quantization": "none",
    "model.endpoint": None,
    "engine.cache_tokens": None,
}
# Of which the content counts.
_PROMPT_FILES = ("task.template", "task.few_shot", "task.examples.path")
# Raised with a release whose defaults, prompts or methods answer otherwise: all is then done anew.
_ANSWERS = 3


class RunConfig(Section):
    """A whole run."""

    input: InputConfig
    output: OutputConfig
    task: TaskConfig
    model: ModelConfig = ModelConfig()
    decoding: DecodingConfig = DecodingConfig()
    engine: EngineConfig = EngineConfig()
    cascade: CascadeConfig = CascadeConfig()
    cluster: ClusterConfig = ClusterConfig()
    cost: CostConfig = CostConfig()
    storage: StorageConfig = StorageConfig()
    nightly: NightlyConfig = NightlyConfig()
    training: TrainingConfig = TrainingConfig()
    fit: FitConfig = FitConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_trained(cls, tree: Any) -> Any:
        """An open method is what the weights were trained for; without a card: `guided` for
        extraction.
        """
        if not isinstance(tree, dict) or not isinstance(tree.get("task"), dict):
            return tree
        tree = {**tree, "task": {"kind": "extraction", **tree["task"]}}
        decoding, kind, model = (
            tree.get("decoding") or {},
            tree["task"]["kind"],
            tree.get("model") or {},
        )
        if not isinstance(decoding, dict) or kind not in METHODS:
            return tree
        card = card_of(model, kind)
        if decoding.get("method", "auto") == "auto":
            tree["decoding"] = decoding = {**decoding, "method": _method(kind, tree, card)}
        trained = card.get("decoding")
        if (
            decoding["method"] == card.get("method")
            and isinstance(trained, dict)
            and "skeleton" in trained
        ):
            tree["decoding"] = {"skeleton": trained["skeleton"], **decoding}
        return tree

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        method, kind = self.decoding.method, self.task.kind
        if method not in METHODS[kind]:
            raise ValueError(
                f"decoding.method {method} does not do {kind}; choose from "
                f"{', '.join(METHODS[kind])}"
            )
        if REGISTRY[method].heads and self.decoding.heads is None:
            advice = "a folder of Medusa heads (`raypd model add-heads` writes untrained ones)"
            raise ValueError(f"decoding.method {method} needs decoding.options.heads, {advice}")
        if self.engine.kind == "vllm":
            self._vllm_can(method)
        gpus = self.cluster.gpus_per_worker
        if gpus is not None and gpus > 1 and self.engine.kind == "raypd" and self.model.has_weights:
            advice = (
                f"engine.kind: vllm with engine.vllm: {{tensor_parallel_size: {gpus:g}}} "
                "spreads one over several"
            )
            raise ValueError(
                f"cluster.gpus_per_worker {gpus:g}: raypd's engine holds a model on one GPU; "
                f"{advice}"
            )
        if other := [
            name for name in self.input.html_columns if name not in (texts := self.text_columns())
        ]:
            raise ValueError(
                f"input.html_columns: {other[0]!r} is none of the columns of text "
                f"({', '.join(texts)})"
            )
        if isinstance(self.task, ExtractionConfig):
            self._categories_known(self.task)
        greedy = self.decoding.sampling.temperature == 0
        if isinstance(self.task, GenerationConfig) and self.task.samples > 1 and greedy:
            raise ValueError(
                "task.samples is above 1: set decoding.sampling.temperature, or all answers "
                "are the same"
            )
        if self._openai() and self.model.endpoint is not None:
            raise ValueError(
                "task.openai: model.endpoint cannot give each request its own parameters; "
                "leave it out"
            )
        if self.cascade.model is not None:
            self._cascade_fits()
        return self

    def _cascade_fits(self) -> None:
        if not isinstance(self.task, ExtractionConfig):
            raise ValueError(
                "cascade: a second model answers for the first in an extraction, not in "
                f"{self.task.kind}"
            )
        try:
            self.second_model()
        except ValidationError as error:
            reason = error.errors()[0]
            place = ".".join(["cascade", *map(str, reason["loc"])])
            unknown = moved_to(place) or "unknown key; `raypd config show` lists all keys"
            message = (
                unknown
                if reason["type"] == "extra_forbidden"
                else reason["msg"].removeprefix("Value error, ")
            )
            raise ValueError(f"{place}: {message}") from None

    def second_model(self) -> "RunConfig | None":
        """The run that the cascade's second model would do alone; None: there is no cascade."""
        if self.cascade.model is None:
            return None
        tree = self.model_dump()
        tree |= {
            "model": tree["cascade"]["model"],
            "engine": {**tree["engine"], **self.cascade.engine},
            "cascade": {},
        }
        del tree["decoding"]["skeleton"]  # it is what the weights were trained with
        del tree["decoding"]["options"]  # they are the first model's method's
        tree["decoding"] |= {"method": "auto", **self.cascade.decoding}
        return RunConfig.model_validate(tree)

    def _vllm_can(self, method: str) -> None:
        if method not in VLLM_METHODS:
            advice = f"set decoding.method to {' or '.join(VLLM_METHODS)}, or engine.kind: raypd"
            raise ValueError(f"engine.kind vllm does not decode {method}: {advice}")
        for key, only in _VLLM_ONLY.items():
            section, _, name = key.partition(".")
            if getattr(getattr(self, section), name) != only:
                raise ValueError(
                    f"engine.kind vllm: {key} must be left at {only or 'null'}: it has no "
                    "meaning there"
                )
        if self.model.is_fake:
            raise ValueError(
                "engine.kind vllm needs weights: name a model, or set engine.kind: raypd"
            )

    def _categories_known(self, task: ExtractionConfig) -> None:
        if not task.categories:
            raise ValueError(
                "task.categories is empty: name at least one and its attributes, or set "
                "task.attributes"
            )
        if (
            self.input.category_column is None
            and self.input.category is None
            and len(task.categories) > 1
        ):
            raise ValueError(
                "input.category_column is null: set input.category to one of task.categories"
            )
        if self.input.category is not None and self.input.category not in task.categories:
            raise ValueError(f"input.category {self.input.category!r} is not in task.categories")
        if task.examples is not None and task.examples.nearest and self.decoding.stacked:
            raise ValueError(
                "task.examples.nearest: documents that share a prompt would see each other's "
                "examples"
            )
        if self.output.columns == "typed":
            _columns_differ(task)

    @property
    def extraction(self) -> ExtractionConfig:
        """The task of a run that extracts."""
        assert isinstance(self.task, ExtractionConfig)
        return self.task

    def _openai(self) -> bool:
        return isinstance(self.task, GenerationConfig) and self.task.openai

    def text_columns(self) -> list[str]:
        return self.task.text_columns(self.input)

    def wanted_columns(self) -> dict[str, str]:
        columns = self.task.wanted_columns(self.input)
        return columns | (
            {"input.id_column": self.input.id_column} if self.input.id_column is not None else {}
        )

    def idle_keys(self) -> set[str]:
        """Keys, dotted, and whole sections that cannot change an answer of this run: all others are
        in its fingerprint. model.trust_remote_code is in it: a model's own code may take the place
        of transformers'. So are input.format, category_column and max_document_bytes, which decide
        of any kind's documents what is an error row.
        """
        idle = {
            "output.path",
            "output.partition",
            "cluster",
            "cost",
            "storage",
            "nightly",
            "training",
            "fit",
        }
        idle |= {
            "input.path",
            "input.version",
            "input.on_damaged",
            "task.categories_file",
            "task.schema",
        }
        idle |= {
            f"engine.{key}" for key in EngineConfig.model_fields if key not in ("kind", "vllm")
        }
        idle |= {f"{model}.{key}" for model in ("model", "cascade.model") for key in IDLE_KEYS}
        idle |= {"cascade"} if self.cascade.model is None else set()
        idle |= self.task.idle_keys
        idle |= {f"decoding.{key}" for key in self.decoding.idle_keys(self.task.kind)}
        # A request may sample where the configuration does not.
        return idle - {f"decoding.{key}" for key in SAMPLING_KEYS} if self._openai() else idle

    def _shows_descriptions(self) -> bool:
        """Whether the prompt is raypd's own, and describes an attribute."""
        task = self.task
        if not isinstance(task, ExtractionConfig) or task.template:
            return False
        if has_earlier_template(self.model.model_dump(), task.kind):
            return False
        for category in task.categories.values():
            for attribute in category.attributes:
                if attribute.description or attribute.hint:
                    return True
        return False

    def fingerprint(self) -> str:
        """12 hex digits over everything that can change an answer: task, model, decoding, and which
        columns are read. Part of every unit's id, so a changed prompt never resumes into old
        answers. Where the input lies, how much is done at once, how many workers there are, and
        what the decoding method does not use do not change it.
        """
        # Keys at their defaults are left out, so that a raypd with a new key does not do finished
        # corpora again.
        given = self.model_dump(exclude_defaults=True)
        examples = getattr(self.task, "examples", None)
        files = [
            getattr(self.task, "template", None),
            getattr(self.task, "few_shot", None),
            examples and examples.path,
        ]
        texts = [Path(file).read_text() for file in files if file]  # in the prompt
        answers: dict[str, Any] = {}
        if self._shows_descriptions():
            # They stand in the prompt in another way than in earlier versions.
            answers["descriptions"] = 2
        answers |= {
            "answers": _ANSWERS,
            "kind": self.task.kind,
            "method": self.decoding.method,
            "files": texts,
            **_without(given, {*self.idle_keys(), *_PROMPT_FILES}),
        }
        return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()[:12]


def _method(kind: str, tree: dict[str, Any], card: dict[str, Any]) -> str:
    model, engine = tree.get("model") or {}, tree.get("engine") or {}
    name = model.get("name") if isinstance(model, dict) else model
    if isinstance(model, dict) and model.get("endpoint") is not None:
        return "autoregressive"
    if card.get("method") in METHODS[kind]:
        return str(card["method"])
    if kind == "extraction":
        return METHODS[kind][0] if name == "fake" else "guided"
    return (
        "autoregressive"
        if isinstance(engine, dict) and engine.get("kind") == "vllm"
        else METHODS[kind][0]
    )


def _columns_differ(task: ExtractionConfig) -> None:
    """Refuse attributes that cannot have a column each; SQL takes no account of case."""
    # Column -> whose it is, and what it holds: a type, or nested objects.
    seen = dict.fromkeys([*OWN_COLUMNS, "category", "truncated"], ("a column of every table", ""))
    for category, schema in task.categories.items():
        for attribute in schema.attributes:
            owner = f"task.categories.{category}: {attribute.name!r}"
            for column, content in _columns_of(attribute).items():
                label = f"{owner} ({content})"
                other, other_content = seen.setdefault(column, (label, content))
                if other_content != content:
                    raise ValueError(
                        f"output.columns typed: {label} has the column of {other}: rename one"
                    )


def _columns_of(attribute: Attribute) -> dict[str, str]:
    """What an attribute's columns hold, by their names in lower case."""
    path = [name.casefold() for name in attribute.place]
    columns = {}
    for end in range(1, len(path)):
        columns[".".join(path[:end])] = "object"
    columns[".".join(path)] = attribute.value_type.column_type
    for detail in ("confidence", "status", "span", "model"):
        columns[f"{path[0]}__{detail}"] = "of its own"
    return columns


def _without(tree: dict[str, Any], keys: set[str], at: str = "") -> dict[str, Any]:
    kept = {}
    for name, value in tree.items():
        key = f"{at}{name}"
        inner = _without(value, keys, f"{key}.") if isinstance(value, dict) else value
        if key not in keys and inner != {}:
            kept[name] = inner
    return kept
