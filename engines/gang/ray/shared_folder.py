"""Checks that all machines of a run share a folder or a store's path: each writes a marker, and each reads all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import CACHE_VARIABLE, remote_path
from prefect_rlhf.files.storage.answers import explained
from prefect_rlhf.files.storage.stores import open_store

FIELD = "output_dir"  # it contains all files of a run


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder that every machine of a run must be able to write to; `url` is the remote path that it mirrors, if any.

    A marker is a file that contains its own name. If a write or a read fails, the methods return the reason, and the
    caller raises the error.
    """

    folder: Path
    url: str | None

    @classmethod
    def of(cls, folder: Path) -> SharedFolder:
        """Return this machine's mirror of a folder with a remote path, or the folder itself."""
        return cls(folder, remote_path(folder))

    @property
    def shown(self) -> str:
        """The path as the user gave it."""
        return self.url or str(self.folder)

    def write(self, name: str) -> str | None:
        """Write a marker to the store or into an existing folder; return the reason if that fails, else None."""
        if remote_path(self.folder) != self.url:
            mirrored = remote_path(self.folder)
            return f"its home or {CACHE_VARIABLE} differs: {self.folder} mirrors {mirrored} there"
        return _reason(self._write, name)

    def unread(self, names: Sequence[str]) -> tuple[str, str] | None:
        """Return the first marker that this machine cannot read, and the reason; None if it can read all."""
        for name in names:
            if (reason := _reason(self._check, name)) is not None:
                return name, reason
        return None

    def remove(self, names: Sequence[str]) -> None:
        """Remove existing markers; ignore errors."""
        for name in names:
            with suppress(OSError, InvalidInput):
                self._remove(name)

    def _write(self, name: str) -> None:
        if self.url is None:
            (self.folder / name).write_text(name)
            return
        store = open_store(self.url, FIELD)
        with explained(self.url, FIELD), store.files.open_output_stream(f"{store.path}/{name}") as out:
            out.write(name.encode())

    def _check(self, name: str) -> None:
        """Raise InvalidInput or OSError unless a marker can be read."""
        if self.url is None:
            found = (self.folder / name).read_text()
        else:
            store = open_store(self.url, FIELD)
            with explained(self.url, FIELD), store.files.open_input_stream(f"{store.path}/{name}") as source:
                found = source.read().decode()
        if found != name:
            raise InvalidInput(name, found, "its name as its content")

    def _remove(self, name: str) -> None:
        if self.url is None:
            (self.folder / name).unlink(missing_ok=True)
            return
        store = open_store(self.url, FIELD)
        with explained(self.url, FIELD):
            store.files.delete_file(f"{store.path}/{name}")


def _reason(attempt: Callable[[str], None], name: str) -> str | None:
    """Return the reason if an operation on a marker failed, else None."""
    try:
        attempt(name)
    except InvalidInput as error:
        return f"expected {error.expected}"
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
