"""The tables of an estimate as text, for `raypd estimate` and for the page of a report."""

import math
from collections.abc import Iterable

from raypd import text
from raypd.billing import is_old
from raypd.estimation.machines import GIVEN, TOKENS
from raypd.estimation.records import Estimate, Figure, HostedEstimate, MachineEstimate

# The headings, then the rows.
Cells = list[list[str]]


def with_interval(figure: Figure, show: text.Show, separator: str = " ") -> str:
    """Format a figure with its 95% interval, such as 1.23 [1.1-1.4].

    The interval is [?] if the sample does not determine it. A figure that was counted or given has
    none.
    """
    if math.isinf(figure.value):
        return text.NONE
    value = show(figure.value)
    if figure.low is None or figure.high is None:
        return f"{value} [?]"
    if figure.counted:
        return value
    return f"{value}{separator}[{show(figure.low)}-{show(figure.high)}]"


def heading(name: str, figures: Iterable[Figure | None]) -> str:
    """Return the heading of a column, with [95%] if any of its figures has an interval."""
    for figure in figures:
        if figure is not None and figure.low is not None and not figure.counted:
            return f"{name} [95%]"
    return name


def sentences(estimate: Estimate) -> list[str]:
    """Return sentences on where the speeds come from and how they compare."""
    speeds = [*estimate.speeds, *estimate.baseline]
    lines = [f"{speed.method}: {speed.source}" for speed in speeds if speed.source != GIVEN]
    for speed in speeds:
        if speed.times_autoregressive is not None:
            gain = with_interval(speed.times_autoregressive, text.number)
            lines.append(f"{speed.name} is {gain} times as fast as autoregressive decoding")
    return lines


def whole_bill(estimate: Estimate) -> str:
    """Return a sentence on what the whole bill includes besides the decoding."""
    if estimate.startup_seconds is None:
        return "With idle time and head node, without start-up, which was not measured."
    return "With start-up, idle time and head node."


def speeds(estimate: Estimate) -> Cells:
    """Return documents per second of one worker, and tokens per document."""
    all_speeds = [*estimate.speeds, *estimate.baseline]
    measured_kinds = {kind for speed in all_speeds for kind in speed.tokens_per_document}
    kinds = [kind for kind in TOKENS if kind in measured_kinds]
    rates = heading("documents/s", [speed.documents_per_second for speed in all_speeds])
    headings = ["one worker", rates, *(TOKENS[kind] for kind in kinds)]
    rows = []
    for speed in all_speeds:
        row = [speed.name, with_interval(speed.documents_per_second, text.number)]
        for kind in kinds:
            mean = speed.tokens_per_document.get(kind)
            row.append("" if mean is None else text.number(mean.value))
        rows.append(row)
    return [headings, *rows]


def prices(estimate: Estimate) -> Cells:
    """Return the price of 1,000 documents on each machine, and the savings over the corpus."""
    has_baseline = any(machine.baseline_usd_per_1000 for machine in estimate.machines)
    priced = [machine for machine in estimate.machines if machine.usd_per_hour]
    per_1000 = heading("$ per 1,000", [machine.usd_per_1000 for machine in priced])
    headings = ["machine", "$/h", per_1000]
    if has_baseline:
        headings += ["autoregressive", "saves in all"]
    rows = [[machine.title, *_price_cells(machine, has_baseline)] for machine in estimate.machines]
    return [headings, *rows]


def _price_cells(machine: MachineEstimate, has_baseline: bool) -> list[str]:
    """Return the prices of a machine, one per column."""
    cells = [f"{machine.usd_per_hour:,.2f}", with_interval(machine.usd_per_1000, _per_1000)]
    if has_baseline:
        baseline_cell = text.NONE
        if machine.baseline_usd_per_1000 is not None:
            baseline_cell = with_interval(machine.baseline_usd_per_1000, _per_1000)
        saved_cell = text.NONE
        if machine.saved_usd is not None:
            saved_cell = text.usd(machine.saved_usd.value)
        cells += [baseline_cell, saved_cell]
    if not machine.usd_per_hour:
        return [text.NONE] * len(cells)
    return cells


def _per_1000(usd: float) -> str:
    if usd >= 0.01:
        return f"{usd:.3f}"
    return f"{usd:.2g}"


def bills(estimate: Estimate) -> Cells:
    """Return hours and bill by the number of nodes; the bill is on a second line of the cell."""
    machines = estimate.machines
    node_counts = sorted({bill.nodes for machine in machines for bill in machine.bills})
    hours_heading = "worker-hours"
    if all(machine.gpu for machine in machines):
        hours_heading = "GPU-hours"
    headings = ["machine", hours_heading, *(text.counted(nodes, "node") for nodes in node_counts)]
    rows = []
    for machine in machines:
        cells = {}
        for bill in machine.bills:
            cell = text.duration(3600 * bill.hours.value)
            if machine.usd_per_hour:
                cell = "\n".join([cell, with_interval(bill.usd, text.usd, "\n")])
            cells[bill.nodes] = cell
        total = text.NONE
        if machine.bills:
            total = text.number(machine.bills[0].gpu_hours.value)
        by_nodes = [cells.get(nodes, text.NONE) for nodes in node_counts]
        rows.append([machine.title, total, *by_nodes])
    return [headings, *rows]


def hosted(estimate: Estimate) -> str | None:
    """Return the price of hosted batch services in one line; None if it is not known."""
    if not estimate.hosted:
        return None
    services = "; ".join(_hosted_price(service) for service in estimate.hosted)
    sent = text.number(estimate.hosted_tokens["input"].value)
    written = text.number(estimate.hosted_tokens["output"].value)
    return (
        f"the same as a hosted batch: {services}. Check list prices before you rely on them. "
        f"Assumed: {sent} tokens in and {written} out (the whole answer) by this model's "
        "tokenizer, one request per document, no caching"
    )


def _hosted_price(service: HostedEstimate) -> str:
    """Return the price of one service in words, with the date of its price."""
    dated = "your own price"
    if service.date:
        dated = f"list price as of {service.date}"
    if is_old(service.date):
        dated += f", more than six months ago: cost.hosted_prices.{service.model}"
    return (
        f"{service.model} ${with_interval(service.usd_per_1000, _per_1000)} per 1,000, "
        f"{text.usd(service.usd.value)} in all ({dated})"
    )
