"""The engine and its decoding methods.

The names below are what other rooms may use. They are imported when they are first used, because
most of them bring torch, and the configuration, which needs only the registry, starts without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypd.decoding.attention.avx512 import is_best as is_best
    from raypd.decoding.automata import Automaton as Automaton
    from raypd.decoding.automata import Choice as Choice
    from raypd.decoding.automata import OneOf as OneOf
    from raypd.decoding.automata import TransitionTable as TransitionTable
    from raypd.decoding.automata import intersection as intersection
    from raypd.decoding.automata import joined as joined
    from raypd.decoding.automata import one_of as one_of
    from raypd.decoding.contract import EngineContract as EngineContract
    from raypd.decoding.counts import Finished as Finished
    from raypd.decoding.counts import TokenCounts as TokenCounts
    from raypd.decoding.draft_model import DraftModel as DraftModel
    from raypd.decoding.engine import Engine as Engine
    from raypd.decoding.grammar import UNREACHABLE as UNREACHABLE
    from raypd.decoding.grammar import Bounded as Bounded
    from raypd.decoding.grammar import Grammar as Grammar
    from raypd.decoding.methods.apar import Tree as Tree
    from raypd.decoding.methods.apar import apar as apar
    from raypd.decoding.methods.autoregressive import Continuation as Continuation
    from raypd.decoding.methods.autoregressive import autoregressive as autoregressive
    from raypd.decoding.methods.guided import guided as guided
    from raypd.decoding.methods.hyper_parallel import Slot as Slot
    from raypd.decoding.methods.hyper_parallel import SlottedPrompt as SlottedPrompt
    from raypd.decoding.methods.hyper_parallel import Value as Value
    from raypd.decoding.methods.hyper_parallel import hyper_parallel as hyper_parallel
    from raypd.decoding.methods.intra_prompt import Context as Context
    from raypd.decoding.methods.intra_prompt import PromptTree as PromptTree
    from raypd.decoding.methods.intra_prompt import Question as Question
    from raypd.decoding.methods.intra_prompt import intra_prompt as intra_prompt
    from raypd.decoding.methods.medusa import MedusaHeads as MedusaHeads
    from raypd.decoding.methods.pasta import Interpreter as Interpreter
    from raypd.decoding.methods.pasta_lang import Lexer as Lexer
    from raypd.decoding.methods.pasta_lang import Piece as Piece
    from raypd.decoding.methods.pasta_lang import readable as readable
    from raypd.decoding.methods.registry import CHILD as CHILD
    from raypd.decoding.methods.registry import CLOSE as CLOSE
    from raypd.decoding.methods.registry import FORK as FORK
    from raypd.decoding.methods.registry import MASK as MASK
    from raypd.decoding.methods.registry import OPEN as OPEN
    from raypd.decoding.methods.registry import PROMISE as PROMISE
    from raypd.decoding.methods.registry import REGISTRY as REGISTRY
    from raypd.decoding.methods.registry import SYNC as SYNC
    from raypd.decoding.methods.registry import PastaOptions as PastaOptions
    from raypd.decoding.methods.speculative import PromptLookup as PromptLookup
    from raypd.decoding.methods.speculative import TextDrafter as TextDrafter
    from raypd.decoding.methods.speculative import speculative as speculative
    from raypd.decoding.pack import pack_model as pack_model
    from raypd.decoding.program import ANY_OBJECT as ANY_OBJECT
    from raypd.decoding.program import Feed as Feed
    from raypd.decoding.program import Predictions as Predictions
    from raypd.decoding.program import Program as Program
    from raypd.decoding.quantized import quantize as quantize
    from raypd.decoding.sampling import Sampling as Sampling
    from raypd.decoding.sequence import MIN_REGION_SLOTS as MIN_REGION_SLOTS
    from raypd.decoding.text import GeneratedText as GeneratedText
    from raypd.decoding.text import Prompt as Prompt
    from raypd.decoding.text import TextAnswer as TextAnswer
    from raypd.decoding.text import TextMethod as TextMethod
    from raypd.decoding.text import TextModel as TextModel
    from raypd.decoding.value_automata import BARE_TEXT as BARE_TEXT
    from raypd.decoding.value_automata import STRING as STRING
    from raypd.decoding.value_automata import UNIT_BYTES as UNIT_BYTES
    from raypd.decoding.value_automata import JsonObject as JsonObject
    from raypd.decoding.value_automata import JsonString as JsonString
    from raypd.decoding.value_automata import ListOf as ListOf
    from raypd.decoding.value_automata import Number as Number
    from raypd.decoding.value_automata import OrNull as OrNull
    from raypd.decoding.visibility import Reach as Reach
    from raypd.decoding.visibility import grown as grown
    from raypd.decoding.visibility import one_segment as one_segment
    from raypd.decoding.visibility import visible as visible
    from raypd.decoding.vocabulary import Vocabulary as Vocabulary

# The exported names of each module. They are those of the imports above.
_EXPORTS = {
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
    "contract": ("EngineContract",),
    "counts": (
        "Finished",
        "TokenCounts",
    ),
    "draft_model": ("DraftModel",),
    "engine": ("Engine",),
    "grammar": (
        "Bounded",
        "Grammar",
        "UNREACHABLE",
    ),
    "methods.apar": (
        "Tree",
        "apar",
    ),
    "methods.autoregressive": (
        "Continuation",
        "autoregressive",
    ),
    "methods.guided": ("guided",),
    "methods.hyper_parallel": (
        "Slot",
        "SlottedPrompt",
        "Value",
        "hyper_parallel",
    ),
    "methods.intra_prompt": (
        "Context",
        "PromptTree",
        "Question",
        "intra_prompt",
    ),
    "methods.medusa": ("MedusaHeads",),
    "methods.pasta": ("Interpreter",),
    "methods.pasta_lang": (
        "Lexer",
        "Piece",
        "readable",
    ),
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
    "methods.speculative": (
        "PromptLookup",
        "TextDrafter",
        "speculative",
    ),
    "pack": ("pack_model",),
    "program": (
        "ANY_OBJECT",
        "Feed",
        "Predictions",
        "Program",
    ),
    "quantized": ("quantize",),
    "sampling": ("Sampling",),
    "sequence": ("MIN_REGION_SLOTS",),
    "text": (
        "GeneratedText",
        "Prompt",
        "TextAnswer",
        "TextMethod",
        "TextModel",
    ),
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
    "visibility": (
        "Reach",
        "grown",
        "one_segment",
        "visible",
    ),
    "vocabulary": ("Vocabulary",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
