"""Corrects a datasheet's constants: a factor on the seconds that each of them causes.

A constant's factor applies to all calls that depend on it, under every plan. A factor for a call would not apply to the
same call under another plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from math import exp

from prefect_rlhf.placement.cost.datasheets.hardware import Hardware

SHOWN = 1.1  # a factor nearer to 1 is not mentioned


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factors on seconds: 2 means that a constant's work takes twice as long as by the datasheet.

    >>> print(Correction(compute=0.15, link=2.7))
    compute 6.67 times as fast, link 2.7 times as slow
    """

    compute: float = 1.0
    """For matrix products."""
    memory: float = 1.0
    """For reads and writes of device memory."""
    link: float = 1.0
    """For messages within a node."""
    network: float = 1.0
    """For messages between nodes."""
    host: float = 1.0
    """For copies between device and host."""
    eager_launch: float = 1.0
    """For launching a layer's kernels without CUDA graphs."""
    graph_launch: float = 1.0
    """For launching them with CUDA graphs, and for the host's work for a decoding step."""
    call: float = 1.0
    """For the fixed part of a call, and the host's work to take new weights."""

    @classmethod
    def of_logs(cls, logs: Iterable[float]) -> Correction:
        """Return the correction with these logarithms of factors, in the order of `CONSTANTS`."""
        return cls(**{name: exp(log) for name, log in zip(CONSTANTS, logs, strict=True)})

    def on(self, hardware: Hardware) -> Hardware:
        """Return a node with corrected constants."""
        sheet, reached, network = hardware.device, hardware.efficiency, hardware.network
        device = replace(
            sheet,
            bfloat16_flops=sheet.bfloat16_flops / self.compute,
            float32_flops=sheet.float32_flops / self.compute,
            memory_bytes_per_second=sheet.memory_bytes_per_second / self.memory,
            link_bytes_per_second=sheet.link_bytes_per_second / self.link,
            host_bytes_per_second=sheet.host_bytes_per_second / self.host,
        )
        efficiency = replace(
            reached,
            link_latency_seconds=reached.link_latency_seconds * self.link,
            eager_layer_seconds=reached.eager_layer_seconds * self.eager_launch,
            graph_layer_seconds=reached.graph_layer_seconds * self.graph_launch,
            host_step_seconds=reached.host_step_seconds * self.graph_launch,
            host_row_seconds=reached.host_row_seconds * self.graph_launch,
            taken_layer_seconds=reached.taken_layer_seconds * self.call,
            call_seconds=reached.call_seconds * self.call,
        )
        if network is not None:
            network = replace(
                network,
                node_bytes_per_second=network.node_bytes_per_second / self.network,
                latency_seconds=network.latency_seconds * self.network,
            )
        return replace(hardware, device=device, efficiency=efficiency, network=network)

    def __str__(self) -> str:
        words = []
        for name, factor in asdict(self).items():
            times = max(factor, 1 / factor)
            if times >= SHOWN:
                words.append(f"{name.replace('_', ' ')} {times:.3g} times as {'slow' if factor > 1 else 'fast'}")
        return ", ".join(words) or "no constant"


CONSTANTS = tuple(field.name for field in fields(Correction))
"""The names of the corrected constants, in order."""
