"""Checks that the host has enough memory for a run on CPU: processes need more than a certificate's tensors."""

import socket
from collections.abc import Iterable

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.host_memory import FreeMemory, free_memory
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.processes import HostNeed, host_needs


def check_host(certificates: Iterable[Certificate], lease: Lease) -> None:
    """Log how much host memory a CPU run's processes need, under the plan that needs most.

    Raises InvalidInput if the host has less than their minimum. Ranks of other machines are not checked.
    """
    if lease.kind != "cpu" or lease.cluster.num_nodes > 1:
        return
    needs = [need for certificate in certificates for need in host_needs(certificate).values()]
    free = free_memory()
    if not needs or free is None:
        return
    refuse_what_does_not_fit(max(needs, key=lambda need: need.least_bytes), free)
    log_info(f"memory of the run's processes: {max(needs, key=lambda need: need.usual_bytes)}; {_left(free)}")


def refuse_what_does_not_fit(need: HostNeed, free: FreeMemory) -> None:
    """Raise InvalidInput if even the lowest estimate exceeds the free memory."""
    if need.least_bytes > free.num_bytes:
        right = f"at most {_room(free)}: fewer devices, bfloat16, smaller models, or a host with more memory"
        raise InvalidInput("memory of the host", f"at least {byte_size(need.least_bytes)}", right)


def _room(free: FreeMemory) -> str:
    return f"{_left(free)} ({free.limit})"


def _left(free: FreeMemory) -> str:
    return f"{byte_size(free.num_bytes)} that {socket.gethostname()} has left"
