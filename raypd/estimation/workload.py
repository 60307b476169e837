"""The tokens of a configuration's documents, for a prediction that decodes nothing.

Prompts are those of the configuration, in tokens of its tokenizer. The length of the answers
cannot be known before a model answers, so it is assumed.
"""

from dataclasses import dataclass
from typing import Any

import raypd.estimation.hosted as hosted
from raypd.config import QuestionAnsweringConfig, RunConfig, with_changes
from raypd.errors import ModelError
from raypd.estimation.roofline import DocumentTokens
from raypd.estimation.sampling import CorpusSample
from raypd.tasks import text_of
from raypd.testing import fake

# Mean tokens of a value, as in workload W1 of docs/benchmark.md.
_VALUE_TOKENS = 5
_CHARACTERS_PER_TOKEN = 4.0


@dataclass
class Workload:
    """What a document of a configuration takes.

    Attributes:
        tokens: Means over the sample.
        source: In words, where the tokens come from and what is assumed.
    """

    tokens: DocumentTokens
    source: str


def of_config(config: RunConfig, sample: CorpusSample) -> Workload:
    """Count the prompts of a sample, and assume the lengths of their answers.

    Args:
        config: The configuration.
        sample: Documents of its input.
    """
    characters_per_token, counted_by = _characters_per_token(config, sample)
    costs = {"characters_per_token": characters_per_token, "value_tokens": _VALUE_TOKENS}
    # The fake model knows the prompts and the slots of every kind of task without weights.
    fake_model = {"model": {"name": "fake", "fake": costs}, "decoding.method": "hyper_parallel"}
    if config.task.kind != "extraction":
        fake_model["decoding.method"] = config.decoding.method
    task = fake.FakeTask(with_changes(config, fake_model))
    shared: list[int] = []
    prompts: list[int] = []
    keys: list[int] = []
    values: list[int] = []
    passes: list[int] = []
    for request in task.plan(sample.documents):
        if not isinstance(request, fake.Request):
            continue
        program: Any = request.program
        key_tokens = task.key_tokens(program)
        shared.append(program.shared)
        prompts.append(program.prompt - key_tokens)
        keys.append(key_tokens)
        values.append(sum(program.lanes))
        passes.append(max(program.lanes, default=1))
    count = max(1, len(prompts))
    tokens = DocumentTokens(
        shared=round(sum(shared) / count),
        own=max(1, round(sum(prompts) / count)),
        keys=round(sum(keys) / count),
        values=max(1, round(sum(values) / count)),
        passes=max(1, round(sum(passes) / count)),
    )
    answer = f"{_VALUE_TOKENS} tokens per value"
    if config.task.kind == "generation":
        answer = f"{task.costs.answer_tokens} tokens per answer"
    if isinstance(config.task, QuestionAnsweringConfig):
        answer = f"{_VALUE_TOKENS} tokens per answer"
    source = f"prompts of {count} documents of this configuration, {counted_by}; {answer} assumed"
    return Workload(tokens, source)


def _characters_per_token(config: RunConfig, sample: CorpusSample) -> tuple[float, str]:
    """Return the characters per token, and in words which tokenizer counted them."""
    if config.model.is_fake or config.model.endpoint is not None:
        characters = _CHARACTERS_PER_TOKEN
        if config.model.is_fake:
            characters = config.model.fake_costs.characters_per_token
        return characters, f"at {characters:g} characters per token"
    texts = []
    for document in sample.documents:
        try:
            texts.append(text_of(document, list(config.text_columns())))
        except ValueError:
            continue  # A document without text has an error row in the run.
    try:
        count_tokens = hosted.counter(config)
    except ModelError:
        # The prediction needs no weights, so it is not an error if the model is not available yet.
        return _CHARACTERS_PER_TOKEN, f"at {_CHARACTERS_PER_TOKEN:g} characters per token"
    characters = sum(len(text) for text in texts)
    token_count = sum(count_tokens(text) for text in texts)
    if not token_count:
        return _CHARACTERS_PER_TOKEN, f"at {_CHARACTERS_PER_TOKEN:g} characters per token"
    return characters / token_count, f"by the tokenizer of {config.model.name}"
