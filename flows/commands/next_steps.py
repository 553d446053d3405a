"""The last lines of a completed run: its models, and how to go on with them."""

import os
import shlex
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from prefect_rlhf.files.model_folder import MERGED, generates, is_adapter
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.flows.commands.flags import PROGRAM

PAGE = "docs/use_the_model.md"
ITS_TOPICS = "evaluate it, serve it, upload it, resume at another rate"


def next_steps(command: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the lines. `command` is the command of a run like this one; `models` maps each trained role to its folder.

    Empty if no model was trained.
    """
    if not models:
        return []
    folders = {role: from_here(folder) for role, folder in models.items()}
    here = {role: local_path(folder, role) for role, folder in models.items()}
    paths = {f"{role}.{'adapter.' if is_adapter(here[role]) else ''}path": folders[role] for role in models}
    whole = {role: MERGED if is_adapter(folder) else "" for role, folder in here.items()}
    words = [
        *_without(command, paths),
        *(word for name, folder in paths.items() for word in ("-p", f"{name}={folder}")),
    ]
    talks = [folders[role] + end for role, end in whole.items() if generates(Path(f"{here[role]}{end}"))]
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
    """Return the page's path if the working folder is in a clone, else the page's name."""
    here = Path.cwd()
    around = (folder / PAGE for folder in (here, *here.parents))
    found = next((page for page in around if page.is_file()), None)
    return f'"Use the trained model" ({PAGE} of {PROGRAM})' if found is None else os.path.relpath(found)
