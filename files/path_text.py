"""Checks paths as people give them: text that can name a file, before it is looked for."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from prefect_rlhf.errors.errors import InvalidInput

MOST_CHARACTERS = 4096  # bytes of a whole path on Linux
MOST_OF_A_NAME = 255
QUOTES = "\"'\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb"


def printable(name: str) -> str:
    """Return a name unchanged. Raises the error that pydantic shows for a NUL, a line end or another control character.

    >>> printable("my project")
    'my project'
    """
    if not name.isprintable():
        raise PydanticCustomError("name", "a name without control characters")
    return name


def check_path(text: str) -> str:
    """Return a path unchanged. Raises the error that pydantic shows if it cannot name a file on any machine."""
    if not text.isprintable():
        raise PydanticCustomError("path", "a path without control characters")
    if len(text) > 1 and text[0] in QUOTES and text[-1] in QUOTES:  # curly ones come from a web page
        raise PydanticCustomError("path", "a path without quotation marks: {bare}", {"bare": text[1:-1]})
    if len(text.encode()) > MOST_CHARACTERS or any(len(part.encode()) > MOST_OF_A_NAME for part in text.split("/")):
        raise PydanticCustomError("path", f"a path of at most {MOST_CHARACTERS} bytes, {MOST_OF_A_NAME} in each name")
    try:
        Path(text).expanduser()
    except RuntimeError as error:
        raise PydanticCustomError("path", "a path whose home folder (~name) exists on this machine") from error
    return text


def checked_path(field: str, text: str) -> Path:
    """Return a text's path. Raises InvalidInput, at `field`, if it cannot name a file.

    >>> checked_path("plan", "plans/mine.yaml").name
    'mine.yaml'
    """
    try:
        return Path(check_path(text))
    except (PydanticCustomError, UnicodeEncodeError) as error:
        raise InvalidInput(field, text, str(error)) from error


def resolved(path: Path) -> Path:
    """Return the absolute path without links and `~`. A link that leads to itself stays, and names no file.

    >>> resolved(Path("/proc/self/../version"))
    PosixPath('/proc/version')
    """
    return Path(os.path.realpath(path.expanduser()))


def from_here(path: str) -> str:
    """Return a shorter path, relative to the working folder, if the path is inside it."""
    is_inside = "://" not in path and Path(path).is_relative_to(Path.cwd())
    return os.path.relpath(path) if is_inside else path


def _as_text(value: object) -> object:
    """Return the text of a `pathlib.Path`; any other value as it is."""
    return str(value) if isinstance(value, Path) else value


PathText = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(check_path), BeforeValidator(_as_text)]
"""The text of a path, or of a name that may stand in its place. A `pathlib.Path` becomes its text."""
