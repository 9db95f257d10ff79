"""Finds the classes of a plug-in package and gives Hydra their settings, so that one file is a whole plug-in.

The files import no torch at the top: their settings are part of the schema, which is checked before torch is loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable
from typing import TypeVar

from hydra.core.config_store import ConfigStore

T = TypeVar("T")


def snake(name: str) -> str:
    """BackwardRank -> backward_rank."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def discover(package: str, path: Iterable[str], base: type[T], group: str) -> dict[str, type[T]]:
    """Every subclass of `base` in the package's modules by its config name, stored as `<group>=<name>` for Hydra."""
    found: dict[str, type[T]] = {}
    for info in sorted(pkgutil.iter_modules(path), key=lambda i: i.name):
        module = importlib.import_module(f"{package}.{info.name}")
        for cls in vars(module).values():
            if (
                isinstance(cls, type)
                and issubclass(cls, base)
                and cls is not base
                and cls.__module__ == module.__name__
            ):
                name = snake(cls.__name__)
                found[name] = cls
                ConfigStore.instance().store(group=group, name=name, node=cls, package=f"{group}.{name}")
    return found
