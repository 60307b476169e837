"""Run decoding methods on a tiny random model, and record what the engine does in every pass.

The engine runs the real methods: it lays out the tokens, computes masks and states, and samples. A
random model would write noise, so each sampled position allows one token alone: the one that the
example shows. The engine applies it in the way in which it applies a grammar.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raypd.decoding.attention.step import AttentionLayer, Step
from raypd.decoding.engine import Engine
from raypd.decoding.program import Feed, Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.sequence import TOKEN, Sequence as EngineSequence
from raypd.decoding.visibility import POSITION, SEGMENT

_VOCABULARY = 256
# What a slot may hold, in tokens: the gap of the figures.
MAX_VALUE_TOKENS = 3
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
_OVERRIDES: dict[str, dict[str, Any]] = {"lfm2": {"layer_types": ["conv", "full_attention"]}}

# Returns the word that the example shows behind a token of a feed.
NextWord = Callable[[Feed, int], str]


class Words:
    """A vocabulary whose tokens are words, numbered in the order in which they are first used."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def id(self, word: str) -> int:
        """Return the token id of a word."""
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of the words of a text."""
        return [self.id(word) for word in text.split()]

    def word(self, token: int) -> str:
        """Return the word of a token id."""
        return self._words[token]

    def texts(self) -> list[bytes]:
        """Return the bytes of every token id, as PASTA's interpreter reads them."""
        texts = [word.encode() for word in self._words]
        return texts + [b""] * (_VOCABULARY - len(texts))


@dataclass(frozen=True)
class Row:
    """A token that went through the model.

    Attributes:
        number: Its number among all tokens that its program fed, from 0.
        word: Its text.
        position: Its virtual position.
        segment: Its segment.
        sees: The numbers of the rows that it attended to, itself included.
    """

    number: int
    word: str
    position: int
    segment: int
    sees: frozenset[int]


@dataclass(frozen=True)
class Prediction:
    """A word that was sampled behind a row."""

    behind: Row
    word: str


@dataclass(frozen=True)
class StateRun:
    """Tokens that a recurrent layer read one after the other.

    Attributes:
        rows: The tokens.
        start: The slot of the state from which the first token continued.
        end: The slot of the state behind the last one.
    """

    rows: list[Row]
    start: int
    end: int


@dataclass
class Pass:
    """What one forward pass did for one program."""

    rows: list[Row] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    runs: list[StateRun] = field(default_factory=list)
    # Numbers of earlier rows that left the cache before this pass.
    dropped: list[int] = field(default_factory=list)


@dataclass
class Trace:
    """All passes of one program."""

    passes: list[Pass] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were fed."""
        return [row for one_pass in self.passes for row in one_pass.rows]

    @property
    def predictions(self) -> list[tuple[int, Prediction]]:
        """All predictions with the number of their pass, from 1."""
        numbered: list[tuple[int, Prediction]] = []
        for number, one_pass in enumerate(self.passes, 1):
            for prediction in one_pass.predictions:
                numbered.append((number, prediction))
        return numbered


class FixedValue:
    """The grammar of a slot that allows the words of one value."""

    def __init__(self, words: Words, value: str) -> None:
        self._tokens = words.ids(value)

    def advance(self, state: int, token: int) -> int:
        assert token == self._tokens[state]
        return state + 1

    def allowed(self, state: int, remaining: int) -> AllowedTokens:
        return AllowedTokens(np.array([self._tokens[state]]))

    def done(self, state: int) -> bool:
        return state == len(self._tokens)

    def completion(self, state: int) -> str | None:
        return None


class _Recorder:
    """Reads each pass at its first attention layer."""

    def __init__(self, engine: Engine, words: Words, traces: list[Trace]) -> None:
        self._engine = engine
        self._attend = engine.attend
        self._words = words
        self._traces = traces
        self._recorded: Step | None = None
        engine.attend = self

    def __call__(
        self,
        step: Step,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Record the pass, and attend; the arguments are those of `Attend`."""
        if step is not self._recorded:
            self._recorded = step
            self._record(step)
        return self._attend(step, layer, query, key, value)

    def _record(self, step: Step) -> None:
        sequences = {seq.region.start: seq for seq in self._engine.sequences}
        rows_of_pass: list[Row] = []
        for span in step.spans:
            sequence = sequences[span.key_start]
            rows = self._rows(sequence, span.visibility)
            rows_of_pass += rows
            dropped = list(sequence.feed.drop)
            self._traces[sequence.tag].passes.append(Pass(rows, dropped=dropped))
        if step.recurrence is not None:
            assert len(step.spans) == 1
            runs = self._traces[0].passes[-1].runs
            recurrent = step.recurrence.runs
            offsets = recurrent.offsets.tolist()
            starts = recurrent.starts.tolist()
            ends = recurrent.ends.tolist()
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                members = recurrent.rows[offsets[number] : offsets[number + 1]]
                run_rows = [rows_of_pass[row] for row in members.tolist()]
                runs.append(StateRun(run_rows, start, end))

    def _rows(self, sequence: EngineSequence, visibility: np.ndarray) -> list[Row]:
        """Return the rows of a sequence in this pass."""
        owner = sequence.region.owner[: sequence.region.high]
        rows: list[Row] = []
        for number, sees in zip(sequence.pending_tokens().tolist(), visibility, strict=True):
            rows.append(
                Row(
                    number,
                    self._words.word(int(sequence.table[TOKEN, number])),
                    int(sequence.table[POSITION, number]),
                    int(sequence.table[SEGMENT, number]),
                    frozenset(owner[sees].tolist()),
                )
            )
        return rows


def run(
    words: Words,
    programs: Sequence[Program[Any]],
    next_word: NextWord | None = None,
    family: str = "llama",
) -> list[Trace]:
    """Run programs in one engine, and return the trace of each.

    Args:
        words: The vocabulary.
        programs: The programs, of any decoding method.
        next_word: The words that the example shows; None if the programs fix them themselves.
        family: The family of the tiny model.
    """
    traces = [Trace() for _ in programs]
    engine = Engine(_model(family), attention="sdpa")
    _Recorder(engine, words, traces)
    observed = []
    for program, trace in zip(programs, traces, strict=True):
        observed.append(_observed(program, trace, words, next_word))
    engine.run(observed)
    return traces


def _model(family: str) -> Any:
    """Return a random model of two layers."""
    config = AutoConfig.for_model(family, **_SIZES, **_OVERRIDES.get(family, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def _observed(
    program: Program[Any], trace: Trace, words: Words, next_word: NextWord | None
) -> Program[Any]:
    """Run a program under the example's words, and add its predictions to the trace."""
    try:
        feed = next(program)
        while True:
            if next_word is not None:
                allowed = []
                for index in feed.sample_at:
                    token = words.id(next_word(feed, index))
                    allowed.append(AllowedTokens(np.array([token])))
                feed = replace(feed, allowed_token_ids=allowed)
            predictions = yield feed
            one_pass = trace.passes[-1]
            for index, token in zip(feed.sample_at, predictions.tokens, strict=True):
                one_pass.predictions.append(Prediction(one_pass.rows[index], words.word(token)))
            feed = program.send(predictions)
    except StopIteration as end:
        return end.value
