"""A run on devices of this machine, from a terminal, a script or a notebook: check, lease, run.

The run is checked before it waits for devices, and again afterwards. Devices that a worker or an outer run has leased
are used as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, overload

from prefect import Flow
from prefect.client.schemas.objects import State

from prefect_rlhf.blocks.lease import given_lease, running_on
from prefect_rlhf.errors.errors import InvalidInput, RlhfError, RunStopped
from prefect_rlhf.flows.algorithm.quiet_process import quiet_process
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow, check_by_name, find_flow
from prefect_rlhf.flows.algorithm.run_result import PlannedRun, RunResult
from prefect_rlhf.flows.algorithm.terminal import new_log
from prefect_rlhf.flows.forms.options import MOST_RESTARTS
from prefect_rlhf.flows.hardware.device_kind import local_cluster, unheld_devices
from prefect_rlhf.flows.hardware.installed_engines import check_builds
from prefect_rlhf.flows.hardware.surroundings import check_surroundings
from prefect_rlhf.flows.training.run import check_run, leased_after, prepare
from prefect_rlhf.flows.training.run_name import new_name
from prefect_rlhf.flows.training.server import check_given_server, server_beside
from prefect_rlhf.flows.training.spec.place import read_place
from prefect_rlhf.flows.training.spec.run_spec import asked_run
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, Backend

Given = ParamSpec("Given")
Found = TypeVar("Found")


def _by_name(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Make a function of an algorithm refuse further arguments without a name in a line."""

    @wraps(function)
    def checked(*arguments: Given.args, **parameters: Given.kwargs) -> Found:
        check_by_name(function.__name__, arguments[1:])
        return function(*arguments, **parameters)

    return checked


