"""The command `prefect-rlhf runs`: the runs below a folder as a table."""

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, print_error
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFlags:
    """The flags of `runs`."""

    folder: Annotated[str, Parameter(help="The folder that has the runs, your output_dir; default: runs.")] = field(
        default="runs", kw_only=False
    )


def runs(flags: Annotated[RunsFlags, ALL_AT_ONCE] = RunsFlags()) -> int:
    """List the runs below a folder: state, steps, parameters that differ, metrics.

    prefect_rlhf.runs(FOLDER) returns the same table in Python.
    """
    check_prefect_settings()
    from prefect_rlhf.flows.algorithm.run_table import Runs
    from prefect_rlhf.flows.algorithm.run_table import runs as find_runs  # imported here: a wrong flag needs no Prefect

    found = find_runs(flags.folder)
    print(Runs(found))
    for line in found.skipped:
        print_error(f"skipped: {line}")
    return 0
