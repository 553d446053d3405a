"""The command `prefect-rlhf run`: run or dry-run an algorithm on devices of this machine, from a terminal."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.algorithm_places import ALGORITHMS, find_place
from prefect_rlhf.flows.commands.flags import (
    ALL_AT_ONCE,
    PROGRAM,
    Assignments,
    ParametersFile,
    print_error,
    read_parameters,
    whole_number,
)
from prefect_rlhf.flows.forms.options import MOST_RESTARTS
from prefect_rlhf.placement.errors import RunStopped
from prefect_rlhf.placement.mesh import MOST_DEVICES

STATUS_OF_SIGNAL = 128  # and the signal's number, as a shell says it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The flags of `run`."""

    algorithm: Annotated[str, Parameter(help=f"{', '.join(ALGORITHMS)}, or file.py:function or module:function.")] = (
        field(kw_only=False)
    )
    parameters: ParametersFile = None
    param: Assignments = ()
    devices: Annotated[
        int | None,
        whole_number(1, MOST_DEVICES),
        Parameter(help="Devices of this machine to lease; 1 if it is not stated."),
    ] = None
    max_restarts: Annotated[
        int,
        whole_number(0, MOST_RESTARTS),
        Parameter(help="How often it goes on by itself from its last checkpoint after a failure; not after a mistake."),
    ] = 0
    dry_run: Annotated[bool, Parameter(help="Check everything, print plan and graph, take no device.")] = False


def run(flags: Annotated[RunFlags, ALL_AT_ONCE]) -> int:
    """Train with an algorithm on devices of this machine, without a worker.

    The parameters are those of the algorithm's deployment: which models, which
    data, how many steps. They come from a file, one by one, or both:

      prefect-rlhf run ppo --parameters parameters.yaml --devices 2 -p steps=5
      prefect-rlhf run my_flow.py:my_flow --parameters mine.yaml --dry-run

    The run is a Prefect flow run: of the server that PREFECT_API_URL names, or
    of a temporary one.
    """
    find_place(flags.algorithm)
    parameters = read_parameters(flags.parameters, flags.param)
    from prefect_rlhf.flows.rlhf_flow import find_flow  # only here: a wrong flag or name needs no Prefect
    from prefect_rlhf.flows.training.installed_engines import check_builds

    check_builds()
    flow = find_flow(flags.algorithm)
    if flags.dry_run:
        parameters["dry_run"] = True
    checked = flow.validate_parameters(parameters)
    from prefect_rlhf.flows.local_run import plan_locally, run_locally  # only here: a wrong parameter needs no search

    if checked["dry_run"]:
        print(plan_locally(flow, checked, flags.devices))
        return 0
    state = run_locally(flow, checked, flags.devices, flags.max_restarts)
    stopped = state.result(raise_on_failure=False, _sync=True) if state.is_cancelled() else None  # type: ignore[call-overload]  # its stubs lack _sync
    if isinstance(stopped, RunStopped):
        say = f"{stopped.how_far}; continue with: {continuing(flags, stopped)}" if stopped.resume_from else stopped
        print_error(f"{PROGRAM}: {say}")
        return STATUS_OF_SIGNAL + (signal.SIGTERM if stopped.is_terminated else signal.SIGINT)
    print(state.message or state.name)
    return 0 if state.is_completed() else 1


def continuing(flags: RunFlags, stopped: RunStopped) -> str:
    """Return the command by which another run continues, with the same parameters."""
    words = [PROGRAM, "run", flags.algorithm]
    words += ["--parameters", str(flags.parameters)] if flags.parameters else []
    words += ["--devices", str(flags.devices)] if flags.devices is not None else []
    words += ["--max-restarts", str(flags.max_restarts)] if flags.max_restarts else []
    kept = [text for text in flags.param if not text.startswith("resume_from=")]
    words += [word for text in (*kept, f"resume_from={stopped.resume_from}") for word in ("-p", text)]
    return shlex.join(words)
