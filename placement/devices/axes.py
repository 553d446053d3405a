"""The axes of parallelism: the work that each divides, its communication, and the order of devices along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis along which devices share the work of a call."""

    name: str
    """Its key in a plan file, its name in `-p placement.CALL.AXIS=`, and its field of a strategy, if it is offered."""
    title: str
    """Its name for people."""
    description: str
    """Its line in a form and on the page of parameters."""
    divides: str
    """Which part of the work its devices divide."""
    communicates: str
    """Which devices exchange data for it, and when."""
    within: str | None = None
    """The axis that it divides further, so that it takes no devices of its own."""
    is_offered: bool = True
    """Whether some engine offers it. Without an engine a plan that states it is refused."""


DP = Axis(
    name="dp",
    title="data parallelism",
    description="Data-parallel replicas.",
    divides="rows",
    communicates="replicas sum gradients, and share new weights, once an optimizer step",
)
TP = Axis(
    name="tp",
    title="tensor parallelism",
    description="Devices that share each layer.",
    divides="the products of each layer: heads, columns, vocabulary",
    communicates="the devices of a stage of a replica, twice a layer",
)
PP = Axis(
    name="pp",
    title="pipeline parallelism",
    description="Stages of a pipeline of layers.",
    divides="layers",
    communicates="neighbouring stages, once a micro-batch",
)
EP = Axis(
    name="ep",
    title="expert parallelism",
    description="Replicas that divide the experts of a mixture.",
    divides="the experts of a mixture",
    communicates="the replicas that share experts send tokens to each other, twice a layer",
    within="dp",
)
CP = Axis(
    name="cp",
    title="context parallelism",
    description="Devices that share the tokens of each row.",
    divides="the tokens of each row",
    communicates="the devices of a row exchange keys and values in each layer's attention",
    is_offered=False,
)
AXES: Mapping[str, Axis] = MappingProxyType({axis.name: axis for axis in (DP, TP, PP, EP, CP)})
"""Every axis by its name, in the order in which people read them."""
OFFERED: tuple[str, ...] = tuple(name for name, axis in AXES.items() if axis.is_offered)
"""The axes of a strategy."""
INNERMOST_FIRST = ("tp", "cp", "dp", "pp")
"""The order of a mesh's devices, as in Megatron: tp varies fastest, then cp, then dp, then pp."""
ORDER: tuple[str, ...] = tuple(name for name in INNERMOST_FIRST if AXES[name].is_offered)
"""The axes of a strategy with devices of their own, in that order."""
