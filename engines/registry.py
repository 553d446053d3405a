"""Names that graphs and checkpoints keep: each stands for one function or class, wherever that is defined today."""

from __future__ import annotations

import sys
from os.path import realpath
from typing import Any, Generic, TypeVar

from prefect_rlhf.placement.errors import GraphError
from prefect_rlhf.placement.modules import import_from

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name, each with the function or class that it was made from."""

    def __init__(self, noun: str) -> None:
        self._noun = noun  # as errors call an entry
        self._entries: dict[str, tuple[Any, Entry]] = {}

    def add(self, name: str, definition: Any, entry: Entry) -> Entry:
        """Register what `definition` defines. Raises GraphError when another definition has the name.

        The same definition again is fine: a notebook's cell that runs twice, a file that is loaded as two modules.
        """
        earlier = self._entries.get(name, (definition, entry))[0]
        if not _is_same(earlier, definition):
            raise GraphError(
                f"two definitions of {self._noun} {name!r}: {_place(earlier)} and {_place(definition)}; "
                "register one of them under another name"
            )
        self._entries[name] = definition, entry
        return entry

    def find(self, name: str, module: str = "", file: str = "") -> Entry:
        """Return the entry, after importing the module that defines it, from `file`, where no other import did.

        Raises GraphError when that leaves the name unknown.
        """
        if name not in self._entries and module:
            import_from(module, file)
        if name not in self._entries:
            raise GraphError(f"no {self._noun} is registered as {name!r}" + (f" in {module}" if module else ""))
        return self._entries[name][1]


def _is_same(earlier: Any, later: Any) -> bool:
    return earlier.__qualname__ == later.__qualname__ and _file(earlier) == _file(later)


def _file(definition: Any) -> str:
    module: str = definition.__module__
    return realpath(getattr(sys.modules.get(module), "__file__", None) or module)


def _place(definition: Any) -> str:
    return f"{definition.__module__}:{definition.__qualname__}"
