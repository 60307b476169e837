"""The figures of docs/methods.md, drawn from what the engine did on tiny models."""
