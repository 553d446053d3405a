"""The command `prefect-rlhf nodes`: start or list the machines of a cluster for runs on several machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, whole_number
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, Backend

if TYPE_CHECKING:
    from prefect_rlhf.tasks.ray_nodes import Devices

PORTS = 65535
DEFAULT_PORT = 6379  # Ray's own


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFlags:
    """The flags of `nodes`."""

    head: Annotated[
        str | None, Parameter(metavar="ADDRESS", help="Start a cluster here; other machines reach it at ADDRESS.")
    ] = None
    join: Annotated[str | None, Parameter(metavar="HOST:PORT", help="Join the cluster at HOST:PORT.")] = None
    stop: Annotated[bool, Parameter(help="Stop all of Ray's processes on this machine.")] = False
    address: Annotated[str | None, Parameter(help="With --join: this machine's address for the other machines.")] = None
    port: Annotated[
        int | None,
        whole_number(1, PORTS),
        Parameter(help=f"With --head: its port; default: {DEFAULT_PORT}.", show_default=False),
    ] = None
    devices: Annotated[
        int | None,
        whole_number(0, MOST_DEVICES),
        Parameter(help="Number of devices that runs may use here; default: 1.", show_default=False),
    ] = None
    kind: Annotated[Backend | None, Parameter(help="Kind of the devices; default: cpu.")] = None
    device: Annotated[
        str | None,
        Parameter(help="Which of the pool's kinds of nodes this is; default for GPUs: the driver's name."),
    ] = None


def nodes(flags: Annotated[NodesFlags, ALL_AT_ONCE] = NodesFlags()) -> int:
    """Start a cluster of machines by hand, or list its nodes.

    On the first machine, on each other machine, and where a worker runs:

      prefect-rlhf nodes --head 10.0.0.1 --devices 8 --kind cuda
      prefect-rlhf nodes --join 10.0.0.1:6379 --devices 8 --kind cuda
      RAY_ADDRESS=10.0.0.1:6379 prefect-rlhf nodes
    """
    if sum((flags.head is not None, flags.join is not None, flags.stop)) > 1:
        raise InvalidInput(
            "--head, --join, --stop", "more than one", "at most one of them; without them, the nodes are listed"
        )
    _check_flags(flags)
    # Imported here because it loads torch.
    from prefect_rlhf.tasks.ray_nodes import known_nodes, start_head, start_node, stop_node

    if flags.head is not None:
        head = start_head(flags.head, flags.port or DEFAULT_PORT, _devices(flags))
        print(f"to join, run prefect-rlhf nodes --join {head}; for runs, set RAY_ADDRESS={head}")
    elif flags.join is not None:
        start_node(flags.join, flags.address, _devices(flags))
        print(f"joined {flags.join}")
    elif flags.stop:
        stop_node()
    else:
        print("\n".join(map(str, known_nodes())))
    return 0


def _check_flags(flags: NodesFlags) -> None:
    """Raise InvalidInput for flags without effect on the requested action."""
    starts = flags.head is not None or flags.join is not None
    required = (
        ("address", flags.join is not None, "--join"),
        ("port", flags.head is not None, "--head"),
        *((name, starts, "--head or --join") for name in ("devices", "kind", "device")),
    )
    for name, has_effect, flag in required:
        if not has_effect and (value := getattr(flags, name)) is not None:
            raise NotUsed(f"--{name}", value, f"it needs {flag}")


def _devices(flags: NodesFlags) -> Devices:
    """Return this machine's devices. Raises InvalidInput for unknown GPUs and invalid names."""
    from prefect_rlhf.blocks.cluster import DEVICE_NAME  # imported here: a wrong flag needs no Prefect
    from prefect_rlhf.flows.hardware.node_hardware import gpu_name
    from prefect_rlhf.placement.cost.datasheets.kinds import GPUS, datasheet
    from prefect_rlhf.tasks.ray_nodes import Devices

    name, kind = flags.device, flags.kind or "cpu"
    if kind == "cuda":  # the datasheet's name, so that it can match a pool's kind of nodes
        name = datasheet(gpu_name("--kind", "--device that does") if name is None else name, "--device", GPUS).name
    elif name is not None and not re.fullmatch(DEVICE_NAME, name):
        raise InvalidInput("--device", name, "up to 63 letters and digits, with . _ - between them")
    return Devices(1 if flags.devices is None else flags.devices, kind, name or "")
