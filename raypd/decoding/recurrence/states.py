"""The states of recurrent layers: one store per layer, in which each state has a slot.

A state is what the recurrent layers remember of a text up to some token. Texts that continue from
the same token share its state until each of them writes its own, so each slot counts its users.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from raypd.decoding.kv_cache import NO_MEMORY, OutOfSlots
from raypd.decoding.memory import free_memory, has_main_memory, is_out_of_memory

# The slot of the state before the first token of a text. It stays zero.
EMPTY = 0
# The fewest slots with which programs can be decoded one after the other.
MIN_STATES = 8
_FIRST_STATES = 16  # The size at which a pool starts.
# The share of the free memory that states may take; the cache and the passes need the rest.
_STATE_SHARE = 0.5
# States for each program of a full batch are at most this many.
_MAX_STATES_PER_PROGRAM = 64


class OutOfStates(OutOfSlots):
    """The pool has no room at the moment. Sequences that end free some."""


class StateShape(NamedTuple):
    """What one recurrent layer remembers of a text."""

    # Inputs of the convolution before the next token, and its channels.
    inputs: int
    channels: int
    # The dtype of these inputs.
    dtype: torch.dtype
    # The shape of the recurrent state, which is held in float32; None for a convolution alone.
    recurrent: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        size = self.inputs * self.channels * self.dtype.itemsize
        if self.recurrent is not None:
            size += torch.Size(self.recurrent).numel() * torch.float32.itemsize
        return size


class StatePool:
    """The states of all sequences.

    The pool doubles when it is full, up to `limit` slots. A freed slot is reused only after
    `settle`, because a pass that is being planned may still read it.

    Attributes:
        limit: The largest number of states.
        state_bytes: Bytes of one state in all layers.
        generation: A number that rises whenever the states move to other addresses.
        inputs: For each layer, the last inputs of its convolution, [slots, inputs, channels].
        recurrent: For each layer, its recurrent states, [slots, ...]; None for a convolution alone.
    """

    def __init__(
        self,
        shapes: list[StateShape],
        limit: int,
        device: torch.device,
        allocate: bool = False,
    ) -> None:
        """
        Args:
            shapes: What each layer remembers.
            limit: The largest number of states, not counting the empty one.
            device: Where the states are.
            allocate: Whether memory for all states is allocated immediately.
        """
        self.limit = limit
        self.device = device
        self.generation = 0
        self.state_bytes = sum(shape.nbytes for shape in shapes)
        slots = 1 + (limit if allocate else min(limit, _FIRST_STATES))
        self.inputs: list[torch.Tensor] = []
        self.recurrent: list[torch.Tensor | None] = []
        for shape in shapes:
            self.inputs.append(
                torch.zeros(slots, shape.inputs, shape.channels, dtype=shape.dtype, device=device)
            )
            states = None
            if shape.recurrent is not None:
                states = torch.zeros(slots, *shape.recurrent, dtype=torch.float32, device=device)
            self.recurrent.append(states)
        self._users = [0] * slots
        self._free = list(range(slots - 1, EMPTY, -1))
        self._freed: list[int] = []
        self._read: set[int] = set()
        self._limit_reason = "the memory that is set aside for states is full"

    @property
    def slots(self) -> int:
        """The number of states for which there is memory now, not counting the empty one."""
        return len(self._users) - 1

    @property
    def used(self) -> int:
        """The number of states in use."""
        return self.slots - len(self._free) - len(self._freed)

    def settle(self) -> None:
        """Start planning a pass; slots freed before this may be reused."""
        self._free += self._freed
        self._freed = []
        self._read = set()

    def reserve(self, count: int) -> None:
        """Make sure that `count` states can be taken.

        Raises:
            OutOfStates: If the pool is full and cannot grow.
        """
        while len(self._free) < count:
            needed = self.slots + count - len(self._free)
            if self._try_grow(max(2 * self.slots, needed)):
                continue
            # There may be enough memory for these states even if there is not enough to double the
            # pool.
            if self._try_grow(needed):
                continue
            raise OutOfStates(
                f"{count} recurrent states of {self.state_bytes / 1e6:.3g} MB wanted, "
                f"{len(self._free)} of {self.slots} free, and {self._limit_reason}"
            )

    def take(self) -> int:
        """Return a free slot, which `reserve` guaranteed. It has one user."""
        slot = self._free.pop()
        self._users[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add a user to a slot."""
        if slot != EMPTY:
            self._users[slot] += 1

    def drop(self, slot: int) -> None:
        """Remove a user from a slot; without users, the slot becomes free."""
        if slot == EMPTY:
            return
        self._users[slot] -= 1
        if self._users[slot] == 0:
            self._freed.append(slot)

    def read(self, slot: int) -> None:
        """Record that the pass being planned reads a slot."""
        self._read.add(slot)

    def may_overwrite(self, slot: int) -> bool:
        """Return whether the only user of a slot may write its next state there."""
        return slot != EMPTY and self._users[slot] == 1 and slot not in self._read

    def _try_grow(self, slots: int) -> bool:
        """Enlarge the pool to `slots` or to its limit; return False if it stays unchanged."""
        extra = min(slots, self.limit) - self.slots
        if extra <= 0:
            return False
        if self.device.type == "cpu" and not has_main_memory(extra * self.state_bytes):
            # This may change: another process may free memory, so the limit stays.
            self._limit_reason = NO_MEMORY
            return False
        self.generation += 1
        try:
            self.inputs = [_grown(store, extra) for store in self.inputs]
            self.recurrent = [
                None if store is None else _grown(store, extra) for store in self.recurrent
            ]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The new slots of layers already enlarged stay unused.
            self.limit = self.slots
            self._limit_reason = NO_MEMORY
            return False
        first = len(self._users)
        self._users += [0] * extra
        self._free = [*range(first + extra - 1, first - 1, -1), *self._free]
        return True


def _grown(store: torch.Tensor, extra: int) -> torch.Tensor:
    """Return a copy of a store with `extra` more slots."""
    larger = store.new_zeros(len(store) + extra, *store.shape[1:])
    larger[: len(store)] = store
    return larger


def make_states(
    shapes: list[StateShape],
    device: torch.device,
    max_num_seqs: int,
    limit: int | None,
    memory_share: float,
) -> StatePool:
    """Reserve memory for the states of a model's recurrent layers.

    Args:
        shapes: What each layer remembers.
        device: Where the model is.
        max_num_seqs: Programs that decode at the same time.
        limit: The largest number of states; None for as many as memory allows.
        memory_share: The share of a GPU's free memory that the engine may take.

    Raises:
        ValueError: If the states of one program do not fit into memory.
    """
    state_bytes = sum(shape.nbytes for shape in shapes)
    if limit is None:
        free = free_memory(device)
        if device.type == "cuda":
            free = int(free * memory_share)
        limit = int(free * _STATE_SHARE) // state_bytes
        limit = min(limit, max(MIN_STATES, max_num_seqs * _MAX_STATES_PER_PROGRAM))
    if limit < MIN_STATES:
        raise ValueError(
            f"the memory of {device} holds {limit} states of the model's recurrent layers, of "
            f"{state_bytes / 1e6:.3g} MB each, and {MIN_STATES} are needed at least: free memory, "
            "or use a smaller model"
        )
    try:
        # A GPU's cache takes what is left, so all states are allocated before it.
        return StatePool(shapes, limit, device, allocate=device.type == "cuda")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = f"the memory of {device} does not hold {limit} recurrent states"
        raise ValueError(message) from error
