"""The command `prefect-rlhf ALGORITHM`: run or dry-run an algorithm on devices of this machine, from a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import dry_lease, lease, running_on
from prefect_rlhf.flows.commands.flags import print_error, read_parameters
from prefect_rlhf.flows.rlhf_flow import ALGORITHMS, find_flow

EPILOG = (
    "prefect-rlhf plan --help: a plan for a cluster that need not be there; "
    "prefect-rlhf profile --help: measure this machine's devices"
)


def parser() -> argparse.ArgumentParser:
    """Return the flags; every one is used."""
    top = argparse.ArgumentParser(prog="prefect-rlhf", description=__doc__, epilog=EPILOG)
    top.add_argument("algorithm", help=f"{', '.join(ALGORITHMS)}, or module:function of your own")
    top.add_argument("--parameters", type=Path, help="YAML or JSON file of the flow's parameters")
    top.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE", help="one parameter, YAML")
    top.add_argument("--devices", type=int, default=1, help="devices of this machine to lease (default 1)")
    top.add_argument("--dry-run", action="store_true", help="check everything, print plan and graph, take no device")
    return top


def run(arguments: Sequence[str]) -> int:
    """Check the parameters, lease the devices, run the flow; returns the exit status."""
    options = parser().parse_args(arguments)
    flow = find_flow(options.algorithm)
    parameters = read_parameters(options.parameters, options.param)
    if options.dry_run:
        parameters["dry_run"] = True
    checked = flow.validate_parameters(parameters)
    cluster = Cluster(devices_per_node=options.devices).shape
    dry = nullcontext(dry_lease(cluster))
    with dry if checked["dry_run"] else lease(cluster, options.devices, say=print_error) as leased, running_on(leased):
        state: State[Any] = flow(**checked, return_state=True)  # type: ignore[assignment]  # overloads of Flow mislead
    print(state.message or state.name)
    return 0 if state.is_completed() else 1
