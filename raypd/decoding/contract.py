"""What every engine provides: raypd's own, vLLM, a server, a cascade, and the fake."""

from collections.abc import Sequence
from typing import Any, Protocol

from raypd.decoding.counts import Finished


class EngineContract(Protocol):
    """Decodes programs: `submit` them, then call `step` while any is `pending`.

    One thread drives an engine. Other threads may read `waiting`.

    Attributes:
        patience: Seconds that a step may wait for an answer from elsewhere. None if the engine
            computes during the step and so never waits.
    """

    patience: float | None

    @property
    def waiting(self) -> str:
        """What the engine has been waiting for, if it waits for long, such as a server that refuses
        requests; otherwise an empty string.
        """

    @property
    def pending(self) -> int:
        """The number of programs that were submitted and have not finished."""

    @property
    def sequences(self) -> Sequence[Any]:
        """Programs that are being decoded, each with its `counts`.

        An engine whose decoding happens elsewhere lists none.
        """

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> None:
        """Queue a program.

        Args:
            program: What to decode.
            tag: Returned as `Finished.tag`.
            sampling: How tokens are drawn; None if the engine decides by itself.
            seed: Determines the program's random draws.
        """

    def step(self) -> list[Finished]:
        """Do a bounded amount of work and return the programs that finished."""

    def close(self) -> None:
        """Release memory, threads and connections. The engine cannot be used afterwards."""
