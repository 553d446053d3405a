"""Formats values for messages: on a single line, and short enough to read, however large they are."""

from collections.abc import Callable
from reprlib import Repr

MOST_CHARACTERS = 200  # of a value
MOST_OF_A_LINE = 1000  # characters of a whole line
MOST_OF_A_NAME = 120


class _Short(Repr):
    """Like reprlib, but generous, and also for integers that Python refuses to write out."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxset = 4, 8, 12, 12, 12
        self.maxstring = self.maxother = self.maxlong = MOST_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits; of a number with thousands of them, how large it is."""
        return (
            super().repr_int(x, level) if x.bit_length() < 4 * MOST_CHARACTERS else f"2**{x.bit_length() - 1} or more"
        )


_SHORT = _Short()


def in_short(value: object, write: Callable[[object], str] | None = None) -> str:
    """Format a value with `write`, without the middle if it is long.

    >>> in_short("plan"), len(in_short("x" * 100_000)), in_short("a.b", str)
    ("'plan'", 200, 'a.b')
    """
    text = (write or _SHORT.repr)(value)
    half = (MOST_CHARACTERS - 3) // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[: half + 1]}...{text[-half:]}"


def one_line(text: str) -> str:
    """Return the text without line breaks and other control characters, cut if it is very long.

    >>> one_line("two" + chr(10) + "lines")
    'two lines'
    """
    plain = "".join(c if c.isprintable() else " " for c in text[: 4 * MOST_OF_A_LINE])
    return plain if len(plain) <= MOST_OF_A_LINE else f"{plain[: MOST_OF_A_LINE - 3]}..."


def clean_name(text: str) -> str:
    """Return a name written by others for display: without control characters, and not long.

    >>> clean_name("amber" + chr(27) + "[2J" + chr(10) + "-fox")
    'amber [2J -fox'
    """
    return " ".join(one_line(text).split())[:MOST_OF_A_NAME]
