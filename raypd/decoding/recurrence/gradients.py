"""Recurrent layers over whole texts, with gradients, as training needs them.

The tokens of a text follow the chains of decoding: `Chains` is given everything that a program fed,
and cuts it into runs. A pass contains whole texts, so a state is read only by later runs of the
same pass, and gradients flow back through it to the tokens before a fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from raypd.decoding.recurrence.chains import Chains, RecurrentRun
from raypd.decoding.recurrence.plan import ChunkStep, ConvolutionPlan, RecurrentPass, Scan
from raypd.decoding.recurrence.states import EMPTY, StatePool, StateShape
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import POSITION, SEGMENT


class FedText(NamedTuple):
    """What a program fed, except for the tokens that its text shares with others.

    Attributes:
        positions: [tokens]
        segments: [tokens]
        reach: What each segment sees of each other, [segments, segments].
        continues: For each segment but the first, the token from which it continues; -1 for the
            last shared token.
    """

    positions: np.ndarray
    segments: np.ndarray
    reach: np.ndarray
    continues: Mapping[int, int]


class _Slots(StatePool):
    """Slot numbers for states that are not stored: each state of a pass has its own."""

    def __init__(self) -> None:
        super().__init__([], np.iinfo(np.int64).max, torch.device("cpu"))

    def may_overwrite(self, slot: int) -> bool:
        return False


def runs_of_texts(texts: Iterable[FedText], shared: int) -> list[RecurrentRun]:
    """Cut the tokens of a pass into runs.

    Args:
        texts: The texts, in the order of the pass.
        shared: The tokens at the start of the pass with which all texts begin.

    Returns:
        The runs, each after those that it continues from.

    Raises:
        ProgramError: If the tokens of a segment do not follow one another.
    """
    slots = _Slots()
    runs: list[RecurrentRun] = []
    prefix_state = EMPTY
    prefix_level: int | None = None
    if shared:
        slots.reserve(1)
        prefix_state = slots.take()
        prefix_level = 0
        runs.append(RecurrentRun(np.arange(shared), EMPTY, prefix_state, prefix_level))
    begin = shared
    for text in texts:
        tokens = len(text.positions)
        # The step of a token does not matter for chains.
        table = np.zeros((3, tokens), dtype=np.int64)
        table[POSITION] = text.positions
        table[SEGMENT] = text.segments
        chains = Chains(slots)
        chains.extend(table, 0, tokens, text.reach, text.continues, (), may_drop=False)
        pieces = chains.pieces(table, np.arange(tokens))
        chains.reserve(pieces)
        for run in chains.plan(pieces, prefix_state, prefix_level):
            run.rows = begin + run.rows
            runs.append(run)
        begin += tokens
    return runs


class _StateSource(NamedTuple):
    """Where the states before the chunks of a step come from.

    Attributes:
        steps: The numbers of earlier steps; -1 for the state before the first token of a text.
        rows: For each of these steps, the rows of its states that are used, [used].
        order: For each chunk, the index of its state among all states used, [chunks].
    """

    steps: list[int]
    rows: list[torch.Tensor]
    order: torch.Tensor


_BEFORE_TEXT = -1


class GradientPass(RecurrentPass):
    """A pass over whole texts, in which gradients flow through forked states."""

    has_gradients = True

    def __init__(
        self, runs: list[RecurrentRun], tokens: int, device: torch.device, shapes: list[StateShape]
    ) -> None:
        """
        Args:
            runs: The runs, as `runs_of_texts` returns them.
            tokens: The tokens of the pass.
            device: Where the model is.
            shapes: What each recurrent layer remembers of a text.
        """
        # Gradients cannot flow through a store, so no store has room for a state.
        super().__init__(runs, tokens, StatePool([], 0, device))
        self._shapes = shapes

    @cached_property
    def _sources(self) -> list[_StateSource]:
        """Where the states before each step of `chunks` come from."""
        sources: list[_StateSource] = []
        # For each slot, the step that wrote it last, and the row of its state there.
        writers: dict[int, tuple[int, int]] = {EMPTY: (_BEFORE_TEXT, 0)}
        for number, step in enumerate(self.chunks.steps):
            sources.append(self._source(step, writers))
            for row, slot in enumerate(step.ends.tolist()):
                writers[slot] = (number, row)
        return sources

    def _source(self, step: ChunkStep, writers: Mapping[int, tuple[int, int]]) -> _StateSource:
        rows: dict[int, list[int]] = {}
        chunks: list[int] = []
        chunks_of: dict[int, list[int]] = {}
        for chunk, slot in enumerate(step.starts.tolist()):
            writer, row = writers[slot]
            rows.setdefault(writer, []).append(row)
            chunks_of.setdefault(writer, []).append(chunk)
        for members in chunks_of.values():
            chunks += members
        return _StateSource(
            list(rows),
            [to_device(np.array(members), self._device) for members in rows.values()],
            to_device(np.argsort(chunks), self._device),
        )

    def scan(self, layer: int, scans: Sequence[Scan], out: torch.Tensor) -> None:
        shape = self._shapes[layer].recurrent
        assert shape is not None
        before_text = torch.zeros(1, *shape, device=self._device)
        results: list[list[torch.Tensor]] = [[] for _ in scans]
        behind: dict[int, torch.Tensor] = {_BEFORE_TEXT: before_text}
        for number, step in enumerate(self.chunks.steps):
            source = self._sources[number]
            parts = [
                behind[writer].index_select(0, rows)
                for writer, rows in zip(source.steps, source.rows, strict=True)
            ]
            state = torch.cat(parts).index_select(0, source.order)
            result, behind[number] = scans[step.group].through(step.chunks, state)
            results[step.group].append(result)
        self.put(results, out)

    def stored_inputs(
        self, layer: int, plan: ConvolutionPlan, values: torch.Tensor
    ) -> torch.Tensor:
        # Every text begins in the pass.
        return values.new_zeros(len(plan.starts) * self._shapes[layer].inputs, values.shape[1])

    def store_inputs(self, layer: int, plan: ConvolutionPlan, sources: torch.Tensor) -> None:
        """Do nothing, because no text continues in another pass."""
