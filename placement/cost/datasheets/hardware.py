"""Peaks of devices and links, from datasheets, and the share of the peaks that real kernels reach.

A datasheet has only peaks. `Efficiency` holds a runtime's constants, which lead from peaks to measured calls. Its
defaults were set once, on ReaL's appendix tables 4 to 6 (H100, 7B). They hold for every kind of call, plan, model and
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.model import Dtype

GIB = 1 << 30
FEW_ROWS = 32
"""Rows of a decoding step whose products have a speed of their own on a processor: `Datasheet.decoding_share`."""
LinkSpan = Literal["device", "node", "network", "host"]
"""The way of a transfer: within a device, within a node, between nodes, or between a device and its host."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """A runtime's constants, which lead from peaks to call times; they are independent of call, plan and model."""

    matmul: float = 0.75
    """Share of peak FLOP/s in large matrix products."""
    memory: float = 0.8
    """Share of memory bandwidth in kernels that only move bytes."""
    link: float = 0.6
    """Share of a link's bandwidth in collectives and copies."""
    link_latency_seconds: float = 10e-6
    """Latency of a hop of a collective."""
    passes: float = 40.0
    """How often a layer's forward reads or writes [tokens, hidden] outside matrix products (norms in float32,
    residuals). Tensor parallelism does not divide it."""
    graph_layer_seconds: float = 190e-6
    """Launching a layer's kernels with CUDA graphs."""
    eager_layer_seconds: float = 700e-6
    """Launching a layer's kernels without CUDA graphs."""
    call_seconds: float = 2.2
    """The fixed part of every call (request, gather and split of its batch). The default is ReaL's; other runtimes have
    their own."""
    graph_passes: float = 40.0
    """`passes` in an engine that replays graphs with fused kernels. This and all constants below describe today's
    engines; ReaL's tables do not show them."""
    gradient_pass_bytes: float = 0.0
    """Per parameter and micro-batch, if gradients are added to their sums in separate passes."""
    makes_logits_again: bool = False
    """Whether the backward pass computes logits again."""
    host_step_seconds: float = 0.0
    """The host's work for a decoding step in an engine that replays graphs, while the devices wait."""
    host_row_seconds: float = 0.0
    """The same for each row of the step."""
    taken_layer_seconds: float = 0.0
    """The host's work to bring a layer's new weights into another engine."""
    attention: float = 0.0
    """Speed of the attention kernels of forward and backward relative to flash attention 2; 0 means as fast as other
    products."""
    attention_half: float = 0.0
    """The number of tokens in a row that reaches half of that speed."""


@dataclass(frozen=True, slots=True)
class Datasheet:
    """A kind of device. Bandwidths are in bytes per second, a link's in each direction and per device."""

    name: str
    bfloat16_flops: float
    float32_flops: float
    memory_bytes_per_second: float
    memory_bytes: int
    link_bytes_per_second: float
    host_bytes_per_second: float
    source: str
    measured: bool = False
    """Such a kind has no datasheet: its times come only from a profile."""
    is_host: bool = False
    """Such a device has no host that runs ahead of it, so launches never hide behind its work."""
    elementwise_share: float = 1.0
    """The share of memory bandwidth that element-wise work reaches: a GPU waits for memory, a processor core for
    arithmetic."""
    decoding_share: float = 1.0
    """The share of large products' FLOP/s that a decoding step's products reach for the first FEW_ROWS rows, if
    arithmetic limits them."""
    further_rows_share: float = 1.0
    """The same for all further rows."""
    host_bytes: int = 0
    """Memory of a usual host of such devices, per device; 0 means unknown."""
    product_share: float = 1.0
    """The share of the peak that the library's products reach, relative to those of NVIDIA's GPUs."""
    attention_share: float = 0.35
    """The share of the peak that flash attention 2 reaches on long rows."""

    def flops_per_second(self, dtype: Dtype) -> float:
        """Return the dense peak in that format, in FLOP/s."""
        return self.bfloat16_flops if dtype == "bfloat16" else self.float32_flops


