"""Rows that reasoning-gym generates: a task by name, `reasoning_gym:chain_sum?size=500&seed=42&min_terms=2`."""

from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.files.foreign_file import parse_json
from prefect_rlhf.tasks.data.stored.columns import PlainColumn

SCHEME = "reasoning_gym:"
MOST_ROWS = 1_000_000
DEFAULTS = {"size": 500, "seed": 0}


def is_generated(path: str) -> bool:
    """Return whether a dataset's path names a task rather than files."""
    return path.startswith(SCHEME)


def generate_rows(field: str, path: str) -> tuple[int, dict[str, PlainColumn]]:
    """Return the number of rows and the columns prompt, question, answer, metadata and entry (the whole generated row).

    `entry` is the argument of the task's `score_answer`. The same path generates the same rows. Raises InvalidInput for
    an unknown task or option, and if reasoning-gym is not installed.
    """
    field = f"{field}.path"
    name, options = _parsed(field, path)
    task = _task(field, path, name, options)
    with refusing(Exception, field, path, f"options that work for {name}", most=160):  # a task's own code raises any
        entries = [task[row] for row in range(options["size"])]
    columns = {key: PlainColumn([entry[key] for entry in entries]) for key in ("question", "answer", "metadata")}
    return len(entries), {"prompt": columns["question"], **columns, "entry": PlainColumn(entries)}


def _parsed(field: str, path: str) -> tuple[str, dict[str, Any]]:
    name, _, query = path.removeprefix(SCHEME).partition("?")
    with refusing(ValueError, field, path, f"{SCHEME}TASK?NAME=VALUE&NAME=VALUE", most=80):
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    twice = next((key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1), None)
    if twice:
        raise InvalidInput(field, path, f"each option once; {twice} occurs twice")
    options = DEFAULTS | {key: _value(text) for key, text in pairs}
    for key, least, most in (("size", 1, MOST_ROWS), ("seed", 0, 2**63)):
        if type(options[key]) is not int or not least <= options[key] <= most:
            raise InvalidInput(field, path, f"a {key} that is a whole number from {least} to {most}")
    return name.strip(), options


def _value(text: str) -> Any:
    """Return the value of an option's text in JSON, else the text itself."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _task(field: str, path: str, name: str, options: dict[str, Any]) -> Any:
    with refusing(ImportError, field, path, f"reasoning-gym on this machine: {install_command('rewards')}", most=80):
        package = import_module("reasoning_gym")
        known = import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        near = get_close_matches(name, known, n=4) or sorted(known)[:4]
        raise InvalidInput(field, path, f"one of reasoning-gym's {len(known)} tasks, such as {', '.join(near)}")
    takes = [option.name for option in fields(known[name][1])]
    unknown = [option for option in options if option not in takes]
    if unknown:
        raise InvalidInput(field, path, f"options of {name}: {', '.join(takes)}; not {unknown[0]}")
    with refusing(Exception, field, path, f"options that {name} accepts", most=160):  # its checks are asserts, too
        return package.create_dataset(name, **options)
