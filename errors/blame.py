"""Where in your own code an error came from."""

import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in {
        str(_PACKAGE),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    }
)
"""Folders with code that is not yours: this package, Python and installed packages."""


def described(error: BaseException) -> str:
    r"""Describe an error in a line: its type, the first line of its message, and its place in your own file.

    If a settings class refuses its values, the line names the first wrong field.

    >>> described(MemoryError("no room\nfor it"))
    'MemoryError: no room'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:1]
    pydantic_core = sys.modules.get("pydantic_core")  # an interpreter of plays may lack it
    if pydantic_core is not None and isinstance(error, pydantic_core.ValidationError):
        first = error.errors()[0]
        lines = [".".join(map(str, (error.title, *first["loc"]))), first["msg"]]
    place = own_place(error)
    return ": ".join([type(error).__name__, *lines]) + (f" ({place})" if place else "")


def own_place(error: BaseException) -> str:
    """Return `file:line in function` of the innermost frame in your own file; empty without such a frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def is_own(file: str) -> bool:
    """Whether a file is your own: neither in an installed package nor in this package."""
    return not file.startswith(("<", *_FOREIGN))
