"""What a run costs: the meter of a worker, the book and the bill of a session, budget and energy.

Other rooms import the names below from here, and the modules `bill`, `book`, `budget`, `prices` and
`prices_aws`. The prices are not imported here, because only the driver needs their tables.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.billing import (
        bill as bill,
        book as book,
        budget as budget,
        energy as energy,
        prices as prices,
        prices_aws as prices_aws,
    )
    from raypd.billing.bill import MICRO as MICRO, Bill as Bill, NodeTime as NodeTime
    from raypd.billing.book import (
        WorkersBill as WorkersBill,
        models_of as models_of,
        token_usd as token_usd,
    )
    from raypd.billing.budget import (
        RESERVE_SECONDS as RESERVE_SECONDS,
        BudgetReached as BudgetReached,
    )
    from raypd.billing.meter import (
        Meter as Meter,
        Receipt as Receipt,
        WorkerTime as WorkerTime,
        added as added,
    )
    from raypd.billing.prices import (
        INSTANCES as INSTANCES,
        HostedPrice as HostedPrice,
        hosted as hosted,
        is_old as is_old,
    )

__getattr__ = LazyExports(
    __name__,
    {
        "bill": ("Bill", "MICRO", "NodeTime"),
        "book": ("WorkersBill", "models_of", "token_usd"),
        "budget": ("BudgetReached", "RESERVE_SECONDS"),
        "meter": ("Meter", "Receipt", "WorkerTime", "added"),
        "prices": ("HostedPrice", "INSTANCES", "hosted", "is_old"),
    },
    modules=("bill", "book", "budget", "energy", "prices", "prices_aws"),
)
