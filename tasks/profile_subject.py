"""What a profile is of: two subjects that are equal take the same times."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.placement.lease import DeviceKind
from prefect_rlhf.placement.model import Dtype, TransformerShape


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: a shape and format, on `num_devices` devices of one kind, named as the cost model names it."""

    shape: TransformerShape
    dtype: Dtype
    kind: DeviceKind
    device: str
    num_devices: int
    processor: str
    versions: tuple[tuple[str, str], ...]
