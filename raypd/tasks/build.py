"""The registry of tasks, and the functions that build the task of a run."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from raypd.config import RunConfig
from raypd.decoding import REGISTRY
from raypd.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from raypd.decoding import DraftModel

# By kind, and imported when one is built: they bring torch. The columns of their rows are in
# `columns.SHAPES`.
TASKS = {
    "extraction": "raypd.tasks.extraction:ExtractionTask",
    "question_answering": "raypd.tasks.question_answering:QuestionAnsweringTask",
    "generation": "raypd.tasks.generation:GenerationTask",
}


def build_task(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int,
    model: "PreTrainedModel | None" = None,
    drafter: "DraftModel | None" = None,
) -> Task:
    """Build the task that a configuration names.

    Args:
        config: Of the run.
        tokenizer: Of the model.
        context_length: Positions that the model has.
        model: Medusa heads follow its device; with None they stay as they were saved.
        drafter: The draft model, where the decoding method has one.

    Raises:
        ConfigError: If prompt and answer cannot fit the context, or a template or example cannot be
            used.
        ModelError: If the tokenizer lacks control tokens of the method, or its heads do not fit the
            model.
    """
    task = resolve_name(TASKS[config.task.kind])
    if drafter is None:
        return task(config, tokenizer, context_length, model)
    return task(config, tokenizer, context_length, model, drafter)


def check_task(config: RunConfig) -> None:
    """Makes the task out of the tokenizer alone, without context and heads, before a start.

    Raises as `build_task`.
    """
    if config.model.has_weights and not REGISTRY[config.decoding.method].heads:
        task_alone(config)


def task_alone(config: RunConfig) -> Task:
    """The task of a model whose weights are not in this process. Raises as `build_task`."""
    from raypd.models import context_length, find_source, load_tokenizer, read_config

    tokenizer = load_tokenizer(config.model)
    context = context_length(config.model.name, read_config(find_source(config.model)), tokenizer)
    return build_task(config, tokenizer, context)
