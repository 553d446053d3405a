"""Checks Prefect's settings: its own import error names neither the variable nor the file."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.right_value import right_value

if TYPE_CHECKING:
    from pydantic import ValidationError

MODELS = "prefect.settings.models."
TABLES = ("prefect.toml", "pyproject.toml")


def check_prefect_settings() -> None:
    """Import Prefect. Raises InvalidInput naming the variable or the file if a setting is wrong."""
    said = StringIO()
    try:
        with redirect_stderr(said):  # it prints an error and goes on; the next import raises it
            from prefect.settings import get_current_settings

            get_current_settings()
    except ValueError as error:
        wrong = _wrong_file(error) or _wrong_value(error)
        if wrong is None:
            raise
        raise wrong from error
    sys.stderr.write(said.getvalue())


def _wrong_file(error: ValueError) -> InvalidInput | None:
    """Return the mistake if a file that Prefect reads is not TOML."""
    if not isinstance(error, tomllib.TOMLDecodeError) and "invalid TOML" not in str(error):
        return None
    return next(_broken_files(), None)


def _wrong_value(error: ValueError) -> InvalidInput | None:
    """Return the mistake if Prefect refuses the value of a setting."""
    if unread := re.match('error parsing value for field "(.*?)"', str(error)):
        field = unread[1].upper()
        named = sorted(name for name in os.environ if name.startswith("PREFECT_") and name.endswith(field))
        variable = named[0] if named else f"PREFECT_..._{field}"
        return InvalidInput(variable, os.environ.get(variable), "JSON, such as {}" + _place_of(variable))
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return None
    first = error.errors()[0]
    if variable := _variable(error, first["loc"]):
        return InvalidInput(variable, first["input"], right_value(first) + _place_of(variable))
    stated = [name for name in os.environ if name.startswith("PREFECT_")]
    return InvalidInput("Prefect's settings", ", ".join(stated) or error.title, f"other values: {right_value(first)}")


def _variable(error: ValidationError, place: tuple[int | str, ...]) -> str:
    loaded = [module for name, module in [*sys.modules.items()] if name.startswith(MODELS)]
    settings = next((found for module in loaded if (found := getattr(module, error.title, None))), None)
    return f"{settings.model_config['env_prefix']}{'_'.join(map(str, place))}".upper() if settings and place else ""


def _place_of(variable: str) -> str:
    """Return which file states a setting, as the end of a line; empty for a variable of the environment."""
    if variable in os.environ:
        return ""
    field = variable.lower().rpartition("_")[2]  # in a TOML file a setting has a shorter name
    texts = {str(file): file.read_text(errors="replace") for file in _files()}
    stated = next((name for name, text in texts.items() if variable in text), None)
    stated = stated or next((name for name, text in texts.items() if name in TABLES and field in text), None)
    return f"; it is stated in {stated}" if stated else ""


def _files() -> list[Path]:
    """Return the files that Prefect reads its settings from."""
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    return [file for file in (profiles, *map(Path, (*TABLES, ".env"))) if file.is_file()]


def _broken_files() -> Iterator[InvalidInput]:
    """Yield the mistake of each file of Prefect's that is not TOML."""
    for file in _files():
        try:
            tomllib.loads(file.read_text(errors="replace") if file.suffix == ".toml" else "")
        except tomllib.TOMLDecodeError as error:
            yield InvalidInput("Prefect's settings", str(file), f"TOML ({error}); correct or remove the file")
