"""What `raypd verify` and `raypd errors` print."""

from collections.abc import Sequence

from raypd.run import left_out
from raypd.text import counted, one_line
from raypd.verify import dead_letters
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
    """A verification in lines: counts, then what is wrong with a few examples each, then the
    verdict.
    """
    out = [
        f"run:    {result.run} (configuration {result.fingerprint})",
        f"input:  {counted(result.documents, 'document')} in {counted(result.units, 'unit')}",
        f"output: {counted(result.found, 'document')} in "
        f"{counted(result.objects, 'object')}: {result.ok:,} ok, "
        f"{result.failed:,} failed" + (f" (raypd errors {result.run})" if result.failed else ""),
    ]
    for name, predicate in _PREDICATES.items():
        finding: Finding = getattr(result, name)
        if finding.units:
            units = f", {counted(finding.units, 'whole unit' if name == 'missing' else 'unit')}"
        else:
            units = ""
        if finding.units or finding.documents:
            out.append(f"{name}: {counted(finding.documents, 'document')} {predicate}{units}")
            out += _indented(finding.examples)
    if (damaged := result.damaged_input).units:
        how = "note" if result.damaged_allowed else "damaged input"
        objects = counted(damaged.units, "object")
        out.append(f"{how}: {objects} of the input cannot be read, so its documents are not known:")
        out += _indented(damaged.examples)
    if result.delta:
        out.append(f"delta: {result.delta}")
    if (repeated := result.repeated_ids).units:
        out.append(
            f"note: {counted(repeated.units, 'id')} of the input "
            f"stand{'s' if repeated.units == 1 else ''} on "
            f"{counted(repeated.documents, 'document')}, which keep rows of their own "
            "(source and row tell them apart):"
        )
        out += _indented(repeated.examples)
    if result.left_out:
        out.append(f"note: {left_out.describe(result.left_out)}")
    return "\n".join([*out, _verdict(result)])


def _indented(lines: Sequence[str], limit: int = _EXAMPLES_SHOWN) -> list[str]:
    return [f"    {one_line(line)}" for line in lines[:limit]] + ["    ..."] * (len(lines) > limit)


def _verdict(result: Verification) -> str:
    if result.passed:
        files = "the input"
        remark = ""
        # An empty file has no document that could be missing.
        unread = [group for group in result.left_out if group.reason != left_out.EMPTY]
        if unread:
            files = "the files that are read"
            remark = f"; {counted(left_out.total(unread), 'file')} of the input left out, see above"
        return f"ok: every document of {files} stands in the output exactly once{remark}"
    missing = result.missing.documents or result.missing.units or result.delta
    damaged_input = result.damaged_input.units and not result.damaged_allowed
    advice = {
        "delete the damaged objects": result.damaged.units,
        "if the input has changed since the run, run it into a new output.path": result.foreign.units,  # noqa: E501
        "run the same command again: it does what is missing": missing,
        "put the damaged input right and run again, or let it be with input.on_damaged=skip": damaged_input,  # noqa: E501
        "put the input back where it was, or name it: raypd verify RUN input.path=...": result.unreadable.units,  # noqa: E501
    }
    words = "; ".join(sentence for sentence, applies in advice.items() if applies)
    return "NOT OK" + (f": {words}" if words else "")


def describe_errors(summary: dead_letters.Summary) -> str:
    """Dead letters in lines: reasons with counts, examples of each, then the units that failed
    whole.
    """
    if not summary.documents and not summary.units:
        return f"{summary.run}: no dead letters"
    out = [
        (
            f"{counted(summary.documents, 'failed document')} of "
            f"{counted(len(summary.reasons), 'kind')}"
        )
    ]
    for group in summary.reasons:
        mark = "" if group.can_change else "  [as it stands in the input]"
        out.append(
            f"{group.documents:>{len(f'{summary.reasons[0].documents:,}')},}  "
            f"{one_line(group.reason)}{mark}"
        )
    out += ["examples:"] if summary.reasons else []
    for row in (row for group in summary.reasons for row in group.examples):
        place = f"({row['source']}, at {row['row']}, attempts {row['attempts']})"
        out.append(one_line(f"    {row['id']} {place}: {row['reason']}"))
    if summary.units:
        out.append(
            f"{counted(len(summary.units), 'unit')} not done, with the last line of the worker:"
        )
        out += _indented([f"{u['unit']}: {u['reason']}" for u in summary.units], _UNITS_SHOWN)
    if summary.retried:
        out.append(f"--retry-errors tries {counted(summary.retried, 'document')} again")
    return "\n".join(out)
