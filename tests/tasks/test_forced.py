"""What a grammar leaves no choice in is written without a pass: the same answers, in fewer."""

import json
import random
from itertools import chain

import pytest
from outlines_core.json_schema import build_regex_from_schema

from raypd.config import Attribute
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Bounded, Grammar, OneOf, Vocabulary, one_of
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt
from raypd.decoding.sampling import AllowedTokens
from raypd.tasks.automata import automaton_of, json_object, vocabulary_of
from tests.decoding import reference
from tests.decoding.cases import agree, pair
from tests.decoding.drivers import tokens_of
from tests.tiny import tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}, "wood": {"enum": ["oak", "oak root", "ash"]}},
          "required": ["size", "wood"], "additionalProperties": False}  # fmt: skip
ATTRIBUTES = [Attribute(name="code", type="pattern", pattern=r"[A-C]{2}-\d{2}/[xy]", required=True),
              Attribute(name="steel", type="enum", values=["stainless hard", "stainless soft"], required=True),
              Attribute(name="dates", type="date", many=True, max_items=2, required=True)]  # fmt: skip


def counted_passes(engine: Engine, programs):
    """Answers, and how many passes each took."""
    for number, program in enumerate(programs):
        engine.submit(program, tag=number)
    done = []
    while engine.pending:
        done += engine.step()
    done.sort(key=lambda one: one.tag)
    return [one.answer for one in done], [one.counts.steps for one in done]


def test_json_of_a_schema_is_what_the_unmodified_model_writes_token_by_token() -> None:
    model, stock = pair("llama")
    tokenizer, pattern = tiny_tokenizer(), build_regex_from_schema(json.dumps(SCHEMA), "[ ]?")
    rules = Bounded(Grammar(json_object(pattern), vocabulary_of(tokenizer)), 60)
    allowed = lambda tokens: AllowedTokens(rules.allowed_token_ids(tokens).ids)  # noqa: E731
    prompts = [tokens_of(random.Random(seed), 5, 20) for seed in range(4)]
    programs = [autoregressive(Prompt(prompt), 60, rules.stops, rules.allowed_token_ids, forced=rules.forced)
                for prompt in prompts]  # fmt: skip
    answers, passes = counted_passes(Engine(model, max_num_seqs=2), programs)
    for prompt, answer, steps in zip(prompts, answers, passes, strict=True):
        agree(reference.autoregressive(stock, prompt, 60, rules.stops, allowed), answer.tokens, answer.logprobs)
        assert json.loads(tokenizer.decode(answer.tokens)).keys() == {"size", "wood"}
        assert steps < len(answer.tokens) - 6  # at least the keys' letters


class Unforced(Grammar):
    def forced(self, state: int, remaining: int | None) -> list[int]:
        return []


def test_guided_values_are_the_same_with_and_without() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer())
    found = []
    for kind in (Unforced, Grammar):
        grammars = [kind(automaton_of(one), vocabulary) for one in ATTRIBUTES]
        rng, prompts = random.Random(7), []
        for _ in range(5):
            tokens = tokens_of(rng, 20, 40)
            ends = sorted(rng.sample(range(10, len(tokens)), len(grammars)))
            prompts.append(SlottedPrompt(tokens, [Slot(*one) for one in zip(ends, grammars, strict=True)]))
        found.append(counted_passes(Engine(pair("llama")[0]), [guided(prompt, 40) for prompt in prompts]))
    (without, most), (forced, fewer) = found
    for mine, theirs in zip(chain(*without), chain(*forced), strict=True):
        assert (theirs.tokens, theirs.closed) == (mine.tokens, True)
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-3)
    assert all(less <= more - 12 for less, more in zip(fewer, most, strict=True))  # "-", "/", `"`; "tainless "


TEXTS = ["a", "b", "c", "ab", "abc", "bc", "bcd", "d", "ba", '"', '"a', "\xc3", "\xa9", " "]


def longest(text: str) -> list[int]:
    """The longest tokens from the left; of a text that ends within a character, up to it."""
    text = text.encode("latin-1").decode(errors="ignore").encode().decode("latin-1")
    tokens: list[int] = []
    while text:
        tokens.append(max((i for i, one in enumerate(TEXTS) if text.startswith(one)), key=lambda i: len(TEXTS[i])))
        text = text[len(TEXTS[tokens[-1]]) :]
    return tokens


VOCABULARY = Vocabulary(TEXTS, longest)


CHOICE = Grammar(OneOf(['"dabca"', '"dabcd"', '"bd"']), VOCABULARY)
DADB = Grammar(one_of(["dadb", "dadc"]), VOCABULARY)
MAY_END = Grammar(automaton_of(Attribute(name="a", type="pattern", pattern="da(da)?", required=True)), VOCABULARY)


@pytest.mark.parametrize(("grammar", "said", "left", "forced"), [
    (Grammar(one_of(["dabcd", "dabca"]), VOCABULARY), [], 20, ["d", "abc"]),
    # The last token is the model's where a longer one may stand: "abc" in place of "ab".
    (Grammar(one_of(["dabcd", "dabba"]), VOCABULARY), [], 20, ["d"]),
    (Grammar(one_of(["dab"]), VOCABULARY), [], 20, ["d", "ab"]),  # behind its end nothing comes
    (Grammar(one_of(["dab"]), Vocabulary(TEXTS)), [], 20, []),  # nothing that writes it
    (Grammar(one_of(["d\xc3\xa9", "d\xc3\xa8"]), VOCABULARY), [], 20, ["d"]),  # up to a cut within a character
    # A value is forced up to where two part, or one is clear; a blank may stand before it.
    (CHOICE, [], 20, []), (CHOICE, ['"'], 20, []), (CHOICE, ['"', "d"], 20, ["abc"]),
    (CHOICE, ['"', "d", "abc"], 20, []), (CHOICE, ['"', "b"], 20, []),
    # It leaves room for the rest, and a value that may end is not forced on.
    (DADB, [], 4, ["d", "a", "d"]), (DADB, [], 3, []),
    (MAY_END, ['"'], 20, ["d", "a"]), (MAY_END, ['"', "d", "a"], 20, [])])  # fmt: skip
def test_what_is_forced(grammar: Grammar, said: list[str], left: int, forced: list[str]) -> None:
    state = 0
    for text in said:
        state = grammar.advance(state, TEXTS.index(text))
    assert [TEXTS[token] for token in grammar.forced(state, left)] == forced
