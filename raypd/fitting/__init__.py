"""`raypd fit`: from documents and a schema to trained weights and a configuration to run.

Other rooms import the names below from here; each is loaded when it is first used, because a fit
brings training and matplotlib.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.fitting.fit import missing as missing, run_fit as run_fit
    from raypd.fitting.page import describe as describe
    from raypd.fitting.result import FitResult as FitResult

__getattr__ = LazyExports(
    __name__,
    {
        "fit": ("missing", "run_fit"),
        "page": ("describe",),
        "result": ("FitResult",),
    },
)
