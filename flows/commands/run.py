"""The command `prefect-rlhf run`: run or dry-run an algorithm on devices of this machine, from a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter
from prefect.client.schemas.objects import State

from prefect_rlhf.blocks.cluster import MOST_DEVICES, Cluster
from prefect_rlhf.blocks.lease import dry_lease, lease, running_on
from prefect_rlhf.flows.commands.dry_run import planned_text
from prefect_rlhf.flows.commands.flags import (
    ALL_AT_ONCE,
    Assignments,
    ParametersFile,
    print_error,
    read_parameters,
    whole_number,
)
from prefect_rlhf.flows.commands.server import check_server
from prefect_rlhf.flows.rlhf_flow import ALGORITHMS, find_flow
from prefect_rlhf.flows.training.installed_engines import check_builds, check_engines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The flags of `run`."""

    algorithm: Annotated[str, Parameter(help=f"{', '.join(ALGORITHMS)}, or file.py:function or module:function.")] = (
        field(kw_only=False)
    )
    parameters: ParametersFile = None
    param: Assignments = ()
    devices: Annotated[int, whole_number(1, MOST_DEVICES), Parameter(help="Devices of this machine to lease.")] = 1
    max_restarts: Annotated[
        int,
        whole_number(0, 1000),
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
    check_builds()
    flow = find_flow(flags.algorithm)
    parameters = read_parameters(flags.parameters, flags.param)
    if flags.dry_run:
        parameters["dry_run"] = True
    checked = flow.validate_parameters(parameters)
    cluster = Cluster(devices_per_node=flags.devices).shape
    if checked["dry_run"]:
        print(planned_text(flow, checked, dry_lease(cluster)))
        return 0
    check_engines()
    check_server()
    with lease(cluster, flags.devices, say=print_error) as leased, running_on(leased):
        restarting = flow.with_options(retries=flags.max_restarts)
        state: State[Any] = restarting(**checked, return_state=True)  # type: ignore[assignment]  # overloads of Flow mislead
    print(state.message or state.name)
    return 0 if state.is_completed() else 1
