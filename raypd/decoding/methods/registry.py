"""Every decoding method: what it does and needs, and what its answers depend on. Methods are named
only here. This module does not import torch, because the configuration reads it, too; classes that
import torch are given by name.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

FORK, CHILD = "[Fork]", "[Child]"  # APAR, section 2.2
MASK = "[Mask]"  # SPACE, section 3.1
# PASTA, section 3 (a promise goes on)
PROMISE, OPEN, CLOSE, SYNC = "<promise", "<async>", "</async>", "<sync/>"


def option(default: Any, description: str, **limits: float) -> Any:
    """Declare an option of a decoding method, which is a key of `decoding.options`.

    Args:
        default: Its value if the configuration does not set it.
        description: What `raypd config show` says about it.
        **limits: Bounds of a number by their names in pydantic, such as ge=1.
    """
    return field(default=default, metadata={"description": description, **limits})


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none."""


@dataclass(frozen=True)
class IntraPromptOptions:
    """Options of `intra_prompt`."""

    contexts_per_prompt: int = option(1, "Contexts stacked in one prompt", ge=1)


@dataclass(frozen=True)
class SpeculativeOptions:
    """Options of `speculative`: what drafts the tokens that the model verifies."""

    draft_model: str | None = option(
        None,
        "A smaller model with the same tokenizer that drafts; null: prompt lookup, which copies "
        "what followed the last tokens where they occurred before",
    )
    draft_tokens: int = option(5, "Maximum tokens that are drafted for a pass", ge=1)
    min_confidence: float = option(
        0.4,
        "A draft model stops after a token that it finds less likely than this; 0: it never stops "
        "early",
        ge=0,
        le=1,
    )
    max_ngram: int = option(3, "Maximum tokens that prompt lookup searches for", ge=1)


@dataclass(frozen=True)
class AparOptions:
    """Options of `apar`."""

    max_threads: int = option(64, "Maximum threads of an answer at the same time", ge=1)


@dataclass(frozen=True)
class PastaOptions:
    """Options of `pasta`."""

    promised_length: Literal["predicted", "fixed", "oracle"] = option(
        "predicted",
        "Positions that the main thread skips at a promise. predicted: those of its attribute "
        "tokens; fixed: fixed_length; oracle: those that its child takes, for which the main "
        "thread waits (a baseline for the others, no faster than one thread)",
    )
    # Under `promised_length: predicted`, a promise without a number takes this value, too.
    fixed_length: int = option(
        40, "Positions of every promise (fixed), or of one without a number (predicted)", ge=1
    )
    max_async_tokens: int = option(256, "Maximum tokens of a child thread", ge=1)
    max_threads: int = option(64, "Maximum threads of an answer at the same time", ge=1)


@dataclass(frozen=True)
class SpaceOptions:
    """Options of `space`."""

    mask_tokens: int = option(5, "k: mask tokens, and so drafted tokens, of a pass", ge=0)


@dataclass(frozen=True)
class MedusaOptions:
    """Options of `medusa`."""

    heads: str | None = option(None, "Folder of trained Medusa heads")


@dataclass(frozen=True)
class AparMedusaOptions(AparOptions, MedusaOptions):
    """Options of `apar_medusa`: those of both methods."""


@dataclass(frozen=True)
class SkeletonOfThoughtOptions:
    """Options of `skeleton_of_thought`; its two stages share decoding.max_new_tokens."""

    max_skeleton_tokens: int = option(200, "Tokens after which a skeleton is cut", ge=1)
    max_point_tokens: int = option(128, "Tokens after which a point is cut", ge=1)


