"""The answer of a reasoning model is what stands behind its reasoning, however that is marked."""

import pytest

from raypd.models.reasoning import answer_range, closing_of, is_mark, opens_reasoning

DRAFT = 'A draft: {"Brand": "Sony", "Price": 10}. No, wrong.'
ANSWER = '{"Brand": "Bose", "Price": 249}'


def answer(text, opened=False):
    """The answer in a text; None where it is reasoning alone."""
    place = answer_range(text, opened)
    return None if place is None else text[place[0] : place[1]]


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\n{DRAFT}\n</think>\n\n{ANSWER}",
        # The template opens the reasoning in the prompt.
        f"{DRAFT}\n</think>\n{ANSWER}",
        f'{{"Brand": "Sony"}} is wrong.</think>{ANSWER}',
        f"<think>{DRAFT}</think> Once more: {DRAFT}</think>{ANSWER}",
        f"<THINK>{DRAFT}</ think >{ANSWER}",
        f"<thinking>{DRAFT}</thinking>{ANSWER}",
        f"<thought>{DRAFT}</thought>\n{ANSWER}",
        f"<reasoning>{DRAFT}</reasoning>{ANSWER}",
        f'<reasoning effort="low">{DRAFT}</reasoning>{ANSWER}',
        f"<analysis>{DRAFT}</analysis>\n{ANSWER}",
        f"<scratchpad>{DRAFT}</scratchpad>\n{ANSWER}",
        f"<seed:think>{DRAFT}</seed:think>{ANSWER}",
        f"[THINK]{DRAFT}[/THINK]{ANSWER}",
        f"<|begin_of_thought|>{DRAFT}<|end_of_thought|>\n"
        f"<|begin_of_solution|>{ANSWER}<|end_of_solution|>",
        f"<|START_THINKING|>{DRAFT}<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>",
        f"\u25c1think\u25b7{DRAFT}\u25c1/think\u25b7{ANSWER}",
        f"<|channel>thought\n{DRAFT}<channel|>{ANSWER}",
        f"<|inner_prefix|>{DRAFT}<|inner_suffix|>{ANSWER}",
        f"[unused16]{DRAFT}[unused17]{ANSWER}",
        f"<think>{DRAFT}</think><answer>\n{ANSWER}\n</answer>",
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant<|channel|>final<|message|>"
        f"{ANSWER}<|return|>",
        f"<|channel|>analysis<|message|>{DRAFT}<|end|><|start|>assistant"
        f"<|channel|>final <|constrain|>json<|message|>{ANSWER}",
        f"<|channel|>final<|message|>{ANSWER}",
        # The same without the special tokens.
        f"analysisWell. {DRAFT}assistantfinal{ANSWER}",
        f"analysisWell. {DRAFT}assistantfinal json{ANSWER}",
        f"Here is my thought process: {DRAFT} Here is my response: {ANSWER}",
    ],
)
def test_text_before_the_last_mark_is_no_answer(text):
    assert answer(text) == ANSWER


@pytest.mark.parametrize(
    "text",
    [
        f"<think>\n{DRAFT}",
        f"<think>{DRAFT}</think>\n",
        f"{DRAFT}</think>",
        f"<think>{DRAFT}</think><think>{DRAFT}",
        f"[THINK]{DRAFT}",
        f"<|channel|>analysis<|message|>{DRAFT}",
        f"<|channel|>commentary to=functions.f<|message|>{ANSWER}",
        f"analysisWe read: {DRAFT}",
        f"Here's my thought process: {DRAFT}",
    ],
)
def test_reasoning_that_does_not_end_holds_no_answer(text):
    assert answer(text) is None


@pytest.mark.parametrize(
    "text",
    [
        ANSWER,
        f"  {ANSWER}\n",
        "I think </b> so.",
        "analysis of the text: none",
        # A mark that is mentioned.
        "The tag `</think>` ends it.",
        '{"title": "What does </think> mean?", "n": 1}',
        '{"title": "A \\"quoted\\" </think> in an answer that is cut',
        '[{"title": "</think>"}]',
        # What was asked for.
        "<analysis>It is good.</analysis>",
        "<verdict>good</verdict><analysis>It is.</analysis> Yes.",
        "",
    ],
)
def test_a_text_without_reasoning_is_the_answer(text):
    assert answer(text) == text


def test_a_prompt_that_opens_the_reasoning():
    assert answer("Hmm, red or blue", opened=True) is None
    assert answer("Hmm.</think>red", opened=True) == "red"
    for opening, closing in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        assert opens_reasoning(f"<|im_start|>assistant\n{opening}\n")
        assert closing_of(f"<|im_start|>assistant\n{opening}\n") == closing
    for prompt in ("<think>\n\n</think>\n\n", "<|im_start|>assistant\n", ""):
        assert not opens_reasoning(prompt)
        assert closing_of(prompt) == ""


def test_special_tokens_that_mark_reasoning():
    assert all(map(is_mark, ("[THINK]", "[/THINK]", "<think>", "<|channel|>", "<|END_THINKING|>")))
    assert not any(map(is_mark, ("<|im_end|>", "</s>", "[INST]", "<|endoftext|>")))
