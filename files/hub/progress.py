"""Shows the progress of a download: a bar on a terminal, and elsewhere an occasional line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

Say = Callable[[str], object]

LONG_BYTES = 20_000_000
"""A download of this size takes a while, so it gets a bar, and lines in the log."""
EVERY_SECONDS = 30.0
"""The time between two lines about a download if no terminal can show a bar."""
_terminal: ContextVar[TextIO | None] = ContextVar("hub_terminal", default=None)
_BYTES = "huggingface_hub.snapshot_download"
"""huggingface_hub's name of the bar that counts bytes on disk. Its other bars count the same download otherwise."""


@contextmanager
def bars_on(stream: TextIO) -> Iterator[None]:
    """Draw the body's progress bars on a stream, because standard error goes elsewhere."""
    token = _terminal.set(stream)
    try:
        yield
    finally:
        _terminal.reset(token)


def size(num_bytes: float) -> str:
    """Format a number of bytes in the units of the Hub's pages.

    >>> size(988_097_824), size(519)
    ('988 MB', '519 B')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((power for power in range(len(units)) if num_bytes < 999.5 * 1000**power), len(units) - 1)
    number = num_bytes / 1000**power
    return f"{number:.{1 if number < 99.95 and power > 1 else 0}f} {units[power]}"


class Arrived:
    """Counts the bytes of a download that have arrived, of `total`; without a bar, `say` gets an occasional line."""

    def __init__(self, what: str, total: int, say: Say) -> None:
        self.what, self.total, self.num_bytes = what, total, 0
        self._say, self._said_at = say, time.monotonic()
        self.bar: Any = None

    def close(self) -> None:
        """Leave the bar as it is, so that the next line is below it."""
        if self.bar is not None:
            self.bar.close()

    def add(self, num_bytes: float | None, *, is_drawn: bool) -> None:
        """Count bytes, which may be negative if a part starts again."""
        self.num_bytes += int(num_bytes or 0)
        if self.is_long and not is_drawn and time.monotonic() - self._said_at >= EVERY_SECONDS:
            self._said_at = time.monotonic()
            self._say(f"{self.what}: {self}")

    @property
    def is_long(self) -> bool:
        """Whether the download takes long enough to mention it."""
        return self.total >= LONG_BYTES

    def __str__(self) -> str:
        return f"{size(self.num_bytes)} of {size(self.total)}"


def bar_class(arrived: Arrived) -> Any:
    """Return the class of a download's bars for `snapshot_download`. Only a terminal gets a bar."""
    from huggingface_hub.utils.tqdm import tqdm

    stream = _terminal.get() or sys.stderr

    class Bar(tqdm):
        """A bar of huggingface_hub. Only the bar that counts bytes on disk is drawn."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("name") == _BYTES
            self._is_drawn = self._counts and arrived.is_long and stream.isatty()
            own = {"file": stream, "disable": not self._is_drawn, "desc": arrived.what, "position": 0}
            super().__init__(*args, **kwargs | own)  # type: ignore[no-untyped-call]
            if self._is_drawn:
                arrived.bar = self

        def update(self, n: float | None = 1) -> Any:
            if self._counts:
                arrived.add(n, is_drawn=self._is_drawn)
            return super().update(n)

        def set_description(self, *args: Any, **kwargs: Any) -> None:
            """Keep the name, and draw the bar: they rename it at its end."""
            self.refresh()

        set_description_str = set_description

    return Bar
