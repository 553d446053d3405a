"""The command `prefect-rlhf`: its sub-commands, and what they say of mistakes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from prefect_rlhf.flows.training.installed_engines import ENGINES, missing_engine
from prefect_rlhf.placement.errors import PlanDoesNotFit, RlhfError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "train with an algorithm on devices of this machine; --dry-run checks it and takes none",
        "plan": "which plan, how fast, how full, on a cluster that need not be there",
        "profile": "measure a model's layers on this machine's devices, for plans and predictions",
        "graph": "draw what an algorithm's calls read and wait for",
        "init": "write what you deploy from into a folder: prefect.yaml, a flow to start from, its parameters",
    }
)
HELP = (
    "usage: prefect-rlhf COMMAND ...\n\nRLHF training as a Prefect plugin.\n\n"
    + "\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())
    + "\n\nprefect-rlhf ppo is short for prefect-rlhf run ppo; prefect-rlhf COMMAND --help says what each takes."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status. Mistakes get one line on stderr.

    Where no plan fits, what fills the devices and what would help follows as a table.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h"):
        print(HELP, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    command = words.pop(0) if words[0] in COMMANDS else "run"
    try:
        status: int = import_module(f"prefect_rlhf.flows.commands.{command}").run(words)  # a plan needs less than a run
    except RlhfError as error:
        more = (error.report,) if isinstance(error, PlanDoesNotFit) else ()
        print(f"prefect-rlhf: {error}", *more, sep="\n", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        engine = (error.name or "").partition(".")[0]
        if engine not in ENGINES:
            raise
        print(f"prefect-rlhf: {missing_engine(engine)}", file=sys.stderr)
        return 2
    return status
