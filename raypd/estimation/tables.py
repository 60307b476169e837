"""The tables of an estimate, as text: `raypd estimate` prints them, and the page of a report shows them.

Brackets hold the 95% interval. The first column is the name of the row.
"""

from __future__ import annotations

import math

from raypd.estimation.machines import GIVEN, TOKENS
from raypd.run import text
from raypd.run.records import Estimate, Figure

Cells = list[list[str]]  # the heads, then the rows


def with_interval(figure: Figure, show: text.Show, between: str = " ") -> str:
    """1.23 [1.1-1.4]; [?] where the sample cannot tell it, and nothing for what was counted or given."""
    if math.isinf(figure.value):
        return text.NONE
    if figure.low is None or figure.high is None:
        return f"{show(figure.value)} [?]"
    return show(figure.value) + ("" if figure.counted else f"{between}[{show(figure.low)}-{show(figure.high)}]")


def sentences(found: Estimate) -> list[str]:
    """Where the speeds are from, and how they compare."""
    lines = [f"{one.method}: {one.source}" for one in [*found.speeds, *found.baseline] if one.source != GIVEN]
    for one in found.speeds:
        if one.times_autoregressive is not None:
            gain = with_interval(one.times_autoregressive, text.number)
            lines.append(f"{one.name} is {gain} times as fast as autoregressive decoding")
    return lines


def speeds(found: Estimate) -> Cells:
    """Documents a second of one worker, and the tokens of a document."""
    all_speeds = [*found.speeds, *found.baseline]
    kinds = [kind for kind in TOKENS if any(kind in speed.tokens_per_document for speed in all_speeds)]
    cells = [["one worker", "documents/s [95%]", *(TOKENS[kind] for kind in kinds)]]
    for speed in all_speeds:
        tokens = [speed.tokens_per_document.get(kind) for kind in kinds]
        shown = ["" if mean is None else text.number(mean.value) for mean in tokens]
        cells.append([speed.name, with_interval(speed.documents_per_second, text.number), *shown])
    return cells


def prices(found: Estimate) -> Cells:
    """The price of 1,000 documents on each machine, and what is saved over the corpus."""
    baseline = any(one.baseline_usd_per_1000 for one in found.machines)
    cells = [["machine", "$/h", "$ per 1,000 [95%]", *(("autoregressive", "saves") if baseline else ())]]
    for one in found.machines:
        own = [f"{one.usd_per_hour:,.2f}", with_interval(one.usd_per_1000, _per_1000)]
        if baseline:
            theirs = one.baseline_usd_per_1000
            own.append(text.NONE if theirs is None else with_interval(theirs, _per_1000))
            own.append(text.NONE if one.saved_usd is None else text.usd(one.saved_usd.value))
        cells.append([one.title, *(own if one.usd_per_hour else [text.NONE] * len(own))])
    return cells


def _per_1000(usd: float) -> str:
    """The price of 1,000 documents, in which a tenth of a cent counts."""
    return f"{usd:.3f}" if usd >= 0.01 else f"{usd:.2g}"


def bills(found: Estimate) -> Cells:
    """Hours and whole bill by the number of nodes, on lines of their own within a cell."""
    counts = sorted({bill.nodes for one in found.machines for bill in one.bills})
    hours = "GPU-hours" if all(one.gpu for one in found.machines) else "worker-hours"
    cells = [["machine", hours, *(text.counted(count, "node") for count in counts)]]
    for one in found.machines:
        shown = {bill.nodes: text.duration(3600 * bill.hours.value) for bill in one.bills}
        if one.usd_per_hour:
            shown = {b.nodes: "\n".join([shown[b.nodes], with_interval(b.usd, text.usd, "\n")]) for b in one.bills}
        total = text.number(one.bills[0].gpu_hours.value) if one.bills else text.NONE
        cells.append([one.title, total, *(shown.get(count, text.NONE) for count in counts)])
    return cells


def hosted(found: Estimate) -> str | None:
    """What hosted batch services would ask, in one line; None where it is not known."""
    if not found.hosted:
        return None
    parts = []
    for one in found.hosted:
        usd = f"{with_interval(one.usd_per_1000, _per_1000)} per 1,000, {text.usd(one.usd.value)} in all"
        parts.append(f"{one.model} ${usd} ({f'list price as of {one.date}' if one.date else 'your own price'})")
    sent, written = (text.number(found.hosted_tokens[name].value) for name in ("input", "output"))
    return (
        f"the same as a hosted batch: {'; '.join(parts)}. Check list prices before you rely on them. Taken: {sent} "
        f"tokens in and {written} out (the whole answer) by this model's tokenizer, one request a document, no caching"
    )


def not_measured(found: Estimate) -> str | None:
    """The GPUs that get no figure, in words; None without any."""
    gpus = []
    for gpu, types in found.not_measured.items():
        families = dict.fromkeys(name.partition(".")[0] for name in types)
        gpus.append(f"{gpu} ({', '.join(f'{family}.*' for family in families)})")
    return f"not measured on these GPUs, so no figure: {', '.join(gpus)}" if gpus else None
