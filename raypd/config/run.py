"""The whole configuration of a run: how its sections fit together, and its fingerprint."""

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
from raypd.config.tasks import (
    DETAILS,
    METHODS,
    OWN_COLUMNS,
    ExtractionConfig,
    GenerationConfig,
    TaskConfig,
)
from raypd.config.training import FitConfig, TrainingConfig
from raypd.decoding import REGISTRY
from raypd.schema import Attribute, Section

# The methods that `engine.kind: vllm` supports.
VLLM_METHODS = ("autoregressive", "guided")
# Keys that vLLM ignores, with the values they must keep.
_VLLM_ONLY = {
    "model.device": "auto",
    "model.quantization": "none",
    "model.endpoint": None,
    "engine.cache_tokens": None,
}
# Keys of files whose contents, rather than paths, are part of the fingerprint.
_PROMPT_FILES = ("task.template", "task.few_shot", "task.examples.path")
# A part of every fingerprint. A release whose defaults, prompts or methods change answers
# increments it, so that no run resumes from answers of an earlier release.
_ANSWERS = 5


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
    def _choose_method(cls, tree: Any) -> Any:
        """Choose the method and skeleton that the weights were trained for.

        If the weights have no card, an open method is the default of the kind of task.
        """
        if not isinstance(tree, dict) or not isinstance(tree.get("task"), dict):
            return tree
        tree = {**tree, "task": {"kind": "extraction", **tree["task"]}}
        kind = tree["task"]["kind"]
        decoding = tree.get("decoding") or {}
        if not isinstance(decoding, dict) or kind not in METHODS:
            return tree
        card = card_of(tree.get("model") or {}, kind)
        if decoding.get("method", "auto") == "auto":
            decoding = {**decoding, "method": _default_method(kind, tree, card)}
            tree["decoding"] = decoding
        trained = card.get("decoding")
        is_trained_method = decoding["method"] == card.get("method")
        if is_trained_method and isinstance(trained, dict) and "skeleton" in trained:
            tree["decoding"] = {"skeleton": trained["skeleton"], **decoding}
        return tree

    @model_validator(mode="after")
    def _check_sections_fit(self) -> Self:
        self._check_method()
        self._check_gpus()
        self._check_cache()
        self._check_html_columns()
        if isinstance(self.task, ExtractionConfig):
            self._check_categories(self.task)
        if isinstance(self.task, GenerationConfig):
            self._check_generation(self.task)
        if self.cascade.model is not None:
            self._check_cascade()
        return self

    def _check_method(self) -> None:
        method = self.decoding.method
        kind = self.task.kind
        if method not in METHODS[kind]:
            raise ValueError(
                f"decoding.method {method} does not support {kind}; choose from "
                f"{', '.join(METHODS[kind])}"
            )
        if REGISTRY[method].heads and self.decoding.heads is None:
            advice = "a folder of Medusa heads (`raypd model add-heads` writes untrained ones)"
            raise ValueError(f"decoding.method {method} needs decoding.options.heads, {advice}")
        if self.engine.kind == "vllm":
            self._check_vllm(method)

    def _check_gpus(self) -> None:
        gpus = self.cluster.gpus_per_worker
        is_spread = gpus is not None and gpus > 1
        if is_spread and self.engine.kind == "raypd" and self.model.has_weights:
            advice = (
                f"engine.kind: vllm with engine.vllm: {{tensor_parallel_size: {gpus:g}}} "
                "spreads one over several"
            )
            raise ValueError(
                f"cluster.gpus_per_worker {gpus:g}: raypd's engine holds a model on one GPU; "
                f"{advice}"
            )

    def _check_cache(self) -> None:
        """Check that the chosen attention can read the chosen KV cache."""
        if self.model.kv_cache == "auto":
            return
        label = f"model.kv_cache {self.model.kv_cache}"
        reads = "computes only with keys and values in bfloat16"
        if self.engine.stable:
            raise ValueError(f"{label}: engine.stable {reads}; set one of them to its default")
        if self.engine.attention == "avx512":
            raise ValueError(
                f"{label}: engine.attention avx512 {reads}; set engine.attention to auto or sdpa"
            )

    def _check_html_columns(self) -> None:
        texts = self.text_columns()
        for name in self.input.html_columns:
            if name not in texts:
                raise ValueError(
                    f"input.html_columns: {name!r} is not one of the text columns "
                    f"({', '.join(texts)})"
                )

    def _check_generation(self, task: GenerationConfig) -> None:
        if task.samples > 1 and self.decoding.sampling.temperature == 0:
            raise ValueError(
                "task.samples is above 1: set decoding.sampling.temperature, otherwise all answers "
                "are the same"
            )
        if task.openai and self.model.endpoint is not None:
            raise ValueError(
                "task.openai: model.endpoint cannot give each request its own parameters; "
                "leave it out"
            )

    def _check_cascade(self) -> None:
        if not isinstance(self.task, ExtractionConfig):
            raise ValueError(
                f"cascade: only an extraction can have a second model, not {self.task.kind}"
            )
        try:
            self.second_model()
        except ValidationError as error:
            reason = error.errors()[0]
            key = ".".join(["cascade", *map(str, reason["loc"])])
            if reason["type"] == "extra_forbidden":
                message = moved_to(key) or "unknown key; `raypd config show` lists all keys"
            else:
                message = reason["msg"].removeprefix("Value error, ")
            raise ValueError(f"{key}: {message}") from None

    def second_model(self) -> "RunConfig | None":
        """Return the configuration of a run with only the cascade's second model.

        Returns:
            The configuration, or None if there is no cascade.
        """
        if self.cascade.model is None:
            return None
        tree = self.model_dump()
        tree["model"] = tree["cascade"]["model"]
        tree["engine"] |= self.cascade.engine
        tree["cascade"] = {}
        # The skeleton and the options depend on the first model's training and method.
        del tree["decoding"]["skeleton"]
        del tree["decoding"]["options"]
        tree["decoding"] |= {"method": "auto", **self.cascade.decoding}
        return RunConfig.model_validate(tree)

    def _check_vllm(self, method: str) -> None:
        if method not in VLLM_METHODS:
            advice = f"set decoding.method to {' or '.join(VLLM_METHODS)}, or engine.kind: raypd"
            raise ValueError(f"engine.kind vllm does not support {method}: {advice}")
        for key, value in _VLLM_ONLY.items():
            section, _, name = key.partition(".")
            if getattr(getattr(self, section), name) != value:
                raise ValueError(
                    f"engine.kind vllm: {key} must be left at {value or 'null'}, because vLLM "
                    "ignores it"
                )
        if self.model.is_fake:
            raise ValueError(
                "engine.kind vllm needs weights: name a model, or set engine.kind: raypd"
            )

    def _check_categories(self, task: ExtractionConfig) -> None:
        if not task.categories:
            raise ValueError(
                "task.categories is empty: name at least one and its attributes, or set "
                "task.attributes"
            )
        is_unnamed = self.input.category_column is None and self.input.category is None
        if is_unnamed and len(task.categories) > 1:
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
        """The task of an extraction run."""
        assert isinstance(self.task, ExtractionConfig)
        return self.task

    def text_columns(self) -> list[str]:
        """Return the columns that must hold text."""
        return self.task.text_columns(self.input)

    def wanted_columns(self) -> dict[str, str]:
        """Return the columns that the input must have, by the key that names each of them."""
        columns = self.task.wanted_columns(self.input)
        if self.input.id_column is not None:
            columns["input.id_column"] = self.input.id_column
        return columns

    def idle_keys(self) -> set[str]:
        """Return the dotted keys and whole sections that cannot change an answer of this run.

        All others are part of its fingerprint. That includes `model.trust_remote_code`, because a
        model's own code may replace that of transformers, as well as `input.format`,
        `category_column` and `max_document_bytes`, which decide which documents become error rows.
        """
        idle = {
            "output.path",
            "output.partition",
            "output.target_file_mb",
            "cluster",
            "cost",
            "storage",
            "nightly",
            "training",
            "fit",
            "input.path",
            "input.version",
            "input.on_damaged",
            "task.categories_file",
            "task.schema",
        }
        for key in EngineConfig.model_fields:
            if key not in ("kind", "vllm"):
                idle.add(f"engine.{key}")
        for key in IDLE_KEYS:
            idle.add(f"model.{key}")
            idle.add(f"cascade.model.{key}")
        if self.cascade.model is None:
            idle.add("cascade")
        idle |= self.task.idle_keys
        idle |= {f"decoding.{key}" for key in self.decoding.idle_keys(self.task.kind)}
        if isinstance(self.task, GenerationConfig) and self.task.openai:
            # A request of the batch file may be sampled even if the configuration is greedy.
            idle -= {f"decoding.{key}" for key in SAMPLING_KEYS}
        return idle

    def _shows_descriptions(self) -> bool:
        """Return whether the prompt is raypd's own and contains a description of an attribute."""
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
        """Return 12 hexadecimal digits over everything that can change an answer.

        It covers the task, the model, the decoding, and the columns that are read. It is part of
        the id of every unit, so a run with a changed prompt never resumes from old answers. It does
        not depend on where the input is, on how much is processed at the same time, on the number
        of workers, or on keys that the decoding method does not use.
        """
        # Keys at their defaults are left out, so that a release with a new key does not repeat
        # finished corpora.
        changed = self.model_dump(exclude_defaults=True)
        examples = getattr(self.task, "examples", None)
        files = [
            getattr(self.task, "template", None),
            getattr(self.task, "few_shot", None),
            examples and examples.path,
        ]
        prompt_texts = [Path(file).read_text() for file in files if file]
        answers: dict[str, Any] = {}
        if self._shows_descriptions():
            # The prompt shows descriptions in a different form than in earlier versions.
            answers["descriptions"] = 2
        answers |= {
            "answers": _ANSWERS,
            "kind": self.task.kind,
            "method": self.decoding.method,
            "files": prompt_texts,
            **_without(changed, {*self.idle_keys(), *_PROMPT_FILES}),
        }
        return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()[:12]


