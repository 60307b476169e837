"""Tasks: a document -> a prompt with places for answers; decoded tokens -> checked records."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.tasks.base import Task
from raypd.tasks.extraction import ExtractionTask


def build_task(config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int) -> Task:
    """The task that a configuration names. Raises ConfigError where it cannot fit the model."""
    return ExtractionTask(config, tokenizer, context_length)
