"""What a run costs: the meter of a worker, the book and the bill of a session, budget and energy.

Other rooms import the names below from here, and the modules `bill`, `book`, `budget`, `prices` and
`prices_aws`. The prices are not imported here, because only the driver needs their tables.
"""

from raypd.billing import bill, book, budget
from raypd.billing.bill import MICRO, Bill, NodeTime
from raypd.billing.book import Book, WorkersBill, models_of, token_usd, usage_usd
from raypd.billing.budget import BudgetReached
from raypd.billing.meter import Meter, WorkerTime, added

__all__ = [
    "MICRO",
    "Bill",
    "Book",
    "BudgetReached",
    "Meter",
    "NodeTime",
    "WorkerTime",
    "WorkersBill",
    "added",
    "bill",
    "book",
    "budget",
    "models_of",
    "token_usd",
    "usage_usd",
]