def _default_method(kind: str, tree: dict[str, Any], card: dict[str, Any]) -> str:
    """Return the decoding method of a configuration that does not name one.

    Args:
        kind: The kind of task.
        tree: The configuration that was read.
        card: The card of the weights; empty if there is none.
    """
    model = tree.get("model") or {}
    engine = tree.get("engine") or {}
    name = model
    if isinstance(model, dict):
        name = model.get("name")
        if model.get("endpoint") is not None:
            return "autoregressive"
    if card.get("method") in METHODS[kind]:
        return str(card["method"])
    default = METHODS[kind][0]
    if kind == "extraction":
        return default if name == "fake" else "guided"
    if isinstance(engine, dict) and engine.get("kind") == "vllm":
        return "autoregressive"
    return default


def _columns_differ(task: ExtractionConfig) -> None:
    """Raise ValueError if two attributes need the same column; SQL ignores case."""
    # For each column, its owner and its content: a type, or nested objects.
    seen = dict.fromkeys([*OWN_COLUMNS, "category", "truncated"], ("raypd's own data", ""))
    for category, schema in task.categories.items():
        for attribute in schema.attributes:
            owner = f"task.categories.{category}: {attribute.name!r}"
            for column, content in _columns_of(attribute).items():
                label = f"{owner} ({content})"
                other, other_content = seen.setdefault(column, (label, content))
                if other_content != content:
                    raise ValueError(
                        f"output.columns typed: {label} needs the same column as {other}: "
                        "rename one"
                    )


def _columns_of(attribute: Attribute) -> dict[str, str]:
    """Return the contents of an attribute's columns, by the lower-case names of the columns."""
    path = [name.casefold() for name in attribute.key_path]
    columns = {}
    for end in range(1, len(path)):
        columns[".".join(path[:end])] = "object"
    columns[".".join(path)] = attribute.value_type.column_type
    for detail in DETAILS:
        columns[f"{path[0]}__{detail}"] = "of its own"
    return columns


def _without(tree: dict[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """Return a tree without some dotted keys, and without the mappings that become empty."""
    remaining = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in keys:
            continue
        if isinstance(value, dict):
            value = _without(value, keys, f"{key}.")
        if value != {}:
            remaining[name] = value
    return remaining