@overload
def run(
    algorithm: AlgorithmFlow | str,
    /,
    *,
    dry_run: Literal[True],
    devices: int | None = None,
    kind: Backend | None = None,
    max_restarts: int = 0,
    verbose: bool = False,
    **parameters: Any,
) -> PlannedRun: ...
@overload
def run(
    algorithm: AlgorithmFlow | str,
    /,
    *,
    dry_run: Literal[False] = False,
    devices: int | None = None,
    kind: Backend | None = None,
    max_restarts: int = 0,
    verbose: bool = False,
    **parameters: Any,
) -> RunResult: ...
@_by_name
def run(
    algorithm: AlgorithmFlow | str,
    /,
    *,
    dry_run: bool = False,
    devices: int | None = None,
    kind: Backend | None = None,
    max_restarts: int = 0,
    verbose: bool = False,
    **parameters: Any,
) -> RunResult | PlannedRun:
    """Train on this machine's devices, and return the models, metrics and rollouts.

    `algorithm` is an @rlhf_flow function such as `grpo`, or a name that `prefect-rlhf run` accepts. Pass its parameters
    by name, each as a value such as `Model(path=...)` or as a dict like those in a parameter file. The run leases
    `devices` devices (1 by default). Their `kind` is cuda for GPUs or cpu for processor cores; by default GPUs, if one
    is visible and the installed engines are built for GPUs. Under a worker, the run uses the worker's lease. After a
    failure it restarts, up to `max_restarts` times. You see the run's own lines; with `verbose` also what libraries
    print, which otherwise goes to a log file in `output_dir`. With `dry_run`, everything is checked, no device is used,
    and you get the plan.

    Raises InvalidInput or GraphError for a mistake, before any device is used; another RlhfError if the run fails; and
    RunStopped, a KeyboardInterrupt, if somebody stops it.
    """
    check_builds()
    flow = find_flow(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(flow, AlgorithmFlow):
        expected = "an @rlhf_flow function, such as prefect_rlhf.algorithms.grpo, or its name"
        raise InvalidInput("algorithm", algorithm, expected)
    flow.check_not_in_rank()
    _check_whole("devices", devices, 1, MOST_DEVICES)
    _check_whole("max_restarts", max_restarts, 0, MOST_RESTARTS)
    if type(verbose) is not bool:
        raise InvalidInput("verbose", verbose, "True or False")
    checked = flow.validate_parameters({**parameters, "dry_run": dry_run})
    if kind not in (None, "cuda", "cpu"):
        raise InvalidInput("kind", kind, "cuda or cpu")
    if checked["dry_run"]:
        return plan_locally(flow, checked, devices, kind)
    check_given_server()
    log = new_log(read_place(checked["output_dir"]).folder)
    with nullcontext() if verbose else quiet_process(log) as terminal:
        say = terminal.say if terminal else print_line
        state = run_locally(flow, checked, devices, max_restarts, kind=kind, say=say)
    found = state.result(raise_on_failure=False, _sync=True)  # type: ignore[call-overload]  # its stubs lack _sync
    if isinstance(found, RlhfError | RunStopped):
        raise found.with_traceback(None) from None  # its place in Prefect and in this library does not matter
    if isinstance(found, BaseException):
        raise found
    return RunResult.of(found)


def print_line(line: object) -> None:
    """Print to standard error and flush: no run has a log yet."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _check_whole(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise InvalidInput(field, value, f"a whole number from {least} to {most}")


def plan_locally(
    flow: AlgorithmFlow, checked: Mapping[str, Any], devices: int | None, kind: Backend | None = None
) -> PlannedRun:
    """Return the plan of a run with checked parameters. Raises InvalidInput or GraphError if it cannot run."""
    leased = _given_lease(devices, kind) or unheld_devices(devices, kind)
    check_surroundings(leased.mesh.num_devices, own_leases=given_lease() is None)
    return PlannedRun.of(prepare(asked_run(flow.algorithm, checked), leased))


def run_locally(
    flow: AlgorithmFlow,
    checked: Mapping[str, Any],
    devices: int | None,
    max_restarts: int = 0,
    *,
    kind: Backend | None = None,
    say: Callable[[str], None],
) -> State[Any]:
    """Run with checked parameters; returns the final state. Raises the errors of the checks before the lease.

    `say` gets each line about the wait for devices.
    """
    name = new_name(flow.algorithm.name, checked)
    restarting = flow.with_options(retries=max_restarts or None, flow_run_name=name)
    if _given_lease(devices, kind) is not None:
        return _final_state(restarting, checked)
    cluster = local_cluster(devices, kind)
    check_surroundings(cluster.whole.num_devices, own_leases=True)
    with stopped_at("stopped before the run began"), server_beside() as check_server:
        found = check_run(asked_run(flow.algorithm, checked), cluster)
        check_server()
    with ExitStack() as held:
        with stopped_at("stopped while waiting for devices; no step was run"):
            leased = held.enter_context(leased_after(found, say, name))
        held.enter_context(running_on(leased))
        return _final_state(restarting, checked)


def _final_state(flow: Flow[..., Any], checked: Mapping[str, Any]) -> State[Any]:
    state: State[Any] = flow(**checked, return_state=True)  # type: ignore[assignment]  # overloads of Flow mislead
    return state


def _given_lease(devices: int | None, kind: Backend | None) -> Lease | None:
    """Return the lease that this process already has. Raises InvalidInput if it is not of `devices` of that kind."""
    given = given_lease()
    if given is not None and kind not in (None, given.kind):
        raise InvalidInput("kind", kind, f"{given.kind}, the kind of the leased devices; or remove it")
    if given is not None and devices not in (None, given.mesh.num_devices):
        expected = f"{given.mesh.num_devices}, the number of devices leased for this process; or remove it"
        raise InvalidInput("devices", devices, expected)
    return given


@contextmanager
def stopped_at(where: str) -> Iterator[None]:
    """Convert a KeyboardInterrupt of the body to a RunStopped that reports the run's progress."""
    try:
        yield
    except KeyboardInterrupt:
        raise RunStopped(where) from None
