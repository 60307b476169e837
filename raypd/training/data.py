"""Documents with labels become packed passes, the same in every worker."""

import hashlib
import json

import torch
from transformers import PreTrainedTokenizerBase

from raypd.config import RunConfig
from raypd.dataset.planner import plan
from raypd.dataset.reader import read_unit
from raypd.errors import ConfigError, InputError
from raypd.run.training import TrainingData
from raypd.tasks.base import Document
from raypd.tasks.labels import label_columns
from raypd.training import annotate, preference, teacher
from raypd.training.example import Example, Examples, listed
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
        raise ConfigError(
            f"decoding.method {method} of task.kind {kind} cannot be trained yet; these can: "
            f"{trainable}"
        )
    if kind == "extraction" and config.extraction.too_long == "windows":
        raise ConfigError(
            "task.too_long windows: nobody knows which window has a value; set "
            "task.too_long=truncate"
        )
    for key in ("annotations", "preference"):
        if getattr(config.training, key) is not None and method != "pasta":
            raise ConfigError(f"training.{key} is for decoding.method pasta, and this is {method}")
    if config.training.preference is not None:
        preference.check(config)


def check_input(config: RunConfig) -> None:
    """Raises InputError, or RunError where storage fails, for documents that no worker would find
    either.
    """
    plan(config)
    if config.training.validation is not None:
        plan(_of_validation(config))


def prepare(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> tuple[TrainingData, list[list[Example]], list[list[Example]]]:
    """The data's description, packs of an epoch and of a validation.

    Raises InputError: none, or max_skipped_share.
    """
    training = config.training
    documents = _documents(config)
    if training.validation is not None:
        held_out = _documents(_of_validation(config))
    else:
        held_out = [document for document in documents if _is_held_out(document, config)]
        documents = [document for document in documents if not _is_held_out(document, config)]
    make: Examples
    if training.preference is not None:
        make = preference.PairExamples(config, tokenizer, context_length)
        make.skipped.update(preference.label([*documents, *held_out], config))
    elif config.task.kind == "extraction":
        make = ExtractionExamples(config, tokenizer, context_length)
    else:
        make = GenerationExamples(config, tokenizer, context_length)
    generator = torch.Generator().manual_seed(0)  # a validation has the same masks each time
    examples, validation = (
        list(make(documents)),
        [example.drawn(generator) for example in make(held_out)],
    )
    _check_skipped(config, make, len(documents) + len(held_out))
    skipped = dict(make.skipped.most_common())
    for usable, key in ((examples, "input.path"), (validation, "training.validation")):
        if not usable:
            raise InputError(f"{key}: no document that can be used{listed(make.skipped, 5)}")
    groups = _passes(examples, config, training.seed)
    said = [
        json.dumps([d.id, d.fields], sort_keys=True, default=str) for d in (*documents, *held_out)
    ]
    facts = TrainingData(
        documents=len(documents),
        validation_documents=len(held_out),
        tokens=sum(map(count_tokens, groups)),
        targets=sum(len(example.targets) for example in examples),
        skipped=skipped,
        digest=hashlib.sha256("".join(said).encode()).hexdigest()[:16],
    )
    return facts, groups, _passes(validation, config, 0)


def _passes(examples: list[Example], config: RunConfig, seed: int) -> list[list[Example]]:
    if config.training.preference is not None:
        return [list(pair) for pair in zip(examples[::2], examples[1::2], strict=True)]
    return list(batches(examples, config.training.batch_size, config.training.batch_tokens, seed))


def _documents(config: RunConfig) -> list[Document]:
    training = config.training
    named = label_columns(config.extraction.categories) if config.task.kind == "extraction" else []
    columns = (
        [training.labels_column, *named]
        if training.labels is None and training.preference is None
        else []
    )
    documents: list[Document] = []
    for unit in plan(config):
        for document in read_unit(unit, config, columns):
            document.index = len(documents)
            documents.append(document)
    if training.labels is not None:
        teacher.label(documents, training.labels, config)
    if training.annotations is not None:
        annotate.label(documents, config)
    return documents


def _of_validation(config: RunConfig) -> RunConfig:
    source = config.input.model_copy(update={"path": config.training.validation})
    return config.model_copy(
        update={"input": source, "training": config.training.model_copy(update={"labels": None})}
    )


def _is_held_out(document: Document, config: RunConfig) -> bool:
    digest = hashlib.sha256(f"{config.training.seed}/{document.id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.training.validation_share * 2**64


def _check_skipped(config: RunConfig, make: Examples, documents: int) -> None:
    limit = config.training.max_skipped_share
    for lost, total, kind in (
        (make.lost, documents, "documents"),
        (make.lost_labels, make.labels, "labels"),
    ):
        share = lost / max(1, total)
        if share > limit:
            most = f"training.max_skipped_share is {limit:.0%}"
            reasons = listed(make.skipped, 5)
            raise InputError(
                f"{lost} of {total} {kind} cannot be trained on ({share:.0%}; {most}){reasons}"
            )
