"""What `raypd extract`, `answer` and `generate` have in common: the configuration around a data file, and the run."""

from __future__ import annotations

import os

from raypd.config import RunConfig
from raypd.config.load import load_config, make_config
from raypd.errors import ConfigError, RunError
from raypd.run.records import Manifest
from raypd.run.text import clean, count, counted, share

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

    made = run_extract(config, verbose=verbose)
    print_summary(made)
    if made.failed:
        _tell_failures(made, config.cluster.max_failed_share)


def _tell_failures(made: Manifest, most: float) -> None:
    """Says what share of a run has failed, and why most of it. Raises RunError where that is too much, or all."""
    from raypd.verify import dead_letters

    reason = dead_letters.most_frequent(made.output)
    because = f", most because: {clean(reason, 300)}" if reason else ""
    of = share(made.failed, made.documents)
    failed = f"{count(made.failed)} of {counted(made.documents, 'document')} failed ({of})"
    where = f"`raypd errors {made.output}` lists them; --retry-errors tries again what may pass"
    if made.ok and made.failed <= most * made.documents:
        print(f"{failed}{because}\n{where}")
        return
    limit = f"more documents failed than cluster.max_failed_share, {most:g}" if made.ok else "no document was answered"
    raise RunError(f"{limit}: {failed}{because}\n{where}")
