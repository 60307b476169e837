"""What a grammar leaves no choice in is written without a pass: the same answers, in fewer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from outlines_core.json_schema import build_regex_from_schema

from raypd.config import Attribute
from raypd.decoding.automata import one_of
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Bounded, Grammar, OneOf, Vocabulary
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt
from raypd.decoding.program import Program
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


def counted_passes(engine: Engine, programs: list[Program[Any]]) -> tuple[list[Any], list[int]]:
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
    tokenizer = tiny_tokenizer()
    pattern = build_regex_from_schema(json.dumps(SCHEMA), "[ ]?")
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


def test_guided_values_are_the_same_with_and_without() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer())
    found = []
    for encode in (None, vocabulary.encode):
        grammars = [Grammar(automaton_of(one), Vocabulary(vocabulary.texts, encode)) for one in ATTRIBUTES]
        rng = random.Random(7)
        prompts = []
        for _ in range(5):
            tokens = tokens_of(rng, 20, 40)
            ends = sorted(rng.sample(range(10, len(tokens)), len(grammars)))
            prompts.append(SlottedPrompt(tokens, [Slot(*one) for one in zip(ends, grammars, strict=True)]))

        def rest(slot: Slot, value: Any) -> list[int]:
            return list(vocabulary.encode(slot.grammar.rest(value.tokens)))

        found.append(counted_passes(Engine(pair("llama")[0]), [guided(prompt, 40, rest) for prompt in prompts]))
    (without, most), (forced, fewer) = found
    for one, other in zip(without, forced, strict=True):
        assert [value.tokens for value in one] == [value.tokens for value in other]
        assert [value.closed for value in other] == [True] * 3
        for mine, theirs in zip(one, other, strict=True):
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


def forced_texts(grammar: Grammar, *said: str, left: int | None = 20) -> list[str]:
    state = 0
    for text in said:
        state = grammar.advance(state, TEXTS.index(text))
    return [TEXTS[token] for token in grammar.forced(state, left)]


def test_the_last_token_is_the_models_where_a_longer_one_may_stand() -> None:
    assert forced_texts(Grammar(one_of(["dabcd", "dabca"]), VOCABULARY)) == ["d", "abc"]
    assert forced_texts(Grammar(one_of(["dabcd", "dabba"]), VOCABULARY)) == ["d"]  # "abc" may come in place of "ab"
    assert forced_texts(Grammar(one_of(["dab"]), VOCABULARY)) == ["d", "ab"]  # behind its end nothing comes
    assert forced_texts(Grammar(one_of(["dab"]), Vocabulary(TEXTS))) == []  # nothing that writes it


def test_a_value_is_forced_up_to_where_two_part_or_one_is_clear() -> None:
    choice = Grammar(OneOf(['"dabca"', '"dabcd"', '"bd"']), VOCABULARY)
    assert forced_texts(choice) == []  # a blank may stand before a value
    assert (forced_texts(choice, '"'), forced_texts(choice, '"', "d")) == ([], ["abc"])
    assert (forced_texts(choice, '"', "d", "abc"), forced_texts(choice, '"', "b")) == ([], [])


def test_what_is_forced_leaves_room_for_the_rest() -> None:
    grammar = Grammar(one_of(["dadb", "dadc"]), VOCABULARY)
    assert (forced_texts(grammar, left=4), forced_texts(grammar, left=3)) == (["d", "a", "d"], [])


def test_a_text_that_is_cut_within_a_character_is_forced_up_to_it() -> None:
    assert forced_texts(Grammar(one_of(["d\xc3\xa9", "d\xc3\xa8"]), VOCABULARY)) == ["d"]


def test_a_value_that_may_end_is_not_forced_on() -> None:
    grammar = Grammar(automaton_of(Attribute(name="a", type="pattern", pattern="da(da)?", required=True)), VOCABULARY)
    assert (forced_texts(grammar, '"'), forced_texts(grammar, '"', "d", "a")) == (["d", "a"], [])
