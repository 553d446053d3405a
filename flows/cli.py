"""The command `prefect-rlhf`: run or dry-run an algorithm without a worker, from a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from prefect.client.schemas.objects import State

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow
from prefect_rlhf.placement.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.lease import ENVIRONMENT_VARIABLE, Lease

ALGORITHMS = ("ppo", "reward", "dpo", "grpo", "remax")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status. Mistakes get one line on stderr."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except RlhfError as error:
        print(f"prefect-rlhf: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The flags; every one is used."""
    top = argparse.ArgumentParser(prog="prefect-rlhf", description=__doc__)
    top.add_argument("algorithm", help=f"{', '.join(ALGORITHMS)}, or module:function of your own")
    top.add_argument("--parameters", type=Path, help="YAML or JSON file of the flow's parameters")
    top.add_argument("-p", "--param", action="append", default=[], metavar="NAME=VALUE", help="one parameter, YAML")
    top.add_argument("--devices", type=int, default=1, help="devices of this machine to lease (default 1)")
    top.add_argument("--dry-run", action="store_true", help="check everything, print plan and graph, take no device")
    return top


def run(options: argparse.Namespace) -> int:
    """Check the parameters, lease the devices, run the flow."""
    flow = find_flow(options.algorithm)
    parameters = read_parameters(options.parameters, options.param)
    if options.dry_run:
        parameters["dry_run"] = True
    shape = Cluster(devices_per_node=options.devices).shape
    if parameters.get("dry_run"):
        return _run_on(Lease("local", "dry-run", shape, shape.whole, ()), flow, parameters)
    with lease(shape, options.devices, say=lambda words: print(words, file=sys.stderr)) as held:
        return _run_on(held, flow, parameters)


def find_flow(name: str) -> AlgorithmFlow:
    """The flow that `name` stands for. Raises InvalidInput when there is none."""
    module, _, attribute = (name if ":" in name else f"prefect_rlhf.flows.{name}:{name}").partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInput("algorithm", name, f"one of {', '.join(ALGORITHMS)}, or module:function") from error
    if not isinstance(found, AlgorithmFlow):
        raise InvalidInput("algorithm", name, "a function decorated with @rlhf_flow")
    return found


def read_parameters(file: Path | None, given: Sequence[str]) -> dict[str, Any]:
    """Parameters from a file, then those given one by one; a dotted name reaches into a group."""
    parameters: dict[str, Any] = {}
    if file is not None:
        if not file.is_file():
            raise InvalidInput("--parameters", str(file), "a YAML or JSON file")
        parameters = yaml.safe_load(file.read_text()) or {}
        if not isinstance(parameters, dict):
            raise InvalidInput("--parameters", str(file), "a mapping of parameter names to values")
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput("--param", text, "NAME=VALUE")
        _set(parameters, name.split("."), yaml.safe_load(value))
    return parameters


def _run_on(held: Lease, flow: AlgorithmFlow, parameters: Mapping[str, Any]) -> int:
    checked = flow.validate_parameters(dict(parameters))
    os.environ[ENVIRONMENT_VARIABLE] = held.to_json()
    state: State[Any] = flow(**checked, return_state=True)  # type: ignore[assignment]  # overloads of Flow mislead
    print(state.message or state.name)
    return 0 if state.is_completed() else 1


def _set(parameters: dict[str, Any], path: Sequence[str], value: object) -> None:
    *groups, last = path
    for group in groups:
        parameters = parameters.setdefault(group, {})
        if not isinstance(parameters, dict):
            raise InvalidInput("--param", ".".join(path), f"a name inside a group; {group} holds a value")
    parameters[last] = value
