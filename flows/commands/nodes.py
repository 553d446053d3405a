"""The command `prefect-rlhf nodes`: the machines that runs on several of them use, started by hand or listed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, whole_number
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import MOST_DEVICES, Backend

if TYPE_CHECKING:
    from prefect_rlhf.tasks.nodes import Devices

PORTS = 65535
DEFAULT_PORT = 6379  # Ray's own


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFlags:
    """The flags of `nodes`."""

    head: Annotated[
        str | None, Parameter(metavar="ADDRESS", help="Start a cluster here; others reach this machine at ADDRESS.")
    ] = None
    join: Annotated[str | None, Parameter(metavar="HOST:PORT", help="Let this machine join the cluster there.")] = None
    stop: Annotated[bool, Parameter(help="End all that Ray runs on this machine.")] = False
    address: Annotated[str | None, Parameter(help="With --join: the address at which others reach this machine.")] = (
        None
    )
    port: Annotated[
        int | None,
        whole_number(1, PORTS),
        Parameter(help=f"With --head; without it {DEFAULT_PORT}.", show_default=False),
    ] = None
    devices: Annotated[
        int | None,
        whole_number(0, MOST_DEVICES),
        Parameter(help="Devices that runs may use here; without it 1.", show_default=False),
    ] = None
    kind: Annotated[Backend | None, Parameter(help="What the devices are; without it cpu.")] = None
    device: Annotated[
        str | None,
        Parameter(help="Which of a pool's kinds of nodes this is; without it, of GPUs what their driver says."),
    ] = None


def nodes(flags: Annotated[NodesFlags, ALL_AT_ONCE] = NodesFlags()) -> int:
    """Start a cluster of machines by hand, or say which nodes it has.

    On the first machine, on each other, and then wherever a worker runs:

      prefect-rlhf nodes --head 10.0.0.1 --devices 8 --kind cuda
      prefect-rlhf nodes --join 10.0.0.1:6379 --devices 8 --kind cuda
      RAY_ADDRESS=10.0.0.1:6379 prefect-rlhf nodes
    """
    if sum((flags.head is not None, flags.join is not None, flags.stop)) > 1:
        raise InvalidInput("--head, --join, --stop", "more than one", "one of them, or none to list the nodes")
    _check_flags(flags)
    from prefect_rlhf.tasks.nodes import known_nodes, start_head, start_node, stop_node  # only here: it imports torch

    if flags.head is not None:
        head = start_head(flags.head, flags.port or DEFAULT_PORT, _devices(flags))
        print(f"others join with: prefect-rlhf nodes --join {head}; runs find it with RAY_ADDRESS={head}")
    elif flags.join is not None:
        start_node(flags.join, flags.address, _devices(flags))
        print(f"joined {flags.join}")
    elif flags.stop:
        stop_node()
    else:
        print("\n".join(map(str, known_nodes())))
    return 0


def _check_flags(flags: NodesFlags) -> None:
    """Raise InvalidInput for flags that what is asked for leaves without effect."""
    starts = flags.head is not None or flags.join is not None
    of_which = (
        ("address", flags.join is not None, "--join"),
        ("port", flags.head is not None, "--head"),
        *((name, starts, "--head or --join") for name in ("devices", "kind", "device")),
    )
    for name, has_effect, beside in of_which:
        if not has_effect and (value := getattr(flags, name)) is not None:
            raise InvalidInput(f"--{name}", value, f"to be left out without {beside}")


def _devices(flags: NodesFlags) -> Devices:
    """Return what this machine has. Raises InvalidInput for GPUs that nobody knows and for a name that is none."""
    from prefect_rlhf.blocks.cluster import DEVICE_NAME  # only here: a wrong flag needs no Prefect
    from prefect_rlhf.flows.hardware.datasheets import gpu_name
    from prefect_rlhf.placement.cost.hardware import GPUS, datasheet
    from prefect_rlhf.tasks.nodes import Devices

    name, kind = flags.device, flags.kind or "cpu"
    if kind == "cuda":  # by its datasheet, or no pool's kind of nodes would ever be this one
        name = datasheet(gpu_name("--kind", "--device that does") if name is None else name, "--device", GPUS).name
    elif name is not None and not re.fullmatch(DEVICE_NAME, name):
        raise InvalidInput("--device", name, "up to 63 letters and digits, with . _ - between them")
    return Devices(1 if flags.devices is None else flags.devices, kind, name or "")
