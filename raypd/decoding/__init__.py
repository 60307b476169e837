"""The engine and its decoding methods.

Other rooms may use only the names below. Each is imported on first use, because most of them import
torch, and the configuration, which needs only the registry, must start without it.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.decoding import engine as engine, native as native
    from raypd.decoding.attention.avx512 import is_best as is_best
    from raypd.decoding.automata import (
        Automaton as Automaton,
        Choice as Choice,
        OneOf as OneOf,
        TransitionTable as TransitionTable,
        intersection as intersection,
        joined as joined,
        one_of as one_of,
    )
    from raypd.decoding.cache_region import MIN_REGION_SLOTS as MIN_REGION_SLOTS
    from raypd.decoding.contract import EngineContract as EngineContract
    from raypd.decoding.counts import Finished as Finished, TokenCounts as TokenCounts
    from raypd.decoding.draft_model import DraftModel as DraftModel
    from raypd.decoding.engine import Engine as Engine
    from raypd.decoding.grammar import (
        UNREACHABLE as UNREACHABLE,
        Bounded as Bounded,
        Grammar as Grammar,
    )
    from raypd.decoding.layers.expert_weights import QuantizedExperts as QuantizedExperts
    from raypd.decoding.methods.apar import Tree as Tree, apar as apar
    from raypd.decoding.methods.autoregressive import (
        Continuation as Continuation,
        autoregressive as autoregressive,
    )
    from raypd.decoding.methods.guided import guided as guided
    from raypd.decoding.methods.hyper_parallel import (
        Slot as Slot,
        SlottedPrompt as SlottedPrompt,
        Value as Value,
        hyper_parallel as hyper_parallel,
    )
    from raypd.decoding.methods.intra_prompt import (
        Context as Context,
        PromptTree as PromptTree,
        Question as Question,
        intra_prompt as intra_prompt,
    )
    from raypd.decoding.methods.medusa import MedusaHeads as MedusaHeads
    from raypd.decoding.methods.pasta import Interpreter as Interpreter
    from raypd.decoding.methods.pasta_lang import (
        Lexer as Lexer,
        MarkupPiece as MarkupPiece,
        readable as readable,
    )
    from raypd.decoding.methods.registry import (
        CHILD as CHILD,
        CLOSE as CLOSE,
        FORK as FORK,
        MASK as MASK,
        OPEN as OPEN,
        PROMISE as PROMISE,
        REGISTRY as REGISTRY,
        SYNC as SYNC,
        PastaOptions as PastaOptions,
    )
    from raypd.decoding.methods.speculative import (
        PromptLookup as PromptLookup,
        TextDrafter as TextDrafter,
        speculative as speculative,
    )
    from raypd.decoding.models.decoder import DecoderModel as DecoderModel
    from raypd.decoding.models.hybrid import (
        HYBRIDS as HYBRIDS,
        CurrentPass as CurrentPass,
        attention_layers as attention_layers,
        has_recurrent_layers as has_recurrent_layers,
        is_hybrid as is_hybrid,
        replace_recurrent_layers as replace_recurrent_layers,
        unknown_layers as unknown_layers,
    )
    from raypd.decoding.models.registry import FAMILIES as FAMILIES
    from raypd.decoding.pack import pack_model as pack_model
    from raypd.decoding.program import (
        ANY_OBJECT as ANY_OBJECT,
        Feed as Feed,
        Predictions as Predictions,
        Program as Program,
    )
    from raypd.decoding.quantized import quantize as quantize
    from raypd.decoding.recurrence.chains import RecurrentRun as RecurrentRun
    from raypd.decoding.recurrence.gradients import (
        FedText as FedText,
        GradientPass as GradientPass,
        runs_of_texts as runs_of_texts,
    )
    from raypd.decoding.recurrence.states import MIN_STATES as MIN_STATES
    from raypd.decoding.sampling import Sampling as Sampling
    from raypd.decoding.size_counter import model_sizes as model_sizes
    from raypd.decoding.sizes import (
        AttentionSizes as AttentionSizes,
        ModelSizes as ModelSizes,
        dense_sizes as dense_sizes,
    )
    from raypd.decoding.text import (
        GeneratedText as GeneratedText,
        Prompt as Prompt,
        TextAnswer as TextAnswer,
        TextMethod as TextMethod,
        TextModel as TextModel,
    )
    from raypd.decoding.value_automata import (
        BARE_TEXT as BARE_TEXT,
        STRING as STRING,
        UNIT_BYTES as UNIT_BYTES,
        JsonObject as JsonObject,
        JsonString as JsonString,
        ListOf as ListOf,
        Number as Number,
        OrNull as OrNull,
    )
    from raypd.decoding.visibility import (
        Reach as Reach,
        grown as grown,
        in_window as in_window,
        one_segment as one_segment,
        visible as visible,
    )
    from raypd.decoding.vocabulary import Vocabulary as Vocabulary

__getattr__ = LazyExports(
    __name__,
    {
        "attention.avx512": ("is_best",),
        "automata": (
            "Automaton",
            "Choice",
            "OneOf",
            "TransitionTable",
            "intersection",
            "joined",
            "one_of",
        ),
        "cache_region": ("MIN_REGION_SLOTS",),
        "contract": ("EngineContract",),
        "counts": ("Finished", "TokenCounts"),
        "draft_model": ("DraftModel",),
        "engine": ("Engine",),
        "grammar": ("Bounded", "Grammar", "UNREACHABLE"),
        "layers.expert_weights": ("QuantizedExperts",),
        "methods.apar": ("Tree", "apar"),
        "methods.autoregressive": ("Continuation", "autoregressive"),
        "methods.guided": ("guided",),
        "methods.hyper_parallel": ("Slot", "SlottedPrompt", "Value", "hyper_parallel"),
        "methods.intra_prompt": ("Context", "PromptTree", "Question", "intra_prompt"),
        "methods.medusa": ("MedusaHeads",),
        "methods.pasta": ("Interpreter",),
        "methods.pasta_lang": ("Lexer", "MarkupPiece", "readable"),
        "methods.registry": (
            "CHILD",
            "CLOSE",
            "FORK",
            "MASK",
            "OPEN",
            "PROMISE",
            "PastaOptions",
            "REGISTRY",
            "SYNC",
        ),
        "methods.speculative": ("PromptLookup", "TextDrafter", "speculative"),
        "models.decoder": ("DecoderModel",),
        "models.hybrid": (
            "CurrentPass",
            "HYBRIDS",
            "attention_layers",
            "has_recurrent_layers",
            "is_hybrid",
            "replace_recurrent_layers",
            "unknown_layers",
        ),
        "models.registry": ("FAMILIES",),
        "pack": ("pack_model",),
        "program": ("ANY_OBJECT", "Feed", "Predictions", "Program"),
        "quantized": ("quantize",),
        "recurrence.chains": ("RecurrentRun",),
        "recurrence.gradients": ("FedText", "GradientPass", "runs_of_texts"),
        "recurrence.states": ("MIN_STATES",),
        "sampling": ("Sampling",),
        "size_counter": ("model_sizes",),
        "sizes": ("AttentionSizes", "ModelSizes", "dense_sizes"),
        "text": ("GeneratedText", "Prompt", "TextAnswer", "TextMethod", "TextModel"),
        "value_automata": (
            "BARE_TEXT",
            "JsonObject",
            "JsonString",
            "ListOf",
            "Number",
            "OrNull",
            "STRING",
            "UNIT_BYTES",
        ),
        "visibility": ("Reach", "grown", "in_window", "one_segment", "visible"),
        "vocabulary": ("Vocabulary",),
    },
    modules=("engine", "native"),
)
