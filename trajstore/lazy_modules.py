"""Public modules of a package that are imported at their first use, and what ``dir`` of the package lists."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any


def lazy_modules(package: str, names: Collection[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package whose public names are these modules."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return get, lambda: sorted(names)
