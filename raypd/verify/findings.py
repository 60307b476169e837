"""The text that `raypd verify` and `raypd errors` print."""

from collections.abc import Sequence

import raypd.verify.dead_letters as dead_letters
from raypd.run import left_out
from raypd.text import counted, one_line
from raypd.verify.verification import Finding, Verification

_PREDICATES = {
    "missing": "without a row",
    "doubled": "with rows more than once",
    "foreign": "that the input does not have",
    "damaged": "of damaged objects",
    "unreadable": "of input that cannot be read now",
}
_EXAMPLES_SHOWN = 5
_UNITS_SHOWN = 10


def describe(result: Verification) -> str:
    """Describe a verification: counts, then each finding with a few examples, then the verdict."""
    lines = _counts(result)
    for name, predicate in _PREDICATES.items():
        finding: Finding = getattr(result, name)
        if not finding.units and not finding.documents:
            continue
        line = f"{name}: {counted(finding.documents, 'document')} {predicate}"
        if finding.units and name == "missing":
            line += f", {counted(finding.units, 'whole unit')}"
        elif finding.units:
            line += f", {counted(finding.units, 'unit')}"
        lines.append(line)
        lines += _indented(finding.examples)
    lines += _damaged_input(result)
    if result.delta:
        lines.append(f"delta: {result.delta}")
    lines += _repeated_ids(result)
    if result.left_out:
        lines.append(f"note: {left_out.describe(result.left_out)}")
    lines.append(_verdict(result))
    return "\n".join(lines)


def _counts(result: Verification) -> list[str]:
    """Return the lines with the counts."""
    output = (
        f"output: {counted(result.found, 'document')} in {counted(result.objects, 'object')}: "
        f"{result.ok:,} ok, {result.failed:,} failed"
    )
    if result.failed:
        output += f" (raypd errors {result.run})"
    return [
        f"run:    {result.run} (configuration {result.fingerprint})",
        f"input:  {counted(result.documents, 'document')} in {counted(result.units, 'unit')}",
        output,
    ]


def _damaged_input(result: Verification) -> list[str]:
    """Return the lines about objects of the input that cannot be read."""
    damaged = result.damaged_input
    if not damaged.units:
        return []
    label = "note" if result.damaged_allowed else "damaged input"
    objects = counted(damaged.units, "object")
    line = f"{label}: {objects} of the input cannot be read, so its documents are not known:"
    return [line, *_indented(damaged.examples)]


def _repeated_ids(result: Verification) -> list[str]:
    """Return the lines about ids that several documents share."""
    repeated = result.repeated_ids
    if not repeated.units:
        return []
    documents = counted(repeated.documents, "document")
    verb = "belongs" if repeated.units == 1 else "belong"
    line = (
        f"note: {counted(repeated.units, 'id')} of the input {verb} to {documents}, which keep "
        "rows of their own (source and row tell them apart):"
    )
    return [line, *_indented(repeated.examples)]


def _indented(lines: Sequence[str], limit: int = _EXAMPLES_SHOWN) -> list[str]:
    """Indent lines, at most `limit` of them."""
    indented = [f"    {one_line(line)}" for line in lines[:limit]]
    if len(lines) > limit:
        indented.append("    ...")
    return indented


def _verdict(result: Verification) -> str:
    """Return the last line: ok, or what to do."""
    if result.passed:
        files = "the input"
        remark = ""
        # An empty file has no document that could be missing.
        unread = [group for group in result.left_out if group.reason != left_out.EMPTY]
        if unread:
            files = "the files that are read"
            remark = f"; {counted(left_out.total(unread), 'file')} of the input left out, see above"
        return f"ok: every document of {files} is in the output exactly once{remark}"
    advice = []
    if result.damaged.units:
        advice.append("delete the damaged objects")
    if result.foreign.units:
        advice.append("if the input has changed since the run, run it into a new output.path")
    if result.missing.documents or result.missing.units or result.delta:
        advice.append("run the same command again to process what is missing")
    if result.damaged_input.units and not result.damaged_allowed:
        advice.append(
            "repair the damaged input and run again, or accept it with input.on_damaged=skip"
        )
    if result.unreadable.units:
        advice.append("restore the input, or name its location: raypd verify RUN input.path=...")
    if not advice:
        return "NOT OK"
    return f"NOT OK: {'; '.join(advice)}"


def after_errors(summary: dead_letters.Summary) -> str:
    """Return what to do next about the dead letters of a run."""
    if summary.units:
        return "repeat the command of the run to process the missing units"
    if summary.retried:
        return (
            "repeat the command of the run with --retry-errors to retry "
            f"{counted(summary.retried, 'document')}"
        )
    if summary.documents:
        return (
            "the input caused these failures. Repair it, and run it into a new output.path; "
            "`raypd nightly` reads only what has changed. --all-errors repeats what failed for "
            "another reason, such as a missing package"
        )
    return f"`raypd report {summary.run}` shows what the run did and cost"


def describe_errors(summary: dead_letters.Summary) -> str:
    """Describe dead letters: reasons with counts, examples of each, then the failed units."""
    if not summary.documents and not summary.units:
        return f"{summary.run}: no document failed"
    documents = counted(summary.documents, "failed document")
    lines = [f"{documents} of {counted(len(summary.reasons), 'kind')}"]
    if summary.reasons:
        width = len(f"{summary.reasons[0].documents:,}")
        for group in summary.reasons:
            mark = "" if group.can_change else "  [caused by the input]"
            lines.append(f"{group.documents:>{width},}  {one_line(group.reason)}{mark}")
        lines.append("examples:")
    for group in summary.reasons:
        for row in group.examples:
            location = f"({row['source']}, at {row['row']}, attempts {row['attempts']})"
            lines.append(one_line(f"    {row['id']} {location}: {row['reason']}"))
    if summary.units:
        units = counted(len(summary.units), "unit")
        lines.append(f"{units} not done, with the last line of the worker:")
        failures = [f"{failure['unit']}: {failure['reason']}" for failure in summary.units]
        lines += _indented(failures, _UNITS_SHOWN)
    return "\n".join(lines)
