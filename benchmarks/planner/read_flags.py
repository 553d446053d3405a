"""The flags that a command line would give to a command, without a call of the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefect_rlhf.flows.commands.flags import Flags, app_of


def read_flags(command: Callable[[Flags], int], words: Sequence[str]) -> Flags:
    """Return the flags that a command would be called with. Raises CycloptsError for a wrong flag."""
    _, bound, _ = app_of(command).parse_args(words)
    flags: Flags = bound.arguments["flags"]
    return flags
