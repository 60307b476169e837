"""Turns conversations into token ids with the model's chat template."""

from functools import cached_property

from transformers import PreTrainedTokenizerBase

from raypd.config import GenerationConfig
from raypd.tasks.prompting import encode, rendered

# A placeholder for the text of a turn while the chat template is applied.
_MARK = "\u241eturn {}\u241e"

# The turns of a conversation: `role` and `content` of each.
Turns = list[dict[str, str]]


class ChatTokens:
    """Turns conversations into token ids.

    The text of a turn is tokenized separately from the template, so control strings in it remain
    text and no text can end its turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: GenerationConfig) -> None:
        self._tokenizer = tokenizer
        self._thinking = task.thinking
        self._has_template = bool(task.chat_template and tokenizer.chat_template)

    def conversation(self, turns: Turns) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins."""
        if not self._has_template:
            text = "\n\n".join(turn["content"] for turn in turns)
            return self._template((self._tokenizer.bos_token or "") + text)
        marks = [_MARK.format(number) for number in range(len(turns))]
        marked = []
        for turn, mark in zip(turns, marks, strict=True):
            marked.append({**turn, "content": mark})
        text = rendered(self._tokenizer, marked, thinking=self._thinking)
        tokens: list[int] = []
        for turn, mark in zip(turns, marks, strict=True):
            # A template may omit a turn that it does not support, such as a system turn.
            if mark in text:
                before, _, text = text.partition(mark)
                tokens += self._template(before)
                tokens += self._content(turn["content"])
        return tokens + self._template(text)

    def next_turn(self, content: str, answer: str) -> list[int]:
        """Return ids that end the model's turn, ask for `content`, and begin with `answer`."""
        before, behind = self._around_turn
        return [*before, *self._content(content), *behind, *self._content(answer)]

    @cached_property
    def _around_turn(self) -> tuple[list[int], list[int]]:
        """The ids before and after the text of a user's turn that follows a turn of the model."""
        if not self._has_template:
            blank_line = self._template("\n\n")
            return blank_line, blank_line
        answer_mark = _MARK.format(0)
        user_mark = _MARK.format(1)
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": answer_mark},
            {"role": "user", "content": user_mark},
        ]
        text = rendered(self._tokenizer, turns, thinking=self._thinking)
        _, _, after_answer = text.partition(answer_mark)
        before, _, behind = after_answer.partition(user_mark)
        return self._template(before), self._template(behind)

    def _template(self, text: str) -> list[int]:
        return encode(self._tokenizer, text, special=True)

    def _content(self, text: str) -> list[int]:
        return encode(self._tokenizer, text, special=False)
