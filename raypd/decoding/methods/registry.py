"""Every decoding method: what it does, needs, and what its answers depend on; the one place that
names methods. No torch here, since the configuration reads it, too: what brings torch is named.
"""

from dataclasses import dataclass
from typing import Any

FORK, CHILD = "[Fork]", "[Child]"  # APAR, section 2.2
MASK = "[Mask]"  # SPACE, section 3.1
# PASTA, section 3 (a promise goes on)
PROMISE, OPEN, CLOSE, SYNC = "<promise", "<async>", "</async>", "<sync/>"


@dataclass(frozen=True)
class MethodSpec:
    """What is known of a method without running it.

    `answer_keys`: for each kind of task that it does, the keys of section `decoding` that can
    change an answer or another value of an output row (the counters too), beside the method and how
    tokens are sampled. What merely rounds in another order, as engine.max_num_seqs does, changes no
    answer.
    """

    answer_keys: dict[str, tuple[str, ...]]
    # "module:class" of its `TextMethod` (decoding/text.py), where it does task `generation`.
    text_method: str = ""
    control_tokens: tuple[str, ...] = ()  # those that a model is given for it
    own_tokens: bool = False  # it cannot do without them in the tokenizer
    # Key of `decoding` that says how many of them it uses: with 0 it does without.
    tokens_option: str = ""
    # Its control tokens are part of the text that is decoded, not special to the tokenizer.
    markup: bool = False
    heads: bool = False  # needs trained Medusa heads
    # Drafts with the model that `decoding.speculative.draft_model` names, or without one.
    drafts: bool = False
    whole_record: bool = False  # the model writes a record whole, its keys too
    # Decodes the parts of one answer at the same time, so that `raypd tune` tries it.
    parallel: bool = False

    def required_tokens(self, decoding: Any) -> tuple[str, ...]:
        """The control tokens that the tokenizer must have under the options `decoding`."""
        unused = self.tokens_option and not getattr(decoding, self.tokens_option)
        return self.control_tokens if self.own_tokens and not unused else ()


_DRAFT_KEYS = (
    "speculative.draft_model",
    "speculative.draft_tokens",
    "speculative.min_confidence",
    "speculative.max_ngram",
)

# The first that does a kind of task is its default.
REGISTRY = {
    "hyper_parallel": MethodSpec(
        {"extraction": ("max_value_tokens", "isolate", "stacked_documents", "skeleton")},
        parallel=True,
    ),
    "intra_prompt": MethodSpec({"question_answering": ("contexts_per_prompt",)}, parallel=True),
    "autoregressive": MethodSpec(
        {
            "extraction": ("max_new_tokens",),
            "question_answering": (),
            "generation": ("max_new_tokens",),
        },
        "raypd.decoding.methods.autoregressive:AutoregressiveText",
        whole_record=True,
    ),
    "speculative": MethodSpec(
        # A greedy text does not depend on the drafts, but the counters and a sampled text do.
        {
            "extraction": ("max_new_tokens", *_DRAFT_KEYS),
            "generation": ("max_new_tokens", *_DRAFT_KEYS),
        },
        "raypd.decoding.methods.speculative:SpeculativeText",
        drafts=True,
        whole_record=True,
    ),
    "guided": MethodSpec({"extraction": ("max_value_tokens",)}),
    "apar": MethodSpec(
        {"generation": ("max_new_tokens", "max_threads")},
        "raypd.decoding.methods.apar:AparText",
        (FORK, CHILD),
        own_tokens=True,
    ),
    "pasta": MethodSpec(
        # A promise that says no number takes fixed_length under `promised_length: predicted`, too.
        {
            "generation": (
                "max_new_tokens",
                "promised_length",
                "fixed_length",
                "max_async_tokens",
                "max_threads",
            )
        },
        # Which else are spelt.
        "raypd.decoding.methods.pasta:PastaText",
        (PROMISE, OPEN, CLOSE, SYNC),
        markup=True,
    ),
    "space": MethodSpec(
        {"generation": ("max_new_tokens", "mask_tokens")},
        "raypd.decoding.methods.space:SpaceText",
        (MASK,),
        own_tokens=True,
        tokens_option="mask_tokens",
    ),
    "medusa": MethodSpec(
        {"generation": ("max_new_tokens", "heads")},
        "raypd.decoding.methods.medusa:MedusaText",
        heads=True,
    ),
    "skeleton_of_thought": MethodSpec(
        {
            "generation": (
                "max_new_tokens",
                "skeleton_of_thought.max_skeleton_tokens",
                "skeleton_of_thought.max_point_tokens",
            )
        },
        "raypd.decoding.methods.skeleton_of_thought:SkeletonText",
    ),
    "apar_medusa": MethodSpec(
        {"generation": ("max_new_tokens", "max_threads", "heads")},
        "raypd.decoding.methods.apar:AparText",
        (FORK, CHILD),
        own_tokens=True,
        heads=True,
    ),
}