@dataclass(frozen=True)
class MethodSpec:
    """What is known about a method without running it.

    `answer_keys`: for each kind of task that the method supports, the keys of section `decoding`
    that can change an answer or another value of an output row (including the counters), besides
    the method, its options and how tokens are sampled. A key that only changes the order of
    rounding, such as engine.max_num_seqs, does not count as changing an answer.
    """

    answer_keys: dict[str, tuple[str, ...]]
    # Declares the keys of `decoding.options`. All of them can change an answer.
    options: type[Any] = NoOptions
    # "module:class" of its `TextMethod` (decoding/text.py), if it supports task `generation`.
    text_method: str = ""
    control_tokens: tuple[str, ...] = ()  # the tokens that are added to a model for it
    own_tokens: bool = False  # whether the tokenizer must have them
    # The option that says how many of them it uses; with 0 it needs none.
    tokens_option: str = ""
    # Whether its control tokens are part of the decoded text instead of special tokens.
    markup: bool = False
    heads: bool = False  # needs trained Medusa heads
    # Whether it drafts, with the model that `decoding.options.draft_model` names or without one.
    drafts: bool = False
    whole_record: bool = False  # the model writes a whole record, including its keys
    # Whether it decodes the parts of one answer at the same time, so that `raypd tune` tries it.
    parallel: bool = False
    # Whether each of its tokens continues from a single earlier one, as recurrent layers need it;
    # for `hyper_parallel` this is so only with isolated values.
    recurrent: bool = False

    def required_tokens(self, options: Any) -> tuple[str, ...]:
        """The control tokens that the tokenizer must have under these options of the method."""
        unused = self.tokens_option and not getattr(options, self.tokens_option)
        return self.control_tokens if self.own_tokens and not unused else ()


# The first method that supports a kind of task is the default for it.
REGISTRY = {
    "hyper_parallel": MethodSpec(
        {"extraction": ("max_value_tokens", "isolate", "stacked_documents", "skeleton")},
        parallel=True,
        recurrent=True,
    ),
    "intra_prompt": MethodSpec(
        {"question_answering": ()}, IntraPromptOptions, parallel=True, recurrent=True
    ),
    "autoregressive": MethodSpec(
        {
            "extraction": ("max_new_tokens",),
            "question_answering": (),
            "generation": ("max_new_tokens",),
        },
        text_method="raypd.decoding.methods.autoregressive:AutoregressiveText",
        whole_record=True,
        recurrent=True,
    ),
    "speculative": MethodSpec(
        # A greedy text does not depend on the drafts, but the counters and a sampled text do.
        {"extraction": ("max_new_tokens",), "generation": ("max_new_tokens",)},
        SpeculativeOptions,
        "raypd.decoding.methods.speculative:SpeculativeText",
        drafts=True,
        whole_record=True,
    ),
    "guided": MethodSpec({"extraction": ("max_value_tokens",)}, recurrent=True),
    "apar": MethodSpec(
        {"generation": ("max_new_tokens",)},
        AparOptions,
        "raypd.decoding.methods.apar:AparText",
        (FORK, CHILD),
        own_tokens=True,
    ),
    "pasta": MethodSpec(
        {"generation": ("max_new_tokens",)},
        PastaOptions,
        "raypd.decoding.methods.pasta:PastaText",
        # If the tokenizer lacks these control tokens, they are spelled out in ordinary tokens.
        (PROMISE, OPEN, CLOSE, SYNC),
        markup=True,
    ),
    "space": MethodSpec(
        {"generation": ("max_new_tokens",)},
        SpaceOptions,
        "raypd.decoding.methods.space:SpaceText",
        (MASK,),
        own_tokens=True,
        tokens_option="mask_tokens",
    ),
    "medusa": MethodSpec(
        {"generation": ("max_new_tokens",)},
        MedusaOptions,
        "raypd.decoding.methods.medusa:MedusaText",
        heads=True,
    ),
    "skeleton_of_thought": MethodSpec(
        {"generation": ("max_new_tokens",)},
        SkeletonOfThoughtOptions,
        "raypd.decoding.methods.skeleton_of_thought:SkeletonText",
    ),
    "apar_medusa": MethodSpec(
        {"generation": ("max_new_tokens",)},
        AparMedusaOptions,
        "raypd.decoding.methods.apar:AparText",
        (FORK, CHILD),
        own_tokens=True,
        heads=True,
    ),
}
