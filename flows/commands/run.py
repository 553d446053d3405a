"""The command `prefect-rlhf run`: run or dry-run an algorithm on devices of this machine, from a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from prefect_rlhf.blocks.cluster import MOST_DEVICES, Cluster
from prefect_rlhf.blocks.lease import dry_lease, lease, running_on
from prefect_rlhf.flows.commands.dry_run import planned_text
from prefect_rlhf.flows.commands.flags import Flags, print_error, read_parameters, whole_number
from prefect_rlhf.flows.commands.server import check_server
from prefect_rlhf.flows.rlhf_flow import ALGORITHMS, find_flow
from prefect_rlhf.flows.training.installed_engines import check_engines

RESTARTS = (
    "times that the run may go on by itself from its last checkpoint after a failure, a mistake's aside (default 0)"
)


def parser() -> Flags:
    """Return the flags; every one is used."""
    top = Flags(
        prog="prefect-rlhf run", description="Run or dry-run an algorithm on devices of this machine, without a worker."
    )
    top.add_argument("algorithm", help=f"{', '.join(ALGORITHMS)}, module:function or file.py:function of your own")
    top.add_argument("--parameters", type=Path, help="YAML or JSON file of the flow's parameters")
    top.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE", help="one parameter, YAML")
    devices = whole_number(1, MOST_DEVICES)
    top.add_argument("--devices", type=devices, default=1, help="devices of this machine to lease (default 1)")
    top.add_argument("--max-restarts", type=whole_number(0, 1000), default=0, metavar="N", help=RESTARTS)
    top.add_argument("--dry-run", action="store_true", help="check everything, print plan and graph, take no device")
    return top


def run(arguments: Sequence[str]) -> int:
    """Check the parameters, lease the devices, run the flow; returns the exit status. A dry run needs no server."""
    options = parser().parse_args(arguments)
    flow = find_flow(options.algorithm)
    parameters = read_parameters(options.parameters, options.param)
    if options.dry_run:
        parameters["dry_run"] = True
    checked = flow.validate_parameters(parameters)
    cluster = Cluster(devices_per_node=options.devices).shape
    if checked["dry_run"]:
        print(planned_text(flow, checked, dry_lease(cluster)))
        return 0
    check_engines()
    check_server()
    with lease(cluster, options.devices, say=print_error) as leased, running_on(leased):
        restarting = flow.with_options(retries=options.max_restarts)
        state: State[Any] = restarting(**checked, return_state=True)  # type: ignore[assignment]  # overloads of Flow mislead
    print(state.message or state.name)
    return 0 if state.is_completed() else 1
