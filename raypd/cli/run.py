"""What `raypd extract`, `answer` and `generate` have in common: the configuration around a data
file, and the run.
"""

import os
from typing import Any

from raypd import storage
from raypd.config import KINDS, GenerationConfig, RunConfig
from raypd.config.load import load_config, make_config
from raypd.config.schema import task_of
from raypd.dataset import look_for_columns
from raypd.errors import ConfigError, RunError
from raypd.run import layout
from raypd.run.console import say
from raypd.run.manifest import Manifest
from raypd.text import clean, count, counted, share


def config_over(
    source: str,
    kind: str,
    overrides: list[str],
    method: str | None,
    model: str | None,
    output: str | None,
    openai: bool = False,
    schema: str | None = None,
) -> RunConfig:
    """A configuration from a YAML file, or around a data file; options go before overrides. openai:
    the data is a batch file of OpenAI's; what a request does not say is as there, so it samples.
    """
    options = {"decoding.method": method, "model.name": model, "output.path": output}
    changes = [f"{key}={value}" for key, value in options.items() if value is not None] + overrides
    if source.endswith((".yaml", ".yml")):
        if openai:
            raise ConfigError(
                f"{source}: --openai takes the batch file itself, and settings as key=value "
                "behind it"
            )
        if schema is not None:
            raise ConfigError(f"{source}: has its own task; --schema is for a data file")
        return load_config(source, changes)
    if (
        kind == "extraction"
        and schema is None
        and not any(change.startswith("task.") for change in overrides)
    ):
        advice = "--schema 'Brand, Color', or a JSON Schema, a YAML of categories, or module:Class"
        raise ConfigError(
            f"{source}: give a run's YAML, or say what to extract from this data: {advice}"
        )
    path = f"runs/{os.path.basename(source).split('.')[0]}-{method or kind}"
    task = {"kind": kind, **(task_of(schema) if schema is not None else {})}
    tree: dict[str, Any] = {"input": {"path": source}, "output": {"path": path}, "task": task}
    if kind == "extraction":
        look_for_columns(source, tree, changes, say)
    if openai:
        tree["input"] |= {"id_column": "custom_id", "category_column": None}
        tree["task"] |= {"openai": True, "prompt_column": "body"}
        tree["decoding"] = {"sampling": {"temperature": 1.0}}
    return make_config(tree, changes)


def run_task(
    config: RunConfig, kind: str, retry_errors: bool, all_errors: bool, verbose: bool
) -> None:
    """Runs a task of a kind, and prints a few documents, the totals and where the files lie; or
    retries its errors.
    """
    if config.task.command != KINDS[kind].command:
        raise ConfigError(f"task.kind is {config.task.kind}: use `raypd {config.task.command}`")
    batch = isinstance(config.task, GenerationConfig) and config.task.openai
    if batch:
        from raypd.dataset import batch_files

        storage.configure(config.storage)
        batch_files.check(config)
    manifest = None
    if retry_errors or all_errors:
        from raypd.verify import retry

        print(clean(retry.retry_errors(config, everything=all_errors, verbose=verbose).describe()))
    else:
        from raypd.cli.summary import print_summary
        from raypd.cluster.driver import run_extract

        manifest = run_extract(config, verbose=verbose)
        print_summary(manifest)
    if batch:
        output = layout.output_folder(config)
        answered, failed = batch_files.write(config, output)
        print(
            f"answers:  {clean(storage.join(output, layout.BATCH_OUTPUT))} "
            f"({counted(answered, 'request')})"
        )
        print(
            f"errors:   {clean(storage.join(output, layout.BATCH_ERRORS))} "
            f"({counted(failed, 'request')})"
        )
    if manifest is not None and manifest.failed:
        _tell_failures(manifest, config.cluster.max_failed_share)


def _tell_failures(manifest: Manifest, most: float) -> None:
    """Says what share of a run has failed, and why most of it.

    Raises RunError where that is too much, or all.
    """
    from raypd.verify import dead_letters

    reason = dead_letters.most_frequent(manifest.output)
    because = f", most because: {clean(reason, 300)}" if reason else ""
    of = share(manifest.failed, manifest.documents)
    failed = f"{count(manifest.failed)} of {counted(manifest.documents, 'document')} failed ({of})"
    where = f"`raypd errors {manifest.output}` lists them; --retry-errors tries again what may pass"
    if manifest.ok and manifest.failed <= most * manifest.documents:
        print(f"{failed}{because}\n{where}")
        return
    too_many = f"more documents failed than cluster.max_failed_share, {most:g}"
    limit = too_many if manifest.ok else "no document was answered"
    raise RunError(f"{limit}: {failed}{because}\n{where}")
