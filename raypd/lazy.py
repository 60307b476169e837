"""Exports of a room that are imported when they are first used (PEP 562).

The `__init__` of a room names what other rooms may import from it. Most rooms import torch, Ray or
matplotlib, so importing everything there would make every command pay for all of them.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


class LazyExports:
    """The `__getattr__` of a package that imports its exports on demand."""

    def __init__(
        self, package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
    ) -> None:
        """Declare what a package exports.

        Args:
            package: The package's `__name__`.
            names: Exported names, by the module of the package that defines them.
            modules: Modules that the package exports as a whole.
        """
        self.package = package
        self.modules = frozenset(modules)
        self.module_of = {name: module for module, exported in names.items() for name in exported}

    @property
    def names(self) -> frozenset[str]:
        """Every exported name."""
        return self.modules | self.module_of.keys()

    def __call__(self, name: str) -> Any:
        if name in self.modules:
            return import_module(f"{self.package}.{name}")
        module = self.module_of.get(name)
        if module is None:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.package}.{module}"), name)