@dataclass(frozen=True, slots=True)
class Network:
    """The network between nodes: bytes per second of a node in each direction, shared equally by its devices.

    `latency_seconds` is the latency of a small message between GPUs of two nodes, by NCCL: 20 to 30 us over InfiniBand
    or RoCE (sendrecv of nccl-tests), of which the default is the least.
    """

    name: str
    node_bytes_per_second: float
    source: str = ""
    latency_seconds: float = 20e-6


@dataclass(frozen=True, slots=True)
class Hardware:
    """Nodes of `devices_per_node` equal devices, and the network between them."""

    device: Datasheet
    devices_per_node: int
    network: Network | None = None
    efficiency: Efficiency = Efficiency()

    def links(self) -> Links:
        """Return its links at the bandwidth that collectives and copies reach."""
        reached, device = self.efficiency.link, self.device
        each = self.network.node_bytes_per_second / self.devices_per_node if self.network else 0.0
        return Links(
            device.memory_bytes_per_second * self.efficiency.memory,
            device.link_bytes_per_second * reached,
            each * reached,
            device.host_bytes_per_second * reached,
            self.efficiency.link_latency_seconds,
            max(self.network.latency_seconds, self.efficiency.link_latency_seconds) if self.network else 0.0,
        )


def relative_speeds(nodes: Sequence[Hardware]) -> tuple[float, ...]:
    """Return each node's speed for dividing rows, relative to the fastest's peak; empty if all are alike.

    >>> from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
    >>> relative_speeds([Hardware(DATASHEETS[kind], 8) for kind in ("a100-80", "v100-32")])
    (1.0, 0.401)
    """
    return parts_of_the_fastest([node.device.bfloat16_flops for node in nodes])


def parts_of_the_fastest(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return speeds relative to the highest, to three digits; empty if all are equal."""
    return () if len(set(speeds)) == 1 else tuple(round(speed / max(speeds), 3) for speed in speeds)


@dataclass(frozen=True, slots=True)
class Links:
    """The bytes per second that a device reaches in each direction, for each `LinkSpan`; 0 means that no network
    exists.

    `latency_seconds` is per message, `network_latency_seconds` per message between nodes.
    """

    device: float
    node: float
    network: float
    host: float
    latency_seconds: float = 0.0
    network_latency_seconds: float = 0.0

    def seconds(self, num_bytes: float, span: LinkSpan) -> float:
        """Return the seconds to move bytes over a device's link.

        >>> Links(2e12, 4e11, 5e10, 2e10).seconds(1e9, "network")
        0.02
        """
        return num_bytes / self.of(span) + self.latency(span) if num_bytes > 0 else 0.0

    def faster(self, factor: float) -> Links:
        """Return links that are `factor` times as fast within a node."""
        return replace(self, device=self.device * factor, node=self.node * factor, host=self.host * factor)

    def latency(self, span: LinkSpan) -> float:
        """Return a message's latency, the time it takes in addition to its bytes, in seconds."""
        return max(self.latency_seconds, self.network_latency_seconds) if span == "network" else self.latency_seconds

    def of(self, span: LinkSpan) -> float:
        """Return the bytes per second over a span. Raises InvalidInput for a network that does not exist."""
        bandwidth: float = getattr(self, span)  # each span is a field
        if not bandwidth:
            raise InvalidInput("cluster.network", "none", "a network between nodes, for a plan that spans them")
        return bandwidth


_NETWORKS = (
    Network("roce-3200", 400e9, "3.2 Tbit/s a node: ReaL, section 8"),
    Network("infiniband-200", 25e9, "200 Gbit/s a node: HybridFlow, section 8.1"),
    Network("infiniband-800", 100e9, "around 100 GB/s a node: APP, section VI"),
)
NETWORKS: Mapping[str, Network] = MappingProxyType({network.name: network for network in _NETWORKS})
