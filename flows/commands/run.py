"""The command `prefect-rlhf ALGORITHM`: run or dry-run an algorithm on devices of this machine, from a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.rlhf_flow import ALGORITHMS, AlgorithmFlow, find_flow
from prefect_rlhf.placement.lease import ENVIRONMENT_VARIABLE, Lease

EPILOG = (
    "prefect-rlhf plan --help: a plan for a cluster that need not be there; "
    "prefect-rlhf profile --help: measure this machine's devices"
)


def parser() -> argparse.ArgumentParser:
    """The flags; every one is used."""
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
    shape = Cluster(devices_per_node=options.devices).shape
    if parameters.get("dry_run"):
        return _run_on(Lease("local", "dry-run", shape, shape.whole, ()), flow, parameters)
    with lease(shape, options.devices, say=lambda words: print(words, file=sys.stderr)) as held:
        return _run_on(held, flow, parameters)


def _run_on(held: Lease, flow: AlgorithmFlow, parameters: Mapping[str, Any]) -> int:
    checked = flow.validate_parameters(dict(parameters))
    os.environ[ENVIRONMENT_VARIABLE] = held.to_json()
    state: State[Any] = flow(**checked, return_state=True)  # type: ignore[assignment]  # overloads of Flow mislead
    print(state.message or state.name)
    return 0 if state.is_completed() else 1
