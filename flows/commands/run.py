"""The command `prefect-rlhf run`: run or dry-run an algorithm on devices of this machine, from a terminal."""

import logging
import shlex
import signal
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from cyclopts import Parameter

from prefect_rlhf.errors.errors import RunStopped
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.flows.algorithm.places import ALGORITHMS, find_place
from prefect_rlhf.flows.commands.flags import (
    ALL_AT_ONCE,
    PROGRAM,
    Assignments,
    ChosenKind,
    ParametersFile,
    print_error,
    read_parameters,
    whole_number,
)
from prefect_rlhf.flows.commands.next_steps import next_steps
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings
from prefect_rlhf.flows.forms.options import MOST_RESTARTS
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES

RESUME = ("resume_from=", "resume_changes=")
STATUS_OF_SIGNAL = 128  # plus the signal's number, as in a shell


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
        Parameter(help="Number of this machine's devices to lease; default: 1.", show_default=False),
    ] = None
    kind: ChosenKind = None
    max_restarts: Annotated[
        int,
        whole_number(0, MOST_RESTARTS),
        Parameter(
            help="How often to restart from the last checkpoint after a failure; a mistake of yours is not retried."
        ),
    ] = 0
    verbose: Annotated[
        bool, Parameter(help="Show the whole log on the terminal: libraries' warnings, every task run.")
    ] = False
    dry_run: Annotated[bool, Parameter(help="Check everything, print plan and graph, use no device.")] = False


def run(flags: Annotated[RunFlags, ALL_AT_ONCE]) -> int:
    """Train on this machine's devices, without a worker.

    You set the same parameters as in the algorithm's deployment, such as models,
    data and number of steps: in a file, with -p, or both:

      prefect-rlhf run ppo --parameters parameters.yaml --devices 2 -p steps=5
      prefect-rlhf run my_flow.py:my_flow --parameters mine.yaml --dry-run

    The run is a Prefect flow run on the server of PREFECT_API_URL, or on a
    temporary server.
    """
    find_place(flags.algorithm)
    parameters = read_parameters(flags.parameters, flags.param)
    warnings.filterwarnings("ignore", "Failed to create the Prefect home")  # `check_surroundings` names the variable
    check_prefect_settings()
    from prefect_rlhf.flows.algorithm.rlhf_flow import (
        find_flow,  # imported here: an error about a flag or name needs no Prefect
    )
    from prefect_rlhf.flows.hardware.installed_engines import check_builds
    from prefect_rlhf.flows.training.server import check_given_server

    check_builds()
    flow = find_flow(flags.algorithm)
    if flags.dry_run:
        parameters["dry_run"] = True
    checked = flow.validate_parameters(parameters)
    if not checked["dry_run"]:
        check_given_server()
    # Imported here: a wrong parameter needs no search.
    from prefect_rlhf.flows.algorithm.local_run import plan_locally, run_locally
    from prefect_rlhf.flows.algorithm.terminal import new_log, quiet_terminal
    from prefect_rlhf.flows.training.spec.place import read_place
    from prefect_rlhf.tasks.server.patience import ServerAway

    if checked["dry_run"]:
        print(plan_locally(flow, checked, flags.devices, flags.kind))
        return 0
    log = new_log(read_place(checked["output_dir"]).folder)
    with nullcontext() if flags.verbose else quiet_terminal(log) as terminal:
        say = terminal.say if terminal else print_error
        try:
            state = run_locally(flow, checked, flags.devices, flags.max_restarts, kind=flags.kind, say=say)
        except ServerAway:
            logging.raiseExceptions = False  # otherwise Prefect adds to the error that it cannot send its logs either
            raise
    found = state.result(raise_on_failure=False, _sync=True)  # type: ignore[call-overload]  # its stubs lack _sync
    if isinstance(found, RunStopped):
        resume = ("-p", f"resume_from={found.resume_from}")
        said = (
            f"{found.how_far}; continue with: {shlex.join([*words_of(flags), *resume])}" if found.resume_from else found
        )
        print_error(f"{PROGRAM}: {said}")
        return STATUS_OF_SIGNAL + (signal.SIGTERM if found.is_terminated else signal.SIGINT)
    if not state.is_completed():
        print_error(f"{PROGRAM}: {state.message or state.name}")
        if log.is_file():
            print_error(f"log: {from_here(str(log))}")
        return 1
    for line in next_steps(words_of_new(flags, parameters), found["models"]):
        print(line)
    return 0


def words_of_new(flags: RunFlags, parameters: Mapping[str, Any]) -> list[str]:
    """Return the command, as words, that starts a run like this one from the beginning, not from a checkpoint."""
    stated = dict.fromkeys(text.partition("=")[0] for text in flags.param)
    words = words_of(replace(flags, param=tuple(text for text in flags.param if not text.startswith(RESUME))))
    for name, none in (("resume_from", "null"), ("resume_changes", "[]")):
        words += ["-p", f"{name}={none}"] if name in parameters and name not in stated else []  # in the file
    return words


def words_of(flags: RunFlags) -> list[str]:
    """Return the words of a run's command, without an earlier `resume_from`."""
    words = [PROGRAM, "run", flags.algorithm]
    words += ["--parameters", str(flags.parameters)] if flags.parameters else []
    words += ["--devices", str(flags.devices)] if flags.devices is not None else []
    words += ["--kind", flags.kind] if flags.kind is not None else []
    words += ["--max-restarts", str(flags.max_restarts)] if flags.max_restarts else []
    kept = [text for text in flags.param if not text.startswith("resume_from=")]
    return [*words, *(word for text in kept for word in ("-p", text))]
