"""An engine without weights, for tests and simulations."""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.testing import fake as fake

__getattr__ = LazyExports(
    __name__,
    {},
    modules=("fake",),
)
