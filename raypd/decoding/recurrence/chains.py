"""The chains of one sequence: for each token, the token from which a recurrent layer continues it.

The tokens of a segment follow one another in the order in which they are fed. A segment begins at
the row that a feed names, or at the beginning of a text. The state after the last token of each
segment is kept, so that the segment can continue in a later pass.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from raypd.decoding.program import ProgramError
from raypd.decoding.recurrence.states import EMPTY, StatePool
from raypd.decoding.visibility import POSITION, SEGMENT, Reach

# The token before the first own one: the last token of a shared prefix.
_PREFIX_END = -1
# States besides those of the segments: the one before the first token that continues, and one that
# a pass writes while another pass still reads the previous one.
_SPARE_STATES = 2


@dataclass(slots=True)
class ChainPiece:
    """Tokens of one segment that follow one another in a chunk."""

    segment: int
    # Own tokens of the sequence, [n].
    tokens: np.ndarray
    # Their rows in the chunk, [n].
    rows: np.ndarray


@dataclass(slots=True)
class RecurrentRun:
    """A piece with its states.

    Attributes:
        rows: Its rows in the chunk, [n].
        start: The slot of the state from which its first token continues.
        end: The slot into which the state after its last token goes.
        level: 0 if `start` exists before the pass; otherwise one more than the level of the run in
            the same pass that writes it.
    """

    rows: np.ndarray
    start: int
    end: int
    level: int


class Chains:
    """The chains of one sequence, and the slots of their states.

    Tokens are the sequence's own ones, which do not include those of a shared prefix.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        # For each segment, the slot of the state after the last token that went through the model,
        # and that token.
        self.tails: dict[int, int] = {}
        self.tail_tokens: dict[int, int] = {}
        # For each segment, the last token that was fed.
        self.last: dict[int, int] = {}
        # The token from which a segment continues, and the segments that continue from a token.
        self.parents: dict[int, int] = {}
        self.forks: dict[int, list[int]] = {}
        # Segments that get no more tokens.
        self.closed: set[int] = set()
        # An earlier token of the only segment, and the slot of the state after it.
        self._back: tuple[int, int] | None = None

    @property
    def demand(self) -> int:
        """The largest number of states that the sequence can hold with its open segments."""
        return len((self.last.keys() | self.parents.keys()) - self.closed) + _SPARE_STATES

    # What a program feeds

    def drop(self, table: np.ndarray, dropped: np.ndarray, tokens: Sequence[int]) -> int | None:
        """Take back tokens that leave the text.

        Args:
            table: The sequence's table, [4, tokens].
            dropped: Whether each token left the text for good, [tokens]. It includes `tokens`.
            tokens: The tokens that leave now.

        Returns:
            The first token that must be fed again, or None.
        """
        first_again: int | None = None
        for segment in {int(table[SEGMENT, token]) for token in tokens}:
            fed = np.flatnonzero(table[SEGMENT, : self.last[segment] + 1] == segment)
            remaining = fed[~dropped[fed]]
            new_last = int(remaining[-1]) if len(remaining) else _PREFIX_END
            lost = [token for token in tokens if table[SEGMENT, token] == segment]
            self.last[segment] = new_last
            is_only = len(self.last) == 1
            at_end = min(lost) > new_last
            if is_only and at_end and self._back is not None and self._back[0] <= new_last:
                token, slot = self._back
                self._back = None
                self.pool.drop(self.tails[segment])
                self.tails[segment] = slot
                self.tail_tokens[segment] = token
                first_again = token + 1
            else:
                self.release()
                return 0
        return first_again

    def extend(
        self,
        table: np.ndarray,
        begin: int,
        end: int,
        reach: np.ndarray,
        parents: Mapping[int, int],
        closed: Iterable[int],
        may_drop: bool,
    ) -> bool:
        """Add the tokens of a feed.

        Args:
            table: The sequence's table, [4, tokens].
            begin: The first token of the feed.
            end: One more than its last token.
            reach: What each segment sees of each other, [segments, segments].
            parents: For each segment that begins, the token from which it continues.
            closed: Segments that get no token after this feed.
            may_drop: Whether the next feed may take tokens of this one back.

        Returns:
            Whether all tokens must be fed again, because a state that is needed was not kept.

        Raises:
            ProgramError: If the tokens of a segment do not follow one another.
        """
        if self._back is not None:
            self.pool.drop(self._back[1])
            self._back = None
        is_kept = True
        for segment, token in parents.items():
            is_kept &= self._fork(table, begin, segment, token)
        self._check(table, begin, end, reach)
        if may_drop and len(self.last) == 1:
            (segment,) = self.last
            if segment in self.tails:
                self.pool.share(self.tails[segment])
                self._back = (self.tail_tokens[segment], self.tails[segment])
        for token, segment in enumerate(table[SEGMENT, begin:end].tolist(), begin):
            self.last[segment] = token
        for segment in closed:
            self.closed.add(segment)
            is_complete = self.last.get(segment) == self.tail_tokens.get(segment)
            if is_complete and segment in self.tails:
                self.pool.drop(self.tails.pop(segment))
        if not is_kept:
            self.release()
        return not is_kept

    def _fork(self, table: np.ndarray, begin: int, segment: int, token: int) -> bool:
        """Let a segment continue from a token; return False if the state after it is lost."""
        if segment in self.parents or segment in self.last:
            raise ProgramError(f"segment {segment} continues from a row, but has begun already")
        siblings = self.forks.setdefault(token, [])
        self.parents[segment] = token
        siblings.append(segment)
        if token == _PREFIX_END or token >= begin:
            return True
        parent = int(table[SEGMENT, token])
        holders = [sibling for sibling in siblings if sibling not in self.last]
        if self.tail_tokens.get(parent) == token:
            holders.append(parent)
        for holder in holders:
            if holder in self.tails:
                self.tails[segment] = self.tails[holder]
                self.pool.share(self.tails[segment])
                return True
        return False

    def _check(self, table: np.ndarray, begin: int, end: int, reach: np.ndarray) -> None:
        """Raise ProgramError if the tokens of a feed do not follow those of their segment."""
        segments = table[SEGMENT, begin:end]
        positions = table[POSITION, begin:end]
        for segment in dict.fromkeys(segments.tolist()):
            own_positions = positions[segments == segment]
            if segment in self.last:
                before = self.last[segment]
            else:
                with_tokens = self.last.keys() | set(segments.tolist())
                before = self._begin(segment, reach, with_tokens)
            if before != _PREFIX_END:
                own_positions = np.append(table[POSITION, before], own_positions)
            if (np.diff(own_positions) <= 0).any():
                raise ProgramError(
                    f"the tokens of segment {segment} do not follow one another: on a model with "
                    "recurrent layers each token continues from the one before it"
                )
            if segment in self.closed:
                raise ProgramError(f"segment {segment} was closed and gets another token")

    def _begin(self, segment: int, reach: np.ndarray, with_tokens: Set[int]) -> int:
        """Return the token from which a segment without tokens continues."""
        if segment in self.parents:
            return self.parents[segment]
        visible = with_tokens & set(np.flatnonzero(reach[segment] != Reach.HIDDEN).tolist())
        if segment != 0 and visible != {segment}:
            raise ProgramError(
                f"segment {segment} sees segments {sorted(visible)}, but does not name the row "
                "from which it continues: a model with recurrent layers needs it"
            )
        return _PREFIX_END

    # What goes into a pass

    def pieces(self, table: np.ndarray, chunk: np.ndarray) -> list[ChainPiece]:
        """Split a chunk into pieces, in the order of their first tokens.

        A piece ends where its segment does, and at each token from which a segment continues.

        Args:
            table: The sequence's table, [4, tokens].
            chunk: Own tokens, [n].
        """
        segments = table[SEGMENT, chunk]
        rows = np.arange(len(chunk))
        names = segments.tolist()
        distinct = dict.fromkeys(names)
        if len(distinct) == len(names):
            return [
                ChainPiece(segment, chunk[row : row + 1], rows[row : row + 1])
                for row, segment in enumerate(names)
            ]
        pieces: list[ChainPiece] = []
        fork_tokens = np.array(sorted(self.forks), dtype=np.int64)
        for segment in distinct:
            own_rows = rows[segments == segment] if len(distinct) > 1 else rows
            tokens = chunk[own_rows]
            cuts = np.flatnonzero(np.isin(tokens[:-1], fork_tokens)) + 1
            for part_tokens, part_rows in zip(
                np.split(tokens, cuts), np.split(own_rows, cuts), strict=True
            ):
                pieces.append(ChainPiece(segment, part_tokens, part_rows))
        pieces.sort(key=lambda piece: int(piece.rows[0]))
        return pieces

    def reserve(self, pieces: list[ChainPiece]) -> None:
        """Make sure that there are slots for the states after some pieces.

        Raises:
            OutOfStates: If there are none. Nothing has changed then.
        """
        needed = 0
        seen: set[int] = set()
        for piece in pieces:
            segment = piece.segment
            is_first = segment not in seen
            seen.add(segment)
            if is_first and segment in self.tails:
                needed += not self.pool.may_overwrite(self.tails[segment])
            else:
                needed += 1
        self.pool.reserve(needed)

    def plan(
        self, pieces: list[ChainPiece], prefix_state: int, prefix_level: int | None = None
    ) -> list[RecurrentRun]:
        """Choose the states from which pieces continue, and the slots for the states after them.

        Args:
            pieces: The pieces of a chunk, for which slots were reserved.
            prefix_state: The slot of the state after the shared prefix.
            prefix_level: The level of the run that writes that state; None if the state exists
                before the pass.
        """
        pool = self.pool
        levels: dict[int, int] = {}  # The level of the run that writes a slot.
        if prefix_level is not None:
            levels[prefix_state] = prefix_level
        runs: list[RecurrentRun] = []
        for piece in pieces:
            segment = piece.segment
            start = self.tails.get(segment)
            if start is None:
                start = prefix_state if self._reads_prefix(segment) else EMPTY
                end = pool.take()
            elif pool.may_overwrite(start):
                end = start
            else:
                end = pool.take()
                pool.drop(start)
            pool.read(start)
            level = levels.get(start, -1) + 1
            levels[end] = level
            runs.append(RecurrentRun(piece.rows, start, end, level))
            token = int(piece.tokens[-1])
            self.tails[segment] = end
            self.tail_tokens[segment] = token
            for child in self.forks.get(token, ()):
                if child not in self.tails and (child not in self.closed or child in self.last):
                    pool.share(end)
                    self.tails[child] = end
            if segment in self.closed and token == self.last[segment]:
                pool.drop(self.tails.pop(segment))
        return runs

    def _reads_prefix(self, segment: int) -> bool:
        """Return whether a segment without a state continues from the shared prefix."""
        return segment == 0 or self.parents.get(segment) == _PREFIX_END

    def release(self) -> None:
        """Give all states back. They are recomputed when the sequence is fed again."""
        for slot in self.tails.values():
            self.pool.drop(slot)
        if self._back is not None:
            self.pool.drop(self._back[1])
        self.tails = {}
        self.tail_tokens = {}
        self._back = None

    def hand_over(self) -> int:
        """Return the slot of segment 0's state, which now belongs to the caller."""
        return self.tails.pop(0)
