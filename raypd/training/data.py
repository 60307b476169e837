"""Documents with labels become packed passes, the same in every worker."""

import hashlib
import json

import torch
from transformers import PreTrainedTokenizerBase

import raypd.training.annotate as annotate
import raypd.training.preference as preference
import raypd.training.teacher as teacher
from raypd.config import RunConfig
from raypd.dataset import planner, read_unit
from raypd.errors import ConfigError, InputError
from raypd.run import TrainingData
from raypd.tasks import Document, TrainedOn, label_columns, trained_on
from raypd.training.example import Example, Examples, listed
from raypd.training.extraction import ExtractionExamples
from raypd.training.generation import GenerationExamples
from raypd.training.packing import batches, count_tokens

# Kind of task -> the decoding methods that can be trained.
METHODS = {
    "extraction": ("hyper_parallel", "autoregressive"),
    "generation": ("autoregressive", "apar", "pasta", "space", "medusa", "apar_medusa"),
}
_SHOWN_REASONS = 5
# The largest number of tokens of one pass; a longer example gets its own pass.
_MAX_BATCH_TOKENS = 4096


def check_training(config: RunConfig) -> None:
    """Check that raypd can train what a configuration describes.

    Args:
        config: The configuration.

    Raises:
        ConfigError: If it cannot.
    """
    kind = config.task.kind
    method = config.decoding.method
    if method not in METHODS.get(kind, ()):
        trainable = "; ".join(f"{kind}: {', '.join(methods)}" for kind, methods in METHODS.items())
        raise ConfigError(
            f"decoding.method {method} of task.kind {kind} cannot be trained yet; these can: "
            f"{trainable}"
        )
    if kind == "extraction" and config.extraction.long_documents == "split":
        raise ConfigError(
            "task.long_documents split: the labels do not say which window a value is in; set "
            "task.long_documents=head"
        )
    for key in ("annotations", "preference"):
        if getattr(config.training, key) is not None and method != "pasta":
            raise ConfigError(f"training.{key} is for decoding.method pasta, and this is {method}")
    if config.training.trainer:
        from raypd.training.arguments import check_arguments

        check_arguments(config.training.trainer)
    if config.training.preference is not None:
        preference.check(config)


def check_input(config: RunConfig) -> None:
    """Check in the driver that documents of training and validation exist.

    Raises:
        InputError: If there are none.
        RunError: If storage fails.
    """
    planner.plan(config)
    if config.training.validation is not None:
        planner.plan(_validation_config(config))


def prepare(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> tuple[TrainingData, TrainedOn, list[list[Example]], list[list[Example]]]:
    """Read the documents and make the passes of a training.

    Args:
        config: The configuration.
        tokenizer: The tokenizer of the model.
        context_length: The number of positions of the model.

    Returns:
        A description of the data, a record of its documents by which an evaluation recognizes them,
        the passes of an epoch, and the passes of a validation.

    Raises:
        InputError: If no document can be used, or more than `training.max_skipped_share` cannot.
    """
    training = config.training
    documents, held_out = _split_documents(config)
    all_documents = [*documents, *held_out]
    make = _examples_maker(config, tokenizer, context_length, all_documents)
    examples = list(make(documents))
    generator = torch.Generator().manual_seed(0)  # so that every validation has the same masks
    validation = [example.drawn(generator) for example in make(held_out)]
    _check_skipped(config, make, len(all_documents))
    skipped = dict(make.skipped.most_common())
    for usable, key in ((examples, "input.path"), (validation, "training.validation")):
        if not usable:
            reasons = listed(make.skipped, _SHOWN_REASONS)
            raise InputError(f"{key}: no document that can be used{reasons}")
    passes = _passes(examples, config, training.seed)
    data = TrainingData(
        documents=len(documents),
        validation_documents=len(held_out),
        tokens=sum(map(count_tokens, passes)),
        targets=sum(len(example.targets) for example in examples),
        skipped=skipped,
        digest=_digest(all_documents),
    )
    documents_seen = trained_on(all_documents, config.text_columns())
    return data, documents_seen, passes, _passes(validation, config, 0)


def _split_documents(config: RunConfig) -> tuple[list[Document], list[Document]]:
    """Read the documents; return those of training and those of validation."""
    documents = _documents(config)
    if config.training.validation is not None:
        return documents, _documents(_validation_config(config))
    training = [document for document in documents if not _is_held_out(document, config)]
    held_out = [document for document in documents if _is_held_out(document, config)]
    return training, held_out


def _examples_maker(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    documents: list[Document],
) -> Examples:
    """Return the maker of examples for the task; for a preference round, also label `documents`."""
    if config.training.preference is not None:
        pairs = preference.PairExamples(config, tokenizer, context_length)
        pairs.skipped.update(preference.label(documents, config))
        return pairs
    if config.task.kind == "extraction":
        return ExtractionExamples(config, tokenizer, context_length)
    return GenerationExamples(config, tokenizer, context_length)


def _digest(documents: list[Document]) -> str:
    """Return a digest of documents and their labels."""
    digest = hashlib.sha256()
    for document in documents:
        row = json.dumps([document.id, document.fields], sort_keys=True, default=str)
        digest.update(row.encode())
    return digest.hexdigest()[:16]


def _passes(examples: list[Example], config: RunConfig, seed: int) -> list[list[Example]]:
    """Group examples into passes; in a preference round, every pass is a pair."""
    if config.training.preference is not None:
        return [list(pair) for pair in zip(examples[::2], examples[1::2], strict=True)]
    return list(batches(examples, config.training.batch_size, _MAX_BATCH_TOKENS, seed))


def _documents(config: RunConfig) -> list[Document]:
    """Read all documents, with their labels."""
    training = config.training
    columns: list[str] = []
    if training.labels is None and training.preference is None:
        columns.append(training.labels_column)
        if config.task.kind == "extraction":
            columns += label_columns(config.extraction.categories)
    documents: list[Document] = []
    for unit in planner.plan(config):
        for document in read_unit(unit, config, columns):
            document.index = len(documents)
            documents.append(document)
    if training.labels is not None:
        teacher.label_documents(documents, training.labels, config)
    if training.annotations is not None:
        annotate.label(documents, config)
    return documents


def _validation_config(config: RunConfig) -> RunConfig:
    """Return the configuration that reads the documents of `training.validation`."""
    source = config.input.model_copy(update={"path": config.training.validation})
    training = config.training.model_copy(update={"labels": None})
    return config.model_copy(update={"input": source, "training": training})


def _is_held_out(document: Document, config: RunConfig) -> bool:
    """Return whether a document is one of validation, drawn by its id."""
    digest = hashlib.sha256(f"{config.training.seed}/{document.id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.training.validation_share * 2**64


def _check_skipped(config: RunConfig, make: Examples, documents: int) -> None:
    """Raise InputError if too many documents or labels cannot be trained on."""
    limit = config.training.max_skipped_share
    counts = ((make.lost, documents, "documents"), (make.lost_labels, make.labels, "labels"))
    for lost, total, kind in counts:
        share = lost / max(1, total)
        if share > limit:
            threshold = f"training.max_skipped_share is {limit:.0%}"
            reasons = listed(make.skipped, _SHOWN_REASONS)
            raise InputError(
                f"{lost} of {total} {kind} cannot be trained on ({share:.0%}; {threshold}){reasons}"
            )
