"""The command `prefect-rlhf`: run or dry-run an algorithm from a terminal, without a worker; plan; profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from prefect_rlhf.placement.errors import PlanDoesNotFit, RlhfError

COMMANDS = ("plan", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status. Mistakes get one line on stderr.

    Where no plan fits, what fills the devices and what would help follows as a table.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words and words[0] in COMMANDS else "run"
    try:
        status: int = import_module(f"prefect_rlhf.flows.commands.{command}").run(words)  # a plan needs less than a run
    except RlhfError as error:
        more = (error.report,) if isinstance(error, PlanDoesNotFit) else ()
        print(f"prefect-rlhf: {error}", *more, sep="\n", file=sys.stderr)
        return 2
    return status
