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

_SECTIONS = ("model", "decoding", "training", "engine")  # that a candidate of a fit may change


class PreferenceConfig(Section, use_attribute_docstrings=True):
    """A preference round (BoNBoN): a model learns from the best and the worst of its samples."""

    samples: Uri | None = None
    """Output folder of a run with `pasta`, task.samples 10 and temperature 1; null: model.name
    makes them, such ones
    """
    baseline: Uri | Keys = Field(
        description="Output folder of an autoregressive run, or keys, dotted, of one to make"
    )
    judged: Uri | Keys = Field(
        description="Output folder of the judge's run over a round's comparisons, or its keys"
    )
    rounds: int = Field(
        1,
        ge=1,
        description="Each begins from the weights of the one before, and makes what it needs",
    )
    quality_weight: float = Field(1.0, ge=0)
    """lambda; score = theoretical speedup + lambda x quality. The paper's: 1, 2, 4, 8"""
    alpha: float = Field(
        0.005, ge=0, le=1, description="Share of the loss of writing the best sample"
    )
    beta: float = Field(0.0393, gt=0)
    """1/beta is by how much log p(best) - log p(worst) is to rise; of a model that writes the best
    of n samples it has risen by (n - 1)(1 + 1/2 + ... + 1/(n - 1)), which is 1/beta of the default
    for n = 10
    """


class LoraOptions(Section):
    """The keys of `training.lora`."""

    rank: int = Field(16, ge=1, description="Rank of the matrices")
    alpha: int = Field(32, ge=1, description="Their product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Share of the inputs dropped in training")


class TrainingConfig(Section, use_attribute_docstrings=True):
    """What `raypd train` needs beside the run's own keys; other commands do not look at it."""

    labels_column: str = Field(
        "target", description="Column with a document's labels, {attribute: value or null}"
    )
    labels: Uri | None = None
    """Output folder of a run over the same input whose answers are the labels, in place of that
    column: of a larger model (distillation), or of the same, decoded autoregressively
    (self-supervision); or a file of labels
    """
    annotations: Uri | Keys | None = None
    """Keys, dotted, of a teacher's run, which marks what of an answer can be written side by side
    (pasta), or its output folder; null: by rules
    """
    preference: PreferenceConfig | None = None
    """Preference rounds for `pasta` (BoNBoN), in place of labels: {baseline, judged, samples,
    rounds, ...}
    """
    validation: Uri | None = None
    """File, folder or glob of documents that are not trained on; null: validation_share of the
    input
    """
    validation_share: float = Field(
        0.1, gt=0, lt=1, description="Of the input's documents, drawn by their ids; of a fit's"
    )
    weights: Literal["lora", "full"] = Field(
        "lora", description="What is trained; with model.quantization nf4: QLoRA"
    )
    lora: Annotated[dict[str, Any], OptionsOf({"": LoraOptions})] = Field({})
    """Of `weights: lora`, such as {rank: 32, alpha: 64}"""
    train_routers: bool = False
    """Of a mixture of experts: whether what chooses the experts of a token is trained, too"""
    learning_rates: list[float] = Field([1e-4], min_length=1)
    """Each is tried, and the one with the lowest validation loss is kept"""
    epochs: float = Field(3.0, gt=0)
    batch_size: int = Field(8, ge=1)
    """Examples of one pass of one worker; they share their instruction, or have none"""
    batch_tokens: int = Field(
        4096, ge=1, description="Most tokens of one pass; a longer example goes alone"
    )
    trainer: Keys = Field({})
    """Fields of transformers' TrainingArguments over raypd's own, such as {warmup_steps: 0.1,
    weight_decay: 0.01, gradient_accumulation_steps: 4}; docs/training.md has the defaults
    """
    evaluations: int = Field(4, ge=1)
    """How often, over the whole training, the validation loss is measured and a checkpoint kept"""
    patience: int | None = Field(
        None, ge=1, description="Ends after so many evaluations without a lower loss"
    )
    sharding: Literal["none", "fsdp"] = "none"
    """fsdp: splits weights and optimizer over the workers, where one GPU cannot hold them"""
    mask_groups: int = Field(1, ge=1)
    """`space`: places of an answer that are masked in one example.

    1: the paper's, half of the examples as they are, the others cut behind the masks; more: the
    text and all these masks beside it
    """
    max_skipped_share: float = Field(0.1, ge=0, le=1)
    """Nothing is trained if a larger share of documents, or of labels, cannot be used"""
    seed: int = Field(0, ge=0)

    @property
    def lora_options(self) -> LoraOptions:
        """The keys of `lora` with the defaults of those that are not set."""
        return LoraOptions.model_validate(self.lora)


def _shares(shares: list[float]) -> list[float]:
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"{shares}: shares of the training part lie between 0 and 1")
    return sorted(set(shares))


def _named_and_known(candidates: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    check_secrets(candidates)
    for name, keys in candidates.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f"{name!r}: a name is of letters, digits and . _ -")
        if name == "teacher":
            raise ValueError(
                "'teacher' is the name of what fit.teacher is: give the candidate another"
            )
        for key in keys:
            if key.partition(".")[0] not in _SECTIONS or "." not in key:
                raise ValueError(
                    f"{name}: {key!r}: give keys of {', '.join(_SECTIONS)}, such as "
                    "training.weights"
                )
    return candidates


class FitConfig(Section, use_attribute_docstrings=True):
    """What `raypd fit` needs beside the run's own keys; other commands do not look at it."""

    path: Uri | None = Field(
        None, description="Folder of the fit, local; null: output.path with -fit behind it"
    )
    labels: Uri | None = None
    """Labelled documents: a file, folder or glob with the input's columns and
    training.labels_column, or the output folder of a run over the input; null: the teacher labels,
    or the input itself has that column
    """
    teacher: Keys | None = None
    """Keys of the run that labels, dotted: {model.name: Qwen/Qwen3-8B}, or {model.endpoint: {...}}
    """
    documents: int = Field(
        400, ge=1, description="Labelled documents that are drawn; a corpus is drawn from evenly"
    )
    test_share: float = Field(
        0.25, gt=0, lt=1, description="Of these, for the figures alone; at least 30 of them"
    )
    candidates: Annotated[dict[str, dict[str, Any]], AfterValidator(_named_and_known)] = Field(
        {"lora": {"training.weights": "lora"}, "full": {"training.weights": "full"}}, min_length=1
    )
    """What is trained: name -> keys, dotted, of model, decoding, training and engine"""
    curve: Annotated[list[float], AfterValidator(_shares)] = Field([0.25, 0.5])
    """Every candidate is trained on these shares of the training part too; []: no curve"""
    f1_floor: float = Field(
        0.7, ge=0, le=1, description="F1 that the recommended model has to hold, surely (95%)"
    )
    sample: int = Field(
        32, ge=2, description="Documents that are decoded to measure what each model costs"
    )
    sample_minutes: float = Field(5.0, gt=0, description="Most time for that, of each model")
