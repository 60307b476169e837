"""The configuration of `python -m benchmarks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from raypd.config.load import override
from raypd.config.model import ModelConfig
from raypd.config.paths import anchor_paths
from raypd.config.yaml_file import YamlFile
from raypd.errors import ConfigError
from raypd.schema.section import Section

Engine = Literal[
    "raypd",
    "raypd-guided",
    "generate",
    "generate_batch",
    "vllm-whole",
    "vllm-each",
    "openvino-whole",
    "openvino-each",
]
ENGINES: tuple[Engine, ...] = get_args(Engine)


class WorkConfig(Section):
    """The keys of every work."""

    engines: list[Engine] | None = Field(
        None, min_length=1, description="null: those of benchmark.engines"
    )
    vary: dict[str, list[int]] = Field(
        {},
        description=(
            "One key of the work and its values: a work for each, a chart of the cost over them"
        ),
    )

    @model_validator(mode="after")
    def _one_number_varies(self) -> WorkConfig:
        numbers = [name for name in type(self).model_fields if isinstance(getattr(self, name), int)]
        if len(self.vary) > 1 or not set(self.vary) <= set(numbers):
            raise ValueError(f"vary: one of {', '.join(numbers)}, with a list of its values")
        return self

    def varied(self, name: str) -> dict[str, WorkConfig]:
        """Return the works that this one stands for, by name.

        Raises:
            pydantic.ValidationError: For a value out of bounds.
        """
        if not self.vary:
            return {name: self}
        ((key, values),) = self.vary.items()
        tree = self.model_dump(exclude={"vary"})
        works = {}
        for value in values:
            works[f"{name} {key}={value}"] = type(self).model_validate({**tree, key: value})
        return works


class RandomSlots(WorkConfig):
    """Documents of random tokens, with a slot of a fixed length for each attribute."""

    kind: Literal["random_slots"]
    documents: int = Field(24, ge=1)
    shared: int = Field(400, ge=1, description="Tokens of the instruction")
    own: int = Field(300, ge=1, description="Tokens of a document")
    attributes: int = Field(16, ge=1)
    key_tokens: int = Field(5, ge=1)
    value_tokens: int = Field(5, ge=1)
    stack: int = Field(1, ge=1, description="Documents of one prompt")


class Extraction(WorkConfig):
    """Documents with labels, as `raypd evaluate` reads them.

    The rows are {id, category, title, description, target}.
    """

    kind: Literal["extraction"]
    data: str = Field(description="JSON lines in benchmark.data")
    documents: int = Field(64, ge=1, description="The first ones of the file")
    task: str | None = Field(
        None, description="YAML of a run whose `task` is asked; null: the keys of every target"
    )
    answers: Literal["own", "labels"] = Field(
        "own",
        description=(
            "What is decoded: the model's own answers, or for all engines the tokens of the labels"
        ),
    )
    skeleton: Literal["keys", "slots"] = Field(
        "keys",
        description=(
            "decoding.skeleton; of labels in slots vLLM writes the same short lines, token by token"
        ),
    )
    value_tokens: int = Field(30, ge=1, description="decoding.max_value_tokens")
    max_new_tokens: int = Field(512, ge=1, description="Of an answer that is written whole")
    layout: Literal["schema", "lines"] = Field(
        "schema",
        description=(
            "What holds a whole answer: a JSON schema, or the layout of `autoregressive`, a value "
            "a line, which weights that raypd has trained write"
        ),
    )
    models: dict[Engine, str] = Field(
        {}, description="Engine -> folder of weights that were trained for its way"
    )


class Questions(WorkConfig):
    """Contexts with questions: {id, context, questions: [{id, question}]}.

    Choices are not shown.
    """

    kind: Literal["questions"]
    data: str = Field(description="JSON lines in benchmark.data")
    contexts: int = Field(20, ge=1, description="The first ones of the file")
    answer_tokens: int = Field(20, ge=1, description="Most tokens of an answer")


class RandomQuestions(WorkConfig):
    """Contexts of random tokens with questions; all answers have the same length."""

    kind: Literal["random_questions"]
    shared: int = Field(2750, ge=1, description="Tokens of instruction and examples")
    contexts: int = Field(4, ge=1)
    context_tokens: int = Field(740, ge=1)
    questions: int = Field(30, ge=1, description="Of a context")
    question_tokens: int = Field(20, ge=1)
    answer_tokens: int = Field(10, ge=1)


WORKS: dict[str, type[WorkConfig]] = {
    "random_slots": RandomSlots,
    "extraction": Extraction,
    "questions": Questions,
    "random_questions": RandomQuestions,
}
AnyWork = Annotated[
    RandomSlots | Extraction | Questions | RandomQuestions, Field(discriminator="kind")
]


class BenchmarkConfig(Section):
    """Which engines do which works, and how often."""

    works: dict[str, AnyWork] = Field(
        min_length=1,
        description="Name -> {kind: random_slots | extraction | questions | random_questions, ...}",
    )
    only: list[str] = Field([], description="Names of the works that are run; none: all")
    engines: list[Engine] = Field(
        list(ENGINES), min_length=1, description="Ratios are to the first that ran"
    )
    data: str | None = Field(
        None, description="Folder of the works' data; a work whose data is not there is left out"
    )
    output: str = Field(
        "runs/benchmark", description="Folder for table.md, results.json and the charts"
    )
    repeats: int = Field(5, ge=1, description="Timed runs of each engine, in turn with the others")
    max_num_seqs: list[int] = Field(
        [24, 64, 128],
        min_length=1,
        description=(
            "Tried with vLLM, OpenVINO and generate_batch; the best is reported. raypd has auto"
        ),
    )
    batch_sizes: list[int] = Field([8, 24, 64], min_length=1, description="Tried with generate")
    most_documents: int = Field(10_000, ge=1, description="Works of more documents are left out")
    most_seconds: float = Field(
        3600, gt=0, description="For one start or one run of an engine; then its row says so"
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of every engine; null: all cores"
    )
    vllm_python: str | None = Field(
        None, description="Interpreter of the environment that vLLM is installed in; null: this one"
    )
    openvino_python: str | None = Field(
        None,
        description=(
            "Interpreter of the environment that OpenVINO GenAI is installed in; null: this one"
        ),
    )
    vllm_environment: dict[str, str | int] = Field(
        {},
        description="Variables of its process, over VLLM_CPU_KVCACHE_SPACE: 4 (GB of each process)",
    )
    vllm_arguments: dict[str, str | int | float | bool] = Field(
        {},
        description=(
            "More for vllm.LLM, such as gpu_memory_utilization: 0.3, so that engines fit a GPU "
            "side by side"
        ),
    )
    vllm_forms: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        {},
        description=(
            "Argument of vllm.LLM, or NAME of a variable of its process -> values. It starts with "
            "the first of each; the others are tried at the best max_num_seqs, one key after the "
            "other, and the fastest stays"
        ),
    )

    @field_validator("max_num_seqs", "batch_sizes")
    @classmethod
    def _positive(cls, sizes: list[int]) -> list[int]:
        if min(sizes) < 1:
            raise ValueError("sizes are 1 or more")
        return sizes

    @model_validator(mode="after")
    def _known_works(self) -> BenchmarkConfig:
        unknown = set(self.only) - set(self.works)
        if unknown:
            raise ValueError(
                f"only: there is no work {min(unknown)!r}; there are {', '.join(self.works)}"
            )
        return self


class BenchmarkRun(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    benchmark: BenchmarkConfig


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file without checking it.

    Args:
        path: The file. Relative paths in it are relative to its folder.
        overrides: `key=value` with dotted keys.

    Raises:
        ConfigError: If it cannot be read.
    """
    source = YamlFile.read(path)
    anchor_paths(source.tree, path.parent)
    override(source, overrides)
    return source.tree


def load_benchmark(path: str | Path, overrides: Sequence[str] = ()) -> BenchmarkRun:
    """Read and check the YAML file of a benchmark.

    Args:
        path: The file. Relative paths in it are relative to its folder.
        overrides: `key=value` with dotted keys.

    Raises:
        ConfigError: With every mistake.
    """
    tree = read_tree(Path(path), overrides)
    try:
        run = BenchmarkRun.model_validate(tree)
    except ValidationError as error:
        mistakes = [
            f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        ]
        raise ConfigError("\n".join(mistakes)) from None
    works: dict[str, Any] = {}
    for name, work in run.benchmark.works.items():
        if isinstance(work, Extraction) and work.task:
            task = str(Path(path).parent / work.task)
            works[name] = work.model_copy(update={"task": task})
        else:
            works[name] = work
    return run.model_copy(update={"benchmark": run.benchmark.model_copy(update={"works": works})})
