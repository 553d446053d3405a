"""The last lines of a completed run: the folders of its models, a page to read, and a command that trains further."""

import shlex
from collections.abc import Container, Mapping, Sequence

from prefect_rlhf.files.path_text import from_here

PAGE_OF_OWN = "docs/authoring.md: change the algorithm or its reward, or watch the run in Prefect's UI"
PAGE = "docs/ui.md: watch a run in Prefect's UI"


def next_steps(command: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the lines; `command` has the words of this run's command, `models` the folders by role."""
    folders = {role: from_here(folder) for role, folder in models.items()}
    paths = {f"{role}.path": folder for role, folder in folders.items()}
    words = [
        *_without(command, paths),
        *(word for name, folder in paths.items() for word in ("-p", f"{name}={folder}")),
    ]
    is_own = any(word.partition(":")[0].endswith(".py") for word in command)
    return [
        *(f"model: {folder}" for folder in folders.values()),
        f"read:  {PAGE_OF_OWN if is_own else PAGE}",
        f"next:  {shlex.join(words)}",
    ]


def _without(command: Sequence[str], names: Container[str]) -> list[str]:
    """Return a command without its values of the parameters `names`, which get others."""
    old = [place for place, word in enumerate(command) if place and command[place - 1] == "-p" and _name(word) in names]
    return [word for place, word in enumerate(command) if not {place, place + 1}.intersection(old)]


def _name(assignment: str) -> str:
    return assignment.partition("=")[0]
