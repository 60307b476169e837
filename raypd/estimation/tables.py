"""The tables of an estimate, as text: `raypd estimate` prints them, and the page of a report shows
them.
"""

import math

from raypd import text
from raypd.billing.prices import is_old
from raypd.estimation.machines import GIVEN, TOKENS
from raypd.estimation.records import Estimate, Figure

Cells = list[list[str]]  # the heads, then the rows


def with_interval(figure: Figure, show: text.Show, between: str = " ") -> str:
    """1.23 [1.1-1.4], the 95% interval; [?] where the sample cannot tell it, nothing for what was
    counted or given.
    """
    if math.isinf(figure.value):
        return text.NONE
    if figure.low is None or figure.high is None:
        return f"{show(figure.value)} [?]"
    return show(figure.value) + (
        "" if figure.counted else f"{between}[{show(figure.low)}-{show(figure.high)}]"
    )


def sentences(estimate: Estimate) -> list[str]:
    """Where the speeds are from, and how they compare."""
    speeds = [*estimate.speeds, *estimate.baseline]
    lines = [f"{speed.method}: {speed.source}" for speed in speeds if speed.source != GIVEN]
    for speed in speeds:
        if speed.times_autoregressive is not None:
            gain = with_interval(speed.times_autoregressive, text.number)
            lines.append(f"{speed.name} is {gain} times as fast as autoregressive decoding")
    return lines


def speeds(estimate: Estimate) -> Cells:
    """Documents a second of one worker, and the tokens of a document."""
    all_speeds = [*estimate.speeds, *estimate.baseline]
    kinds = [
        kind for kind in TOKENS if any(kind in speed.tokens_per_document for speed in all_speeds)
    ]
    cells = [["one worker", "documents/s [95%]", *(TOKENS[kind] for kind in kinds)]]
    for speed in all_speeds:
        tokens = [speed.tokens_per_document.get(kind) for kind in kinds]
        shown = ["" if mean is None else text.number(mean.value) for mean in tokens]
        cells.append([speed.name, with_interval(speed.documents_per_second, text.number), *shown])
    return cells


def prices(estimate: Estimate) -> Cells:
    """The price of 1,000 documents on each machine, and what is saved over the corpus."""
    baseline = any(machine.baseline_usd_per_1000 for machine in estimate.machines)
    cells = [
        ["machine", "$/h", "$ per 1,000 [95%]", *(("autoregressive", "saves") if baseline else ())]
    ]
    for machine in estimate.machines:
        shown = [f"{machine.usd_per_hour:,.2f}", with_interval(machine.usd_per_1000, _per_1000)]
        if baseline:
            baseline_price = machine.baseline_usd_per_1000
            shown.append(
                text.NONE if baseline_price is None else with_interval(baseline_price, _per_1000)
            )
            shown.append(
                text.NONE if machine.saved_usd is None else text.usd(machine.saved_usd.value)
            )
        cells.append(
            [machine.title, *(shown if machine.usd_per_hour else [text.NONE] * len(shown))]
        )
    return cells


def _per_1000(usd: float) -> str:
    return f"{usd:.3f}" if usd >= 0.01 else f"{usd:.2g}"


def bills(estimate: Estimate) -> Cells:
    """Hours and whole bill by the number of nodes, on lines of their own within a cell."""
    counts = sorted({bill.nodes for machine in estimate.machines for bill in machine.bills})
    hours = "GPU-hours" if all(machine.gpu for machine in estimate.machines) else "worker-hours"
    cells = [["machine", hours, *(text.counted(count, "node") for count in counts)]]
    for machine in estimate.machines:
        shown = {bill.nodes: text.duration(3600 * bill.hours.value) for bill in machine.bills}
        if machine.usd_per_hour:
            shown = {
                b.nodes: "\n".join([shown[b.nodes], with_interval(b.usd, text.usd, "\n")])
                for b in machine.bills
            }
        total = text.number(machine.bills[0].gpu_hours.value) if machine.bills else text.NONE
        cells.append([machine.title, total, *(shown.get(count, text.NONE) for count in counts)])
    return cells


def hosted(estimate: Estimate) -> str | None:
    """What hosted batch services would ask, in one line; None where it is not known."""
    if not estimate.hosted:
        return None
    parts = []
    for service in estimate.hosted:
        usd = (
            f"{with_interval(service.usd_per_1000, _per_1000)} per 1,000, "
            f"{text.usd(service.usd.value)} in all"
        )
        dated = f"list price as of {service.date}" if service.date else "your own price"
        if is_old(service.date):
            old = f", more than six months ago: cost.hosted_prices.{service.model}"
        else:
            old = ""
        parts.append(f"{service.model} ${usd} ({dated}{old})")
    sent, written = (
        text.number(estimate.hosted_tokens[name].value) for name in ("input", "output")
    )
    return (
        f"the same as a hosted batch: {'; '.join(parts)}. Check list prices before you "
        f"rely on them. Taken: {sent} "
        f"tokens in and {written} out (the whole answer) by this model's tokenizer, one "
        "request a document, no caching"
    )
