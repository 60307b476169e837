"""What a worker needs of an engine, and the engines of a cascade's two models as one."""

from collections.abc import Sequence
from typing import Any, Protocol

from raypd.tasks.cascade import SecondProgram


class Engine(Protocol):
    """What a worker needs of raypd.decoding.engine.Engine. sequences: what is being decoded, each with its `counts`."""

    @property
    def pending(self) -> int: ...

    @property
    def sequences(self) -> Sequence[Any]: ...

    def submit(self, program: Any, *, tag: Any, sampling: Any, seed: int) -> Any: ...

    def step(self) -> list[Any]: ...


class CascadeEngine:
    """Gives each program to the engine of its model; a step is one of each that has something to do."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self.first, self.second = first, second

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

    def step(self) -> list[Any]:
        busy = [engine for engine in (self.first, self.second) if engine.pending]
        for engine in busy:
            if hasattr(engine, "patience"):  # a server's, which must not keep the other engine waiting
                engine.patience = 1.0 if len(busy) == 1 else 0.0
        return [result for engine in busy for result in engine.step()]
