"""Turns a template and a document into token ids.

The text before `{{ documents }}` is tokenized once per category. Special tokens in a document are
tokenized as plain text, so that no document can end the user's turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypd.config import (
    Category,
    ExtractionConfig,
    InputConfig,
    ModelConfig,
    TaskSection,
    has_earlier_template,
)
from raypd.errors import ConfigError, ModelError
from raypd.models import closing_of, model_end_tokens
from raypd.tasks.few_shot import LabelledExamples
from raypd.tasks.sandbox import BoundedSandbox, TemplateFault, render, render_apart, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HERE = Path(__file__).parent / "templates"
# The placeholder for the documents while the templates are applied.
DOCUMENTS = "\u241edocuments\u241e"
# The time limit of a model's own chat template, which renders in milliseconds.
_TEMPLATE_SECONDS = 10.0
# The limit on the values of an enum, because ten thousand would fill the context of every document.
_SHOWN_VALUES = 100


def template_text(path: str | None, name: str) -> str:
    """Return the text of a template: the user's file if there is one, and otherwise raypd's own.

    Raises:
        ConfigError: The file cannot be read.
    """
    file = Path(path) if path else _HERE / name
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: the template cannot be read: {reason}") from None


def extraction_template(task: ExtractionConfig, model: ModelConfig) -> str:
    """Return the text of an extraction's template: the user's, or the one the weights were trained
    with.

    Args:
        task: Section `task`.
        model: Section `model`.

    Raises:
        ConfigError: The template cannot be read.
    """
    name = "extraction.j2"
    if has_earlier_template(model.model_dump(), task.kind):
        name = "extraction_1.j2"
    return template_text(task.template, name)


def messages(task: ExtractionConfig, model: ModelConfig) -> dict[str, str]:
    """Return the message of each category, with DOCUMENTS as the placeholder for the documents.

    A user's template is rendered in a separate process.

    Args:
        task: Section `task`.
        model: Section `model`, whose weights may have been trained with an earlier template.

    Raises:
        ConfigError: The template cannot be read or rendered.
    """
    text = extraction_template(task, model)
    common = {"documents": DOCUMENTS, "instruction": (task.instruction or "").strip()}
    shown = [
        {**common, "category": {"name": name, **_shown(category)}}
        for name, category in task.categories.items()
    ]
    where = task.template or _HERE / "extraction.j2"
    try:
        rendered_messages = (render_apart if task.template else render)(text, shown)
    except TemplateFault as fault:
        raise ConfigError(
            f"task.template {where}{f':{fault.line}' if fault.line else ''}: {fault}"
        ) from None
    if any(message.count(DOCUMENTS) != 1 for message in rendered_messages):
        raise ConfigError(f"task.template {where}: it must hold {{{{ documents }}}} once")
    return dict(zip(task.categories, rendered_messages, strict=True))


def _shown(category: Category) -> dict[str, Any]:
    """Return a category in the form that templates see.

    A description includes the hint for its type. Only the first values of a long enum are included.
    """
    tree = category.model_dump()
    for attribute, shown in zip(category.attributes, tree["attributes"], strict=True):
        shown["description"] = "; ".join(filter(None, [attribute.description, attribute.hint]))
        hidden = len(attribute.values[_SHOWN_VALUES:])
        if hidden:
            shown["values"] = [*attribute.values[:_SHOWN_VALUES], f"or one of {hidden:,} more"]
    return tree


def check_template(task: TaskSection, source: InputConfig, model: ModelConfig) -> None:
    """Render a user's template once, and read the examples, before anything is started.

    Args:
        task: Section `task`.
        source: Section `input`.
        model: Section `model`.

    Raises:
        ConfigError: The template or an example cannot be used.
    """
    if not isinstance(task, ExtractionConfig):
        return
    if task.template:
        messages(task, model)
    LabelledExamples(task, source)


def pieces(
    tokenizer: PreTrainedTokenizerBase, message: str, marks: Sequence[str], cue: str = "\n\n"
) -> list[list[int]]:
    """Return the ids of the text before, between and after marks.

    The message becomes a user's turn, followed by the header of the answer. Each piece is tokenized
    alone, so that its ids do not depend on what replaces the marks.

    Args:
        tokenizer: The tokenizer with the chat template.
        message: The message, which contains each mark once.
        marks: The marks, in their order in the message.
        cue: The text before the answer, for models without a chat template.
    """
    if tokenizer.chat_template:
        text = _of_model(tokenizer, [{"role": "user", "content": message.strip()}])
        # The templates of some models always open the reasoning. Here the answer follows
        # immediately, so the reasoning is closed in the way of templates that have a switch for it.
        closing = closing_of(text)
        if closing:
            text = f"{text.rstrip()}\n\n{closing}\n\n"
    else:
        text = f"{tokenizer.bos_token or ''}{message.rstrip()}{cue}"
    return [
        encode(tokenizer, piece, special=True)
        for piece in re.split("|".join(map(re.escape, marks)), text)
    ]


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, str]],
    *,
    thinking: bool = False,
    header: bool = True,
) -> str:
    """Write turns with the model's chat template.

    All templates are applied here, so that their parts fit together. A template that takes a turn's
    content as a list of parts, like those of multimodal models, is given one part of text.

    Args:
        tokenizer: The tokenizer with the template.
        turns: Their roles and contents, which are text.
        thinking: The value of `enable_thinking` in the template.
        header: Whether to write the header of the answer as well.

    Raises:
        ValueError: The template rejects the turns, is wrong, or does not end.
    """
    try:
        text = _applied(tokenizer, turns, thinking, header)
        refusal = None
    except ValueError as error:
        text = ""
        refusal = error
    last = turns[-1]["content"].strip()
    if last in text and refusal is None:
        return text
    in_parts = [
        {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
        for turn in turns
    ]
    with suppress(ValueError):
        text_of_parts = _applied(tokenizer, in_parts, thinking, header)
        # A template for plain text may write the list itself, in Python's notation.
        if last in text_of_parts and "'type': 'text'" not in text_of_parts:
            return text_of_parts
    if refusal is not None:
        raise refusal
    return text


def _applied(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    thinking: bool,
    header: bool,
) -> str:
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox
    options = {"add_generation_prompt": header, "enable_thinking": thinking}
    try:
        with time_limit(_TEMPLATE_SECONDS):
            return str(tokenizer.apply_chat_template(list(turns), tokenize=False, **options))
    except TimeoutError:
        raise ValueError(
            f"the model's chat template does not end within {_TEMPLATE_SECONDS:g} s"
        ) from None
    # A template may raise anything.
    except Exception as error:
        raise ValueError(f"the model's chat template cannot be applied: {error}") from None


def _of_model(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]], header: bool = True
) -> str:
    """Write turns of raypd's own with the chat template; raise ModelError if it rejects them."""
    try:
        return rendered(tokenizer, turns, header=header)
    except ValueError as error:
        raise ModelError(f"model {tokenizer.name_or_path!r}: {error}") from None


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end an answer.

    They are the end of a text, the token that the chat template writes after an answer, and those
    that generation_config.json and config.json of the tokenizer's model list.
    """
    ends = set(model_end_tokens(tokenizer))
    for end in (tokenizer.eos_token_id, _behind_an_answer(tokenizer)):
        if end is not None:
            ends.add(int(end))
    return frozenset(ends)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that an answer is trained to end with.

    It is the token after an answer in the chat template, or else the end of a text, or else the
    first one that generation_config.json and config.json list.

    Raises:
        ModelError: Neither the tokenizer nor the model names an end.
    """
    end = _behind_an_answer(tokenizer)
    if end is None:
        end = tokenizer.eos_token_id
    if end is None:
        end = next(iter(model_end_tokens(tokenizer)), None)
    if end is None:
        raise ModelError(
            f"model {tokenizer.name_or_path!r}: neither its tokenizer (eos_token) nor "
            "generation_config.json (eos_token_id) names a token that ends an answer: add one"
        )
    return int(end)


def _behind_an_answer(tokenizer: PreTrainedTokenizerBase) -> int | None:
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": DOCUMENTS}]
    behind = _of_model(tokenizer, turns, header=False).partition(DOCUMENTS)[2].lstrip()
    ids = encode(tokenizer, behind, special=True)[:1]
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def decode_answer(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int], tokens: Sequence[int]
) -> str:
    """Return the text of decoded ids, without special tokens and without those that end an
    answer.
    """
    text_tokens = [token for token in tokens if token not in ends]
    return str(tokenizer.decode(text_tokens, skip_special_tokens=True))


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Return the ids of a piece of text.

    Args:
        tokenizer: The tokenizer.
        text: The text.
        special: Whether control strings such as <|im_end|> become their tokens; otherwise they are
            plain text.
    """
    return list(
        tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
    )
