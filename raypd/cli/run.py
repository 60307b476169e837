"""What `raypd extract`, `answer` and `generate` have in common: the configuration around a data file, and the run."""

from __future__ import annotations

import os
from typing import Any, Literal

from raypd.config import RunConfig
from raypd.config.load import load_config, make_config
from raypd.errors import ConfigError

Retry = Literal["failed", "all"]
COMMANDS = {"extraction": "extract", "question_answering": "answer", "generation": "generate"}  # task.kind -> command


def config_of(
    source: str, kind: str, overrides: list[str] | None, method: str | None, model: str | None, output: str | None
) -> RunConfig:
    """A configuration from a YAML file, or around a data file; options go before overrides."""
    given = {"decoding.method": method, "model.name": model, "output.path": output}
    changes = [f"{key}={value}" for key, value in given.items() if value is not None] + (overrides or [])
    if source.endswith((".yaml", ".yml")):
        return load_config(source, changes)
    name = os.path.basename(source).split(".")[0]
    tree: dict[str, Any] = {
        "input": {"path": source},
        "output": {"path": f"runs/{name}-{method or kind}"},
        "task": {"kind": kind},
    }
    return make_config(tree, changes)


def retry_of(retry_errors: bool, all_errors: bool) -> Retry | None:
    """Which documents of a run are tried again; None: it is run, not retried."""
    return "all" if all_errors else "failed" if retry_errors else None


def run_job(config: RunConfig, kind: str, verbose: bool = False, retry: Retry | None = None) -> None:
    """Runs a job of a kind, and prints a few documents, the totals and where the files lie; or retries its errors."""
    from raypd.cluster.driver import run_extract
    from raypd.cluster.summary import print_summary

    if config.task.kind != kind:
        raise ConfigError(f"task.kind is {config.task.kind}: use `raypd {COMMANDS[config.task.kind]}`")
    if retry is None:
        print_summary(run_extract(config, verbose=verbose))
        return
    from raypd.verify.retry import retry_errors

    print(retry_errors(config, everything=retry == "all", verbose=verbose).describe())
