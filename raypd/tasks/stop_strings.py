"""Detects that an answer has reached a stop string."""

from collections.abc import Sequence


class StopStrings:
    """Detects that an answer is complete: at an end token, or at a stop string.

    Call it after each token with all tokens so far. A stop string may begin in an earlier token.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], end_tokens: frozenset[int], stop: Sequence[str]
    ) -> None:
        """Create a test for one answer.

        Args:
            token_bytes: The bytes of each token of the vocabulary.
            end_tokens: Ids that end an answer.
            stop: The stop strings.
        """
        self._token_bytes = token_bytes
        self._end_tokens = end_tokens
        self._stops = [text.encode() for text in stop]
        self._longest = max(map(len, self._stops), default=0)
        # The end of the answer, in which a stop string may have begun.
        self._tail = b""
        self._tokens_read = 0

    def __call__(self, tokens: Sequence[int]) -> bool:
        for token in tokens[self._tokens_read :]:
            if token in self._end_tokens:
                return True
            if self._stops:
                self._tail += self._token_bytes[token]
                if any(stop in self._tail for stop in self._stops):
                    return True
                self._tail = self._tail[-self._longest :]
        self._tokens_read = len(tokens)
        return False
