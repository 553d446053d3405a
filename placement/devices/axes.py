"""The axes of parallelism: the work that each divides, its communication, and its order of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis along which devices divide the work of a call."""

    name: str
    """Its key in a plan file, its name in `-p placement.CALL.AXIS=`, and its field of a strategy, if it is offered."""
    title: str
    """Its name for people."""
    description: str
    """Its line in a form and on the page of parameters."""
    divides: str
    """Which part of the work its devices divide."""
    communicates: Literal["each layer", "each micro-batch", "each step"]
    """How often its devices exchange data."""
    within: str | None = None
    """The axis that it divides further, so that it takes no devices of its own."""
    is_offered: bool = True
    """Whether some engine offers it. If not, a plan that states it is refused."""


DP = Axis(
    name="dp",
    title="data parallelism",
    description="Data-parallel replicas.",
    divides="rows",
    communicates="each step",  # replicas sum gradients, and share new weights
)
TP = Axis(
    name="tp",
    title="tensor parallelism",
    description="Devices that share each layer.",
    divides="the products of each layer: heads, columns, vocabulary",
    communicates="each layer",  # the devices of a stage sum their products
)
PP = Axis(
    name="pp",
    title="pipeline parallelism",
    description="Stages of a pipeline of layers.",
    divides="layers",
    communicates="each micro-batch",  # neighbouring stages send hidden states
)
EP = Axis(
    name="ep",
    title="expert parallelism",
    description="Replicas that divide the experts of a mixture.",
    divides="the experts of a mixture",
    communicates="each layer",  # tokens go to the replicas that hold their experts
    within="dp",
)
CP = Axis(
    name="cp",
    title="context parallelism",
    description="Devices that share the tokens of each row.",
    divides="the tokens of each row",
    communicates="each layer",  # the devices of a row exchange keys and values
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
WITHIN_NODES: tuple[str, ...] = tuple(name for name in ORDER if AXES[name].communicates == "each layer")
"""The axes with groups of devices that searches keep on a node."""
WITHIN_STEPS: tuple[str, ...] = tuple(name for name in ORDER if AXES[name].communicates != "each step")
"""The axes that make a plan more complex if their groups of devices are on several nodes."""
