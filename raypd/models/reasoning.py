"""Separates the answer of a reasoning model from the reasoning before it.

Servers and templates mark the end of reasoning in many ways, which are all listed here. The text
before the last such mark is a draft: it may contain a complete but wrong answer.
"""

import re

# Tags that models use for reasoning and for nothing else. Templates often open them in the prompt,
# so that the text has only the closing tag.
_NAMES = (
    r"(?:\w+:)?(?:think|thinking|thoughts?|thought[_ -]process|(?:internal[_ -])?reasoning"
    r"|(?:inner|internal)[_ -]monologue)"
)
# Tags that may be part of an answer: they count only if the text begins with them.
_LOOSE_NAMES = r"(?:analysis|reason|reflection|rationale|scratchpad|planning)"
_HARMONY_FINAL = r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_CLOSINGS = re.compile(
    rf"(?:</\s*{_NAMES}\s*>"
    rf"|\[/\s*{_NAMES}\s*\]"
    rf"|<\|\s*(?:/|end[_-](?:of[_-])?){_NAMES}\s*\|>"
    rf"|<\|{_NAMES}[_-]end\|>"
    rf"|\u25c1/{_NAMES}\u25b7"
    r"|<\|inner_suffix\|>"
    r"|<channel\|>"
    r"|\[unused17\]"
    rf"|{_HARMONY_FINAL})",
    re.IGNORECASE,
)
_LOOSE_OPENING = rf"\s*<\s*(?P<name>{_LOOSE_NAMES})\s*>"
_OPENINGS = (
    rf"(?:<\s*{_NAMES}(?:\s[^<>]*)?>"
    rf"|\[\s*{_NAMES}\s*\]"
    rf"|<\|\s*(?:begin[_-](?:of[_-])?|start[_-])?{_NAMES}\s*\|>"
    rf"|<\|{_NAMES}[_-]start\|>"
    rf"|\u25c1{_NAMES}\u25b7"
    r"|<\|inner_prefix\|>"
    r"|<\|channel>"
    r"|\[unused16\]"
    r"|<\|channel\|>\s*(?:analysis|commentary)\b)"
)
_OPENING = re.compile(rf"\s*(?:<\|start\|>\s*assistant\s*)?{_OPENINGS}", re.IGNORECASE)
_OPENING_AT_END = re.compile(rf"{_OPENINGS}\s*\Z", re.IGNORECASE)
# Harmony's channels from a server that left out the special tokens.
_BARE_HARMONY = re.compile(r"\s*analysis(?=[A-Z\"'\u201c])")
_BARE_HARMONY_FINAL = re.compile(r"assistant\s*final(?:\s*json(?=\s*[{\[]))?")
# Granite writes sentences instead of tags.
_SENTENCE = re.compile(r"\s*Here(?:'s| is) my thought process:", re.IGNORECASE)
_SENTENCE_END = re.compile(r"Here(?:'s| is) my response:", re.IGNORECASE)
# What some models put around the answer after their reasoning.
_WRAPPERS = (
    ("<answer>", "</answer>"),
    ("<response>", "</response>"),
    ("<final_answer>", "</final_answer>"),
    ("<final>", "</final>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<|begin_of_box|>", "<|end_of_box|>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
_TURN_END = re.compile(r"\s*(?:<\|(?:return|end|im_end|eot_id|END_OF_TURN_TOKEN)\|>\s*)+\Z")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def answer_range(text: str, opened: bool = False) -> tuple[int, int] | None:
    """Return where the answer is in what a model wrote.

    Args:
        text: What the model wrote, its reasoning included.
        opened: Whether the prompt has already opened the reasoning, so that a text without a
            closing mark is reasoning to its end.

    Returns:
        The begin and end in characters, which is the whole text if it has no reasoning. None if it
        is reasoning without an answer.
    """
    begin = _end_of_reasoning(text)
    if begin is None:
        if opened or _begins_with_reasoning(text):
            return None
        return 0, len(text)
    if not text[begin:].strip() or _begins_with_reasoning(text[begin:]):
        return None
    return _unwrapped(text, begin)


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends with a mark that opens the reasoning."""
    return _OPENING_AT_END.search(prompt[-64:]) is not None


def closing_of(prompt: str) -> str:
    """Return the mark that closes the reasoning that the end of a prompt opens.

    It is empty if the prompt opens none, or with a mark without a simple counterpart.
    """
    opening = re.search(rf"([<\[])({_NAMES})([>\]])\s*\Z", prompt[-64:], re.IGNORECASE)
    if opening is None:
        return ""
    return f"{opening[1]}/{opening[2]}{opening[3]}"


def is_mark(token: str) -> bool:
    """Return whether a token's text opens or closes reasoning, or is a part of such a mark."""
    parts = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
    if token in parts:
        return True
    return bool(_CLOSINGS.fullmatch(token) or re.fullmatch(_OPENINGS, token, re.IGNORECASE))


def _begins_with_reasoning(text: str) -> bool:
    patterns = (_OPENING, _BARE_HARMONY, _SENTENCE)
    return any(pattern.match(text) for pattern in patterns)


def _end_of_reasoning(text: str) -> int | None:
    """Return the offset after the last closing mark; None if no mark closes reasoning."""
    ends = [closing.end() for closing in _CLOSINGS.finditer(text) if not _is_quoted(text, closing)]
    if _BARE_HARMONY.match(text):
        ends += [closing.end() for closing in _BARE_HARMONY_FINAL.finditer(text)]
    if _SENTENCE.match(text):
        ends += [closing.end() for closing in _SENTENCE_END.finditer(text)]
    loose = re.match(_LOOSE_OPENING, text, re.IGNORECASE)
    if loose is not None:
        closings = re.finditer(rf"</\s*{loose['name']}\s*>", text, re.IGNORECASE)
        # If nothing follows, the tag is part of the answer itself.
        ends += [closing.end() for closing in closings if text[closing.end() :].strip()]
    return max(ends, default=None)


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Return whether a mark is only quoted: in backticks, or in a string of a JSON answer."""
    if text[: mark.start()].endswith("`") and text[mark.end() :].startswith("`"):
        return True
    if not text.lstrip().startswith(("{", "[")):
        return False
    depth = 0
    for part in _STRING_OR_BRACKET.finditer(text):
        if part.start() > mark.start():
            return False
        if part.group() in "[{":
            depth += 1
        elif part.group() in "]}":
            depth -= 1
        elif part.end() > mark.start():
            # A string that is cut at the end of the text may still contain the mark.
            return depth > 0
    return False


def _unwrapped(text: str, begin: int) -> tuple[int, int]:
    """Return the range of an answer after `begin`, without blanks and without its wrappers."""
    end = len(text)
    turn_end = _TURN_END.search(text, begin)
    if turn_end is not None:
        end = turn_end.start()
    begin, end = _stripped(text, begin, end)
    for opening, closing in _WRAPPERS:
        if text.startswith(opening, begin, end):
            begin += len(opening)
            if text.endswith(closing, begin, end):
                end -= len(closing)
            begin, end = _stripped(text, begin, end)
    return begin, end


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return a range of a text without the blanks at its ends."""
    answer = text[begin:end]
    begin += len(answer) - len(answer.lstrip())
    return begin, begin + len(answer.strip())
