"""A CPU run's host memory: the tensors of a certificate, and the processes' programs and copies.

A CPU certificate counts only tensors, but the host kills a process for its total memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.memory.bytes import MIB, byte_size
from prefect_rlhf.placement.memory.certificate import Certificate, Peak
from prefect_rlhf.placement.memory.overhead import DEVICE

SERVER_BYTES, RUN_BYTES, FORK_SERVER_BYTES, RANK_BYTES = 181 * MIB, 540 * MIB, 400 * MIB, 400 * MIB
"""Memory of Prefect's temporary server, the flow run's process, a node's fork server and each of its ranks: Python,
torch, Megatron-core and vLLM, each page divided among the processes that share it (Pss of /proc/PID/smaps_rollup)."""
ALONE_BYTES = 766 * MIB
"""The flow run's process, if the only rank runs in it."""
ALLOCATOR_SHARES = 0.4, 1.3
"""Memory that allocators keep after tensors were freed, and pages of weight files, as a share of the tensors. The least
and the most in runs of 135M parameters in bfloat16 with 8 rows: 4.3 GiB for 2.4 GiB of tensors, and 8.1 GB for 3.0 GB.

All of these were measured on 2026-11-27, on two cores of an AMD EPYC: `prefect-rlhf run grpo --devices 1` and `2`, for
programs with a model of 0.1 MB, with torch 2.13.0, vLLM 0.32.0 and Prefect's temporary server."""
LEAST_SHARE = 0.5
"""How much of those programs a refusal counts: a run may do without vLLM, or have a server elsewhere."""
UNTOUCHED = "key-value cache"
"""Memory that is allocated, and takes pages of the host only where rows write it."""


def rank_program_bytes(devices_per_node: int) -> int:
    """Return the program memory per rank of a node's processes, including Prefect's server and the flow run."""
    if devices_per_node == 1:
        return SERVER_BYTES + ALONE_BYTES
    return RANK_BYTES + (SERVER_BYTES + RUN_BYTES + FORK_SERVER_BYTES) // devices_per_node


@dataclass(frozen=True, slots=True)
class HostNeed:
    """A run's host memory: all ranks' tensors at their peaks, copies on the host, and programs.

    `least_bytes` is the minimum: no activations, no part of a cache, half of the programs.
    """

    tensor_bytes: int
    copied_bytes: int
    program_bytes: int
    least_bytes: int

    @property
    def usual_bytes(self) -> tuple[int, int]:
        """The lowest and the highest use that a measured run would have."""
        counted = self.tensor_bytes + self.copied_bytes + self.program_bytes
        least, most = (counted + int(share * self.tensor_bytes) for share in ALLOCATOR_SHARES)
        return least, most

    def __str__(self) -> str:
        copies = f", {byte_size(self.copied_bytes)} of copies in host memory" if self.copied_bytes else ""
        least, most = map(byte_size, self.usual_bytes)
        return (
            f"about {least} to {most}: {byte_size(self.tensor_bytes)} of tensors, {ALLOCATOR_SHARES[0]:.0%} to "
            f"{ALLOCATOR_SHARES[1]:.0%} more that allocators keep{copies}, {byte_size(self.program_bytes)} of programs"
        )


def host_needs(certificate: Certificate) -> dict[int, HostNeed]:
    """Return the host memory that a CPU run needs on each node. The first node also runs the flow run's process."""
    of_node: dict[int, list[Peak]] = defaultdict(list)
    for peak in certificate.peaks:
        of_node[DeviceMesh.parse(peak.device).first_node].append(peak)
    copies = {host.node: host.num_bytes for host in certificate.hosts}
    is_alone = len(certificate.peaks) == 1
    needs = {}
    for node, peaks in sorted(of_node.items()):
        shares = [share for peak in peaks for share in peak.shares if share.owner != DEVICE]
        ranks = FORK_SERVER_BYTES + RANK_BYTES * len(peaks)
        first = node == min(of_node)
        programs = SERVER_BYTES + ALONE_BYTES if is_alone else ranks + first * (SERVER_BYTES + RUN_BYTES)
        copied = copies.get(node, 0)
        stays = sum(share.num_bytes for share in shares if not share.passing and share.what != UNTOUCHED)
        least = stays + copied + int(LEAST_SHARE * programs)
        needs[node] = HostNeed(sum(share.num_bytes for share in shares), copied, programs, least)
    return needs
