"""Peaks of devices and links, from datasheets, and the share of the peaks that real kernels reach.

A datasheet has only peaks. `Efficiency` holds a runtime's constants, which lead from peaks to measured calls. Its
defaults were set once, on ReaL's appendix tables 4 to 6 (H100, 7B). They hold for every kind of call, plan, model and
device.
"""

from __future__ import annotations

import re
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


HOST_DEVICES = 8
HOST_GIB: Mapping[str, int] = MappingProxyType(
    {
        "h100": 2048,  # NVIDIA DGX H100 datasheet: 2 TB of system memory
        "h200": 2048,  # NVIDIA DGX H200 datasheet: 2 TB
        "a100-80": 2048,  # NVIDIA DGX A100 datasheet, 640GB: 2 TB
        "a100-40": 1024,  # NVIDIA DGX A100 datasheet, 320GB: 1 TB
        "v100-32": 512,  # NVIDIA DGX-1 datasheet: 512 GB
        "v100-16": 512,  # the same
        "b200": 2048,  # NVIDIA DGX B200 datasheet: 2 TB, up to 4 TB
        "l40s": 1536,  # AWS g6e.48xlarge, 8 L40S: 1,536 GiB
        "a10": 768,  # AWS g5.48xlarge, 8 A10G: 768 GiB
        "mi300x": 1850,  # Azure ND MI300X v5, 8 MI300X: 1,850 GiB
    }
)
"""Host memory of a node with HOST_DEVICES devices, in GiB. An RTX 4090 has no usual host."""
HOST_SHARE = 0.75
"""How much of a host's memory plans may use if it is not stated. An assumption; the rest is for the system, ranks,
rows and libraries."""


def usual_host_bytes(device: Datasheet, devices_per_node: int) -> int:
    """Return the host memory that plans may use on a node if it is not stated; 0 (no limit) if unknown.

    A usual host's memory is known for eight devices; a smaller node gets its share.
    """
    return int(devices_per_node * device.host_bytes * HOST_SHARE)


PRODUCT_SHARES: Mapping[str, float] = MappingProxyType({"mi300x": 0.6})
"""Products of the MI300X reach some 45% of its peak, in all formats, its memory 81% (aiweekly.co/alerts/
amd-mi300x-hits-only-45-of-peak-flops-in-practice, of a paper): 0.6 of our 0.77."""
ATTENTION_SHARES: Mapping[str, float] = MappingProxyType(
    {"a100-80": 0.65, "a100-40": 0.65, "l40s": 0.65, "a10": 0.65, "rtx4090": 0.65, "b200": 0.15}
)
"""Flash attention 2 reaches 50% to 73% of the peak of the GPUs that it was written for (arXiv:2307.08691) and 35% on an
H100 (arXiv:2407.08608). On others it is assumed to be as fast as on an H100."""


def _printed(
    name: str, half: float, full: float, memory: float, gib: float, link: float, host: float, source: str
) -> Datasheet:
    """Read TFLOP/s and GB/s as datasheets print them, links per direction, and the GiB that its driver reports."""
    return Datasheet(
        name,
        half * 1e12,
        full * 1e12,
        memory * 1e9,
        int(gib * GIB),
        link * 1e9,
        host * 1e9,
        source,
        host_bytes=HOST_GIB.get(name, 0) * GIB // HOST_DEVICES,
        product_share=PRODUCT_SHARES.get(name, 1.0),
        attention_share=ATTENTION_SHARES.get(name, 0.35),
    )


_KINDS = (
    _printed("h100", 989, 67, 3350, 79.1, 450, 64, "NVIDIA H100 datasheet, SXM5: NVLink 4, PCIe 5 x16"),
    _printed("h200", 989, 67, 4800, 139.7, 450, 64, "NVIDIA H200 datasheet, SXM: NVLink 4, PCIe 5 x16"),
    _printed("a100-80", 312, 19.5, 2039, 79.1, 300, 32, "NVIDIA A100 80GB datasheet, SXM: NVLink 3, PCIe 4"),
    _printed("a100-40", 312, 19.5, 1555, 39.4, 300, 32, "NVIDIA A100 40GB datasheet, SXM: NVLink 3, PCIe 4"),
    _printed("v100-32", 125, 15.7, 900, 31.7, 150, 16, "NVIDIA V100 datasheet, SXM2 32GB: NVLink 2, PCIe 3"),
    _printed("v100-16", 125, 15.7, 900, 15.7, 150, 16, "NVIDIA V100 datasheet, SXM2 16GB: NVLink 2, PCIe 3"),
    Datasheet("cpu", 0.0, 0.0, 0.0, 0, 0.0, 0.0, "measured by a profile only", measured=True),
    _printed("l40s", 362, 91.6, 864, 44.5, 32, 32, "NVIDIA L40S datasheet: PCIe 4 x16, no NVLink"),
    _printed("a10", 125, 31.2, 600, 22.0, 32, 32, "NVIDIA A10 datasheet: PCIe 4 x16, no NVLink"),
    _printed("rtx4090", 165, 82.6, 1008, 23.5, 32, 32, "NVIDIA Ada architecture whitepaper, RTX 4090: PCIe 4 x16"),
    _printed("b200", 2250, 75, 8000, 178.4, 900, 64, "NVIDIA DGX B200 datasheet: NVLink 5, PCIe 5 x16"),
    _printed("mi300x", 1307, 163.4, 5300, 191.5, 448, 64, "AMD Instinct MI300X data sheet: 7 Infinity Fabric links"),
)
DATASHEETS: Mapping[str, Datasheet] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Dense peaks; memory is what CUDA reports, somewhat less than what is sold. The V100 has no bfloat16: its tensor
cores' float16 peak stands for every format of two bytes."""
NO_BFLOAT16 = ("v100-32", "v100-16")
"""Kinds that can be planned and that a run refuses (`files.gpus.LEAST_CAPABILITY`). No library lists them by name:
torch and vLLM ask the device, and a plan has none."""
GPUS: Mapping[str, Datasheet] = MappingProxyType({k: kind for k, kind in DATASHEETS.items() if not kind.measured})
"""The datasheets of GPUs."""

_NETWORKS = (
    Network("roce-3200", 400e9, "3.2 Tbit/s a node: ReaL, section 8"),
    Network("infiniband-200", 25e9, "200 Gbit/s a node: HybridFlow, section 8.1"),
    Network("infiniband-800", 100e9, "around 100 GB/s a node: APP, section VI"),
)
NETWORKS: Mapping[str, Network] = MappingProxyType({network.name: network for network in _NETWORKS})


def datasheet(name: str, field: str = "device", among: Mapping[str, Datasheet] = DATASHEETS) -> Datasheet:
    """Return the datasheet with that name or full product name. Raises InvalidInput for an unknown name.

    >>> datasheet("H100-SXM-80GB").name, datasheet("a100-SXM4-40GB").name, datasheet("NVIDIA GeForce RTX 4090").name
    ('h100', 'a100-40', 'rtx4090')
    """
    plain = re.sub("rtx[ -]", "rtx", name.lower())
    if plain in among:
        return among[plain]
    for kind in among.values():
        family, _, size = kind.name.partition("-")
        if re.search(rf"{family}(?![a-z0-9])", plain) and (not size or f"{size}gb" in plain):
            return kind
    raise InvalidInput(field, name, f"one of {', '.join(among)}, or a product name with its memory in GB")
