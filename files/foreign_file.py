"""Reads files that others wrote, so that no content can hang a process or end it with a traceback.

Only regular files are read, because a pipe may block and a device may have no end.
"""

import errno
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput

MOST_BYTES = 1 << 30
_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_OF_A_POINTER = 1024  # bytes: Git LFS refuses longer pointers
_PULL = "a Git LFS pointer to it: run git lfs pull"


def require_regular(path: Path) -> None:
    """Raise OSError unless a path is a regular file, or a link to a regular file."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))


def is_pointer(path: Path) -> bool:
    """Whether a file is a Git LFS pointer: a clone without Git LFS has a few lines in place of a large file."""
    if not path.is_file() or path.stat().st_size > _MOST_OF_A_POINTER:
        return False
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def refuse_pointer(field: str, path: Path) -> None:
    """Raise InvalidInput, at `field`, for a Git LFS pointer."""
    if is_pointer(path):
        raise InvalidInput(field, str(path), f"the file, not {_PULL} in {path.parent}")


def read_content(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file, at most `most` bytes. Raises OSError."""
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(most)
        if len(content) == most and file.read(1):
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    if content.startswith(_POINTER):
        raise OSError(errno.ENODATA, f"it is {_PULL}", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises ValueError, also if it is nested too deeply for the parser.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError and ValueError."""
    return parse_json(read_content(path))


def read_json_object(field: str, path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Read an object from a JSON file. Raises InvalidInput at `field`."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInput(field, str(path), f"{expected} ({why!s:.120})") from error
    if not isinstance(content, dict):
        raise InvalidInput(field, str(path), expected)
    return content


def finished_lines(field: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file that prefect-rlhf wrote; no object if the file does not exist.

    An incomplete last line is left out, because its writer was killed. Raises InvalidInput at `field`.
    """
    if not path.exists():
        return
    try:
        require_regular(path)
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                value = parse_json(line)
                if not isinstance(value, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                yield value
    except (OSError, ValueError) as error:
        raise InvalidInput(field, str(path), f"JSON lines as a run writes them ({error!s:.120})") from error
