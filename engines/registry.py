"""Names in graphs and checkpoints: each refers to a function or class, which may have moved to another module."""

import sys
from os.path import realpath
from typing import Any, Generic, TypeVar

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.files.modules import import_from

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name, each with its function or class."""

    def __init__(self, noun: str) -> None:
        self._noun = noun  # for an entry, in errors
        self._entries: dict[str, tuple[Any, Entry]] = {}

    def add(self, name: str, definition: Any, entry: Entry) -> Entry:
        """Register `definition`'s entry. Raises GraphError if another definition has the name.

        The same definition may be registered again, for example by a notebook's cell that runs twice, or a file that is
        loaded as two modules.
        """
        earlier = self._entries.get(name, (definition, entry))[0]
        if not _is_same(earlier, definition):
            raise GraphError(
                f"two definitions of {self._noun} {name!r}: {_place(earlier)} and {_place(definition)}; "
                "register either under another name"
            )
        self._entries[name] = definition, entry
        return entry

    def find(self, name: str, module: str = "", file: str = "") -> Entry:
        """Return the entry; if it is missing, first import the module that defines it, from `file` if necessary.

        Raises GraphError if the name is still unknown.
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
