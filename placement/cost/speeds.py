"""Speeds that a probe measured on a kind of device. They replace a datasheet's peaks and engines' constants."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ConfigDict, PositiveFloat, TypeAdapter

from prefect_rlhf.errors.wrong_setting import refusing_invalid
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.models.model import Dtype

PROBED = "a probe of this machine"
"""The source of a datasheet that holds measured speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds that a device reached while all leased devices of its node did the same work.

    Bytes are per second, a link's in each direction. None means not measured; a single device has no link.
    """

    dtype: Dtype
    product_flops: PositiveFloat
    """FLOP/s of matrix products in `dtype`."""
    decoding_flops: PositiveFloat | None = None
    """FLOP/s of products in a decoding step of FEW_ROWS rows."""
    further_rows_flops: PositiveFloat | None = None
    """FLOP/s that further rows, at least as many, add to them."""
    memory_bytes_per_second: PositiveFloat
    """Reads and writes of device memory."""
    host_bytes_per_second: PositiveFloat
    """Copies between device and host."""
    elementwise_bytes_per_second: PositiveFloat | None = None
    """Element-wise work, in the bytes that the cost model counts for a layer outside of its products."""
    link_bytes_per_second: PositiveFloat | None = None
    """The link between two devices."""
    link_latency_seconds: PositiveFloat | None = None
    """The time of a small message."""
    megatron_layer_seconds: PositiveFloat | None = None
    """The part of a layer's decoding step that does not depend on its size."""
    vllm_layer_seconds: PositiveFloat | None = None
    """The same in vLLM."""
    busy: float = 0.0
    """The share of the cores that other programs used during the probe, from 0 to 1."""

    def on(self, hardware: Hardware) -> Hardware:
        """Return a node that reaches these speeds: peaks are scaled, because kernels reach a share of each peak."""
        reached, sheet, link = hardware.efficiency, hardware.device, self.link_bytes_per_second
        elementwise, memory = self.elementwise_bytes_per_second, self.memory_bytes_per_second
        decoding = self.decoding_flops
        further = max(decoding, self.further_rows_flops or decoding) if decoding else None
        peak: dict[str, Any] = {f"{self.dtype}_flops": self.product_flops / reached.matmul}
        device = replace(
            sheet,
            memory_bytes_per_second=memory / reached.memory,
            elementwise_share=min(1.0, elementwise / memory) if elementwise else sheet.elementwise_share,
            decoding_share=min(1.0, decoding / self.product_flops) if decoding else sheet.decoding_share,
            further_rows_share=min(1.0, further / self.product_flops) if further else sheet.further_rows_share,
            host_bytes_per_second=self.host_bytes_per_second / reached.link,
            link_bytes_per_second=link / reached.link if link else sheet.link_bytes_per_second,
            product_share=1.0,
            source=PROBED,
            **peak,
        )
        efficiency = replace(
            reached,
            link_latency_seconds=self.link_latency_seconds or reached.link_latency_seconds,
            eager_layer_seconds=self.megatron_layer_seconds or reached.eager_layer_seconds,
            graph_layer_seconds=self.vllm_layer_seconds or reached.graph_layer_seconds,
        )
        return replace(hardware, device=device, efficiency=efficiency)

    def better(self, other: Speeds) -> Speeds:
        """Return the better of each speed, because other programs can only make a measurement slower.

        The speed of element-wise work comes from a difference of measurements, which may err in both directions, so the
        less busy probe's is used.
        """
        better: dict[str, Any] = {
            field.name: _better(field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
            if field.name != "dtype"
        }
        known = [speeds for speeds in (self, other) if speeds.elementwise_bytes_per_second]
        if known:
            quieter = min(known, key=lambda speeds: speeds.busy)
            better["elementwise_bytes_per_second"] = quieter.elementwise_bytes_per_second
        return replace(self, **better)

    def __str__(self) -> str:
        words = [
            f"{self.dtype} products {self.product_flops / 1e9:.3g} GFLOP/s",
            f"memory {self.memory_bytes_per_second / 1e9:.3g} GB/s",
            f"host {self.host_bytes_per_second / 1e9:.3g} GB/s",
        ]
        if self.elementwise_bytes_per_second:
            words.append(f"element-wise {self.elementwise_bytes_per_second / 1e9:.3g} GB/s")
        if self.link_bytes_per_second:
            words.append(f"between devices {self.link_bytes_per_second / 1e9:.3g} GB/s")
        layers = {"Megatron": self.megatron_layer_seconds, "vLLM": self.vllm_layer_seconds}
        decoding = [f"{name} {seconds * 1e3:.3g} ms" for name, seconds in layers.items() if seconds]
        if decoding:
            words.append(f"a decoded layer {' and '.join(decoding)}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class KnownSpeeds:
    """A machine's speeds in each probed format; `machine` identifies its hardware and software."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    machine: str
    by_dtype: tuple[Speeds, ...]

    def on(self, hardware: Hardware) -> Hardware:
        """Return a node with these speeds."""
        for speeds in self.by_dtype:
            hardware = speeds.on(hardware)
        return hardware

    def to_json(self) -> str:
        """Return it as JSON, readable."""
        return _ADAPTER.dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, field: str) -> KnownSpeeds:
        """Read the output of `to_json`. Raises a one-line InvalidInput for any other text."""
        with refusing_invalid(field, "the speeds of a probe"):
            return _ADAPTER.validate_json(text)


def _better(name: str, first: float | None, second: float | None) -> float | None:
    known = [value for value in (first, second) if value is not None]
    is_least = name == "busy" or name.endswith("_seconds")
    return (min if is_least else max)(known, default=None)


_ADAPTER: TypeAdapter[KnownSpeeds] = TypeAdapter(KnownSpeeds)
