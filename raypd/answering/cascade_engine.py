"""The two engines of a cascade, used like a single engine."""

from collections.abc import Sequence
from typing import Any

from raypd.decoding import EngineContract, Finished
from raypd.tasks import SecondProgram

# Seconds that a step waits for answers when both models are servers.
_PATIENCE = 1.0


class CascadeEngine:
    """Gives each program to the engine of its model; a step is one step of each busy engine."""

    patience: float | None = None

    def __init__(self, first: EngineContract, second: EngineContract) -> None:
        self.first = first
        self.second = second

    @property
    def _engines(self) -> tuple[EngineContract, EngineContract]:
        return self.first, self.second

    @property
    def waiting(self) -> str:
        return self.first.waiting or self.second.waiting

    @property
    def pending(self) -> int:
        return self.first.pending + self.second.pending

    @property
    def sequences(self) -> Sequence[Any]:
        return [*self.first.sequences, *self.second.sequences]

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> None:
        if isinstance(program, SecondProgram):
            self.second.submit(program.program, tag=tag, sampling=sampling, seed=seed)
        else:
            self.first.submit(program, tag=tag, sampling=sampling, seed=seed)

    def step(self) -> list[Finished]:
        busy = [engine for engine in self._engines if engine.pending]
        # An engine that computes here must not wait for a server.
        all_wait = all(engine.patience is not None for engine in busy)
        patience = _PATIENCE / max(1, len(busy)) if all_wait else 0.0
        finished: list[Finished] = []
        for engine in busy:
            if engine.patience is not None:
                engine.patience = patience
            finished += engine.step()
        return finished

    def close(self) -> None:
        self.first.close()
        self.second.close()
