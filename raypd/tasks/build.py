"""The registry of tasks, and the functions that build the task of a run."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from raypd.config import RunConfig
from raypd.decoding import REGISTRY
from raypd.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from raypd.decoding import DraftModel

# The classes of the tasks by kind. They are imported only when one is built, because they import
# torch. The columns of their rows are in `columns.SHAPES`.
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
        config: The run's configuration.
        tokenizer: The tokenizer of the model.
        context_length: The number of positions of the model.
        model: The model whose device Medusa heads follow; None leaves them as they were saved.
        drafter: The draft model, if the decoding method uses one.

    Raises:
        ConfigError: Prompt and answer cannot fit the context, or a template or example cannot be
            used.
        ModelError: The tokenizer lacks control tokens of the method, or its heads do not fit the
            model.
    """
    task = resolve_name(TASKS[config.task.kind])
    if drafter is None:
        return task(config, tokenizer, context_length, model)
    return task(config, tokenizer, context_length, model, drafter)


def check_task(config: RunConfig) -> None:
    """Check before a start that the task can be built from the tokenizer, without the weights.

    Methods with heads are not checked, because heads need the model. Raises are those of
    `build_task`.
    """
    if config.model.has_weights and not REGISTRY[config.decoding.method].heads:
        task_alone(config)


def task_alone(config: RunConfig) -> Task:
    """Return the task of a model whose weights are not in this process.

    Raises are those of `build_task`.
    """
    from raypd.models import context_length, find_source, load_tokenizer, read_config

    tokenizer = load_tokenizer(config.model)
    context = context_length(config.model.name, read_config(find_source(config.model)), tokenizer)
    return build_task(config, tokenizer, context)
