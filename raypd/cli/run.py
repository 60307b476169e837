"""What `raypd extract`, `answer` and `generate` have in common: the configuration around a data file, and the run."""

from __future__ import annotations

import os

from raypd.config import RunConfig
from raypd.config.load import load_config, make_config
from raypd.errors import ConfigError
from raypd.run.text import clean

COMMANDS = {"extraction": "extract", "question_answering": "answer", "generation": "generate"}  # task.kind -> command


def config_over(
    source: str, kind: str, overrides: list[str], method: str | None, model: str | None, output: str | None
) -> RunConfig:
    """A configuration from a YAML file, or around a data file; options go before overrides."""
    given = {"decoding.method": method, "model.name": model, "output.path": output}
    changes = [f"{key}={value}" for key, value in given.items() if value is not None] + overrides
    if source.endswith((".yaml", ".yml")):
        return load_config(source, changes)
    path = f"runs/{os.path.basename(source).split('.')[0]}-{method or kind}"
    return make_config({"input": {"path": source}, "output": {"path": path}, "task": {"kind": kind}}, changes)


def run_task(config: RunConfig, kind: str, retry_errors: bool, all_errors: bool, verbose: bool) -> None:
    """Runs a task of a kind, and prints a few documents, the totals and where the files lie; or retries its errors."""
    if config.task.kind != kind:
        raise ConfigError(f"task.kind is {config.task.kind}: use `raypd {COMMANDS[config.task.kind]}`")
    if retry_errors or all_errors:
        from raypd.verify import retry

        print(clean(retry.retry_errors(config, everything=all_errors, verbose=verbose).describe()))
        return
    from raypd.cluster.driver import run_extract
    from raypd.cluster.summary import print_summary

    print_summary(run_extract(config, verbose=verbose))
