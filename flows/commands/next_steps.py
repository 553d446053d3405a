"""The last lines of a completed run: its models, and commands and a page for their use."""

import os
import shlex
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from prefect_rlhf.files.model_folder import generates
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.flows.commands.flags import PROGRAM

PAGE = "docs/use_the_model.md"
ITS_TOPICS = "evaluate it, serve it, upload it, resume at another rate"


def next_steps(command: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the lines; `command` has the words of a run like this one, `models` the folders of trained models by role.

    Without a trained model there is no line.
    """
    if not models:
        return []
    folders = {role: from_here(folder) for role, folder in models.items()}
    paths = {f"{role}.path": folder for role, folder in folders.items()}
    words = [
        *_without(command, paths),
        *(word for name, folder in paths.items() for word in ("-p", f"{name}={folder}")),
    ]
    talks = [folders[role] for role, folder in models.items() if generates(local_path(folder, role))]
    return [
        *(f"model: {folder}" for folder in folders.values()),
        *(f"chat:  {shlex.join([PROGRAM, 'chat', folder])}" for folder in talks[:1]),
        f"train: {shlex.join(words)}",
        f"read:  {page_from_here()}: {ITS_TOPICS}",
    ]


def _without(command: Sequence[str], names: Container[str]) -> list[str]:
    """Return a command without its values of the parameters `names`, which get others."""
    old = [place for place, word in enumerate(command) if place and command[place - 1] == "-p" and _name(word) in names]
    return [word for place, word in enumerate(command) if not {place, place + 1}.intersection(old)]


def _name(assignment: str) -> str:
    return assignment.partition("=")[0]


def page_from_here() -> str:
    """Return the path of the page in a clone around the working folder, or the name of the page without a clone."""
    here = Path.cwd()
    around = (folder / PAGE for folder in (here, *here.parents))
    found = next((page for page in around if page.is_file()), None)
    return f'"Use the trained model" ({PAGE} of {PROGRAM})' if found is None else os.path.relpath(found)
