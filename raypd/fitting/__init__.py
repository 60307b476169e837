"""`raypd fit`: from documents and a schema to trained weights and a configuration to run.

Other rooms import the names below from here; each is loaded when it is first used, because a fit
brings training and matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypd.fitting.fit import missing, run_fit
    from raypd.fitting.page import describe
    from raypd.fitting.result import FitResult

__all__ = ["FitResult", "describe", "missing", "run_fit"]

_MODULES = {
    "FitResult": "raypd.fitting.result",
    "describe": "raypd.fitting.page",
    "missing": "raypd.fitting.fit",
    "run_fit": "raypd.fitting.fit",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
