"""What `raypd verify` and `raypd errors` print, and the files that `raypd errors --output` writes."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypd import storage
from raypd.errors import ConfigError
from raypd.run.text import counted
from raypd.verify import dead_letters
from raypd.verify.dead_letters import SCHEMA, Summary
from raypd.verify.verification import Finding, Verification

SUFFIXES = (".csv", ".jsonl", ".parquet")
_UNITS_SHOWN = 10


def describe(result: Verification, limit: int = 5) -> str:
    """A verification in lines: counts, then what is wrong with at most `limit` examples each, then the verdict."""
    out = [
        f"run:    {result.run} (configuration {result.fingerprint})",
        f"input:  {counted(result.documents, 'document')} in {counted(result.units, 'unit')}",
        f"output: {counted(result.found, 'document')} in {counted(result.objects, 'object')}: {result.ok:,} ok, "
        f"{result.failed:,} failed" + (f" (raypd errors {result.run})" if result.failed else ""),
    ]
    out += _finding("missing", result.missing, "without a row", limit)
    out += _finding("doubled", result.doubled, "with rows more than once", limit)
    out += _finding("foreign", result.foreign, "that the input does not have", limit)
    out += _finding("damaged", result.damaged, "of damaged objects", limit)
    out += _finding("unreadable", result.unreadable, "of input that cannot be read now", limit)
    if result.damaged_input.units:
        damaged = result.damaged_input
        how = "note: " if result.damaged_allowed else "damaged input: "
        out.append(
            f"{how}{counted(damaged.units, 'object')} of the input cannot be read, so its documents are not known:"
        )
        out += [f"    {example}" for example in damaged.examples[:limit]]
    if result.repeated_ids.units:
        repeated = result.repeated_ids
        out.append(
            f"note: {counted(repeated.units, 'id')} of the input stand{'s' if repeated.units == 1 else ''} on "
            f"{counted(repeated.documents, 'document')}, which keep rows of their own (source and row tell them apart):"
        )
        out += [f"    {example}" for example in repeated.examples[:limit]]
    if result.temporary:
        out.append(
            f"note: {counted(len(result.temporary), 'temporary file')} of dead writers; no reader sees them, and the "
            "next run removes them"
        )
    out.append(_verdict(result))
    return "\n".join(out)


def _finding(name: str, finding: Finding, what: str, limit: int) -> list[str]:
    if not finding.documents and not finding.units:
        return []
    units = f", {counted(finding.units, 'whole unit' if name == 'missing' else 'unit')}" if finding.units else ""
    concerned = finding.units or finding.documents  # an example is a unit where whole units are concerned
    more = len(finding.examples) > limit or concerned > len(finding.examples)
    lines = [f"{name}: {counted(finding.documents, 'document')} {what}{units}"]
    return lines + [f"    {example}" for example in finding.examples[:limit]] + (["    ..."] if more else [])


def _verdict(result: Verification) -> str:
    if result.well:
        return "ok: every document of the input stands in the output exactly once"
    advice = []
    if result.damaged.units:
        advice.append("delete the damaged objects")
    if result.foreign.units:
        advice.append("if the input has changed since the run, run it into a new output.path")
    if result.missing.documents or result.missing.units:
        advice.append("run the same command again: it does what is missing")
    if result.damaged_input.units and not result.damaged_allowed:
        advice.append("put the damaged input right and run again, or let it be with input.on_damaged=skip")
    if result.unreadable.units:
        advice.append("put the input back where it was, or name it: raypd verify RUN input.path=...")
    return "NOT OK" + (f": {'; '.join(advice)}" if advice else "")


# --------------------------------------------------------------------------------------------------------------- errors


def describe_errors(summary: Summary) -> str:
    """Dead letters in lines: reasons with counts, examples under each, then the units that failed whole."""
    if not summary.documents and not summary.units:
        return f"{summary.run}: no dead letters"
    out = [f"{counted(summary.documents, 'failed document')} of {counted(len(summary.reasons), 'kind')}"]
    width = len(f"{summary.reasons[0].documents:,}") if summary.reasons else 1
    out += [
        f"{group.documents:>{width},}  {group.reason}" + ("" if group.can_change else "  [as it stands in the input]")
        for group in summary.reasons
    ]
    if summary.reasons:
        out.append("examples:")
    for group in summary.reasons:
        for row in group.examples:
            out.append(
                f"    {row['id']} ({row['source']}, at {row['row']}, attempts {row['attempts']}): {row['reason']}"
            )
    if summary.units:
        out.append(f"{counted(len(summary.units), 'unit')} not done, with the last word of the worker:")
        out += [f"    {unit.unit}: {unit.reason}" for unit in summary.units[:_UNITS_SHOWN]]
        out += ["    ..."] if len(summary.units) > _UNITS_SHOWN else []
    retry = sum(group.documents for group in summary.reasons if group.can_change)
    if retry:
        out.append(f"--retry-errors tries {counted(retry, 'document')} again")
    return "\n".join(out)


def print_letters(output: str) -> None:
    """Every dead letter on a line of its own, as tab-separated values that a shell can work on."""
    writer = csv.writer(sys.stdout, dialect="excel-tab", lineterminator="\n")
    writer.writerow(SCHEMA.names)
    for table in dead_letters.letters(output):
        writer.writerows(tuple(row.values()) for row in table.to_pylist())


def write_letters(output: str, path: str) -> int:
    """Writes all dead letters of a run into a local file, as its suffix says; how many.

    Raises ConfigError for another suffix or a file that cannot be written. The file is there whole, or not at all.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES or storage.is_remote(path):
        raise ConfigError(f"--output {path}: give a local file that ends in {', '.join(SUFFIXES)}")
    count = 0
    try:
        with _file(path, suffix) as write:
            for table in dead_letters.letters(output):
                write(table)
                count += len(table)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error}") from None
    return count


@contextmanager
def _file(path: str, suffix: str) -> Iterator[Callable[[pa.Table], Any]]:
    part = f"{path}.part-{os.getpid()}"
    try:
        if suffix == ".parquet":
            with pq.ParquetWriter(part, SCHEMA, compression="zstd") as parquet:
                yield parquet.write_table
        else:
            with open(part, "w", newline="", encoding="utf-8") as file:
                if suffix == ".csv":
                    writer = csv.writer(file)
                    writer.writerow(SCHEMA.names)
                    yield lambda table: writer.writerows(tuple(row.values()) for row in table.to_pylist())
                else:
                    yield lambda table: file.writelines(
                        json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()
                    )
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
