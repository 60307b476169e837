"""How a model is fine-tuned for the method that it will be decoded with, and how `raypd fit` finds
the cheapest one.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from raypd.config.model import Keys
from raypd.config.options import OptionsOf
from raypd.config.secrets import Uri, check_secrets
from raypd.schema import Section

# The number of labelled documents that gives each part of a fit enough of them, with the default
# shares.
LABELS_NEEDED = 60
# The sections that a candidate of a fit may change.
_SECTIONS = ("model", "decoding", "training", "engine")


class PreferenceConfig(Section, use_attribute_docstrings=True):
    """A preference round (BoNBoN): a model learns from the best and the worst of its samples."""

    samples: Uri | None = None
    """Output folder of a run with `pasta`, task.samples 10 and temperature 1; null: the training
    makes such a run with model.name
    """
    baseline: Uri | Keys = Field(
        description="Output folder of an autoregressive run, or dotted keys of a run to make"
    )
    judged: Uri | Keys = Field(
        description="Output folder of the judge's run over a round's comparisons, or dotted keys "
        "of a run to make"
    )
    rounds: int = Field(
        1,
        ge=1,
        description="Rounds; each begins with the weights of the one before",
    )
    quality_weight: float = Field(1.0, ge=0)
    """lambda in: score = theoretical speedup + lambda x quality; the paper uses 1, 2, 4 and 8"""
    alpha: float = Field(
        0.005, ge=0, le=1, description="Weight of the loss of the best sample's text"
    )
    beta: float = Field(0.0393, gt=0)
    """1/beta is the amount by which log p(best) - log p(worst) should rise. For a model that writes
    the best of n samples it is (n - 1)(1 + 1/2 + ... + 1/(n - 1)); the default is that of n = 10
    """


class LoraOptions(Section):
    """The keys of `training.lora`."""

    rank: int = Field(16, ge=1, description="Rank of the matrices")
    alpha: int = Field(32, ge=1, description="Their product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of the inputs dropped in training")


class TrainingConfig(Section, use_attribute_docstrings=True):
    """What `raypd train` needs besides the run's own keys; other commands ignore this section."""

    labels_column: str = Field(
        "target", description="Column with a document's labels, {attribute: value or null}"
    )
    labels: Uri | None = None
    """Labels in place of that column: a file of labels, or the output folder of a run over the same
    input, whose answers become labels; relative to this file, like all paths that are read. The run
    may be that of a larger model (distillation) or of the same model, decoded autoregressively
    (self-supervision)
    """
    annotations: Uri | Keys | None = None
    """pasta: the teacher that marks which parts of an answer can be written side by side, as dotted
    keys of its run or as the run's output folder; null: rules mark them
    """
    preference: PreferenceConfig | None = None
    """pasta: preference rounds (BoNBoN) in place of labels: {baseline, judged, samples, rounds,
    ...}
    """
    validation: Uri | None = None
    """File, folder or glob of the documents that measure the validation loss; null:
    validation_share of the input
    """
    validation_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the documents of the input, or of a fit, that is held out; "
        "drawn by their ids",
    )
    weights: Literal["lora", "full"] = Field(
        "lora",
        description="What is trained: an adapter (with model.quantization nf4: QLoRA), or all "
        "weights",
    )
    lora: Annotated[dict[str, Any], OptionsOf({"": LoraOptions})] = Field({})
    """Options of `weights: lora`, such as {rank: 32, alpha: 64}"""
    train_routers: bool = False
    """Whether to train the routers of a mixture of experts, which choose the experts of a token"""
    learning_rates: list[float] = Field([1e-4], min_length=1)
    """Learning rates to try; the weights with the lowest validation loss are kept"""
    epochs: float = Field(3.0, gt=0, description="Passes over the documents")
    batch_size: int = Field(8, ge=1)
    """Maximum examples in a pass of one worker; all have the same instruction, or none"""
    trainer: Keys = Field({})
    """Fields of transformers' TrainingArguments that replace raypd's, such as {warmup_steps: 0.1,
    weight_decay: 0.01, gradient_accumulation_steps: 4}; docs/training.md has the defaults
    """
    evaluations: int = Field(4, ge=1)
    """Number of times that a training measures the validation loss and keeps a checkpoint"""
    patience: int | None = Field(
        None,
        ge=1,
        description="Evaluations without a lower loss after which a training ends; null: no limit",
    )
    sharding: Literal["none", "fsdp"] = "none"
    """fsdp: split the weights and the optimizer over the workers, if one GPU cannot hold them"""
    mask_groups: int = Field(1, ge=1)
    """space: number of places at which the answer of an example is masked. 1, as in the paper: half
    of the examples have no masks, and the others end after their masks; more: the whole text, with
    all of these masks beside it
    """
    max_skipped_share: float = Field(0.1, ge=0, le=1)
    """Limit of the share of documents, or of labels, that cannot be used; above it nothing is
    trained
    """
    seed: int = Field(0, ge=0, description="Seed of the documents' order and of new weights")

    @property
    def lora_options(self) -> LoraOptions:
        """The keys of `lora`, with the default values of those that are not set."""
        return LoraOptions.model_validate(self.lora)


def _shares(shares: list[float]) -> list[float]:
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"{shares}: shares of the training part must be between 0 and 1")
    return sorted(set(shares))


def _named_and_known(candidates: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    check_secrets(candidates)
    for name, keys in candidates.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"{name!r}: use only letters, digits and . _ -")
        if name == "teacher":
            raise ValueError("'teacher' is the name of the model in fit.teacher: choose another")
        for key in keys:
            if key.partition(".")[0] not in _SECTIONS or "." not in key:
                raise ValueError(
                    f"{name}: {key!r}: give keys of {', '.join(_SECTIONS)}, such as "
                    "training.weights"
                )
    return candidates


class FitConfig(Section, use_attribute_docstrings=True):
    """What `raypd fit` needs besides the run's own keys; other commands ignore this section."""

    path: Uri | None = Field(
        None, description="Local folder of the fit; null: output.path followed by -fit"
    )
    labels: Uri | None = None
    """Labelled documents: a file, folder or glob with the input's columns and
    training.labels_column; a file of ids and labels; or the output folder of a run over the input.
    Relative to this file, like all paths that are read. null: the teacher labels, or the input
    itself has that column
    """
    teacher: Keys | None = None
    """Dotted keys of the run that makes labels: {model.name: Qwen/Qwen3-8B}, or {model.endpoint:
    {...}}
    """
    documents: int = Field(
        400, ge=1, description="Labelled documents that are used, drawn evenly from the corpus"
    )
    test_share: float = Field(
        0.25, gt=0, lt=1, description="Share of these that only measures F1; at least 30 documents"
    )
    candidates: Annotated[dict[str, dict[str, Any]], AfterValidator(_named_and_known)] = Field({})
    """Models to train: name -> dotted keys of model, decoding, training and engine. {}: one,
    `lora`, an adapter that sees the labels twice, at a learning rate that suits the model's size
    """
    curve: Annotated[list[float], AfterValidator(_shares)] = Field([0.5])
    """Each candidate is also trained on these shares of the training part, to show whether more
    labels would help; []: none
    """
    f1_floor: float = Field(
        0.7,
        ge=0,
        le=1,
        description="F1 that the low end of the recommended model's 95% interval must reach",
    )
    sample: int = Field(
        16, ge=2, description="Documents that are decoded to measure the cost of each model"
    )
    sample_minutes: float = Field(
        2.0, gt=0, description="Time limit of that measurement, per model"
    )
