"""Documents with labels become packed passes, the same in every worker."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import torch
from transformers import PreTrainedTokenizerBase

from raypd.config import ExtractionConfig, InputConfig, RunConfig
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, InputError
from raypd.run.training import TrainingData
from raypd.tasks.base import Document
from raypd.training import annotate, preference, teacher
from raypd.training.example import Example
from raypd.training.extraction import ExtractionExamples
from raypd.training.generation import GenerationExamples
from raypd.training.packing import batches, count_tokens

METHODS = {  # that can be trained
    "extraction": ("hyper_parallel", "autoregressive"),
    "generation": ("autoregressive", "apar", "pasta", "space", "medusa", "apar_medusa"),
}


def check(config: RunConfig) -> None:
    """Raises ConfigError where the configuration asks for what cannot be trained."""
    kind, method = config.task.kind, config.decoding.method
    if method not in METHODS.get(kind, ()):
        trainable = "; ".join(f"{kind}: {', '.join(methods)}" for kind, methods in METHODS.items())
        raise ConfigError(f"decoding.method {method} of task.kind {kind} cannot be trained yet; these can: {trainable}")
    annotate.check(config)
    if config.training.preference is not None:
        preference.check(config)


def check_input(config: RunConfig) -> None:
    """Raises InputError, or RunError where storage fails, for documents that no worker would find either."""
    plan(config)
    if config.training.validation is not None:
        plan(config.model_copy(update={"input": _at(config, config.training.validation)}))


def prepare(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> tuple[TrainingData, list[list[Example]], list[list[Example]]]:
    """The data's description, the packed groups of an epoch, and those of a validation.

    Raises:
        InputError: nothing to train on, or to validate on, or more unusable documents than max_skipped_share.
    """
    training = config.training
    documents = _documents(config)
    if training.validation is not None:
        gold = {"input": _at(config, training.validation), "training": training.model_copy(update={"labels": None})}
        held_out = _documents(config.model_copy(update=gold))
    else:
        drawn = [_drawn(document, training.validation_share, training.seed) for document in documents]
        held_out = [document for document, out in zip(documents, drawn, strict=True) if out]
        documents = [document for document, out in zip(documents, drawn, strict=True) if not out]
    make = _kind(config)(config, tokenizer, context_length)
    if training.preference is not None:
        make.skipped.update(preference.label([*documents, *held_out], config))
    generator = torch.Generator().manual_seed(0)  # a validation has the same masks each time
    examples, validation = list(make(documents)), [example.drawn(generator) for example in make(held_out)]
    _check_skipped(config, make, len(documents) + len(held_out))
    for usable, key in ((examples, "input.path"), (validation, "training.validation")):
        if not usable:
            raise InputError(f"{key}: no document that can be used{_most_common(make.skipped)}")
    groups = _passes(examples, config, training.seed)
    facts = TrainingData(
        len(documents),
        len(held_out),
        sum(map(count_tokens, groups)),
        sum(len(example.targets) for example in examples),
        dict(make.skipped.most_common()),
        _digest([*documents, *held_out]),
    )
    return facts, groups, _passes(validation, config, 0)


def _kind(config: RunConfig) -> type[ExtractionExamples] | type[GenerationExamples]:
    if config.training.preference is not None:
        return preference.PairExamples
    return ExtractionExamples if isinstance(config.task, ExtractionConfig) else GenerationExamples


def _passes(examples: list[Example], config: RunConfig, seed: int) -> list[list[Example]]:
    training = config.training
    if training.preference is not None:
        return [list(pair) for pair in zip(examples[::2], examples[1::2], strict=True)]
    return list(batches(examples, training.batch_size, training.batch_tokens, seed))


def _documents(config: RunConfig) -> list[Document]:
    training = config.training
    columns = [training.labels_column] if training.labels is None and training.preference is None else []
    documents: list[Document] = []
    for unit in plan(config):
        for document in read_unit(unit, config, columns):
            document.index = len(documents)
            documents.append(document)
    if training.labels is not None:
        teacher.label(documents, training.labels, training.labels_column)
    if training.annotations is not None:
        annotate.label(documents, config)
    return documents


def _digest(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.id, document.fields], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _at(config: RunConfig, path: str) -> InputConfig:
    return config.input.model_copy(update={"path": path})


def _drawn(document: Document, share: float, seed: int) -> bool:
    digest = hashlib.sha256(f"{seed}/{document.id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _check_skipped(config: RunConfig, make: ExtractionExamples | GenerationExamples, documents: int) -> None:
    limit = config.training.max_skipped_share
    for lost, total, kind in ((make.lost, documents, "documents"), (make.lost_labels, make.labels, "labels")):
        share = lost / max(1, total)
        if share > limit:
            raise InputError(
                f"{lost} of {total} {kind} cannot be trained on ({share:.0%}; "
                f"training.max_skipped_share is {limit:.0%}){_most_common(make.skipped)}"
            )


def _most_common(skipped: Counter[str]) -> str:
    return "".join(f"\n  {count} x {reason}" for reason, count in skipped.most_common(5))
