"""Runtimes: the software whose step time is predicted, each with its constants and their source."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.node_hardware import RUNTIME
from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency, Hardware
from prefect_rlhf.placement.planner.question import Site


@dataclass(frozen=True, slots=True)
class Runtime:
    """Engines, their hosts and a controller: constants that lead from a datasheet's peaks to call times."""

    name: str
    efficiency: Efficiency
    source: str


OURS = Runtime("prefect-rlhf", RUNTIME, "readings of an H100")
"""Our engines, which a run's predictions assume."""
PUBLIC = Runtime("public", replace(RUNTIME, matmul=0.62, taken_layer_seconds=0.43), "half of the public runs")
"""One runtime for all public runs, NeMo-RL, verl and prime-rl of 2025 and 2026. Two constants differ from ours. They
were fitted to half of the runs (benchmarks/public_runs.py): what products reach within a whole engine, and the host's
work for a layer until a rollout begins: weights into the engine, and the memory that both engines share."""
RUNTIMES: Mapping[str, Runtime] = MappingProxyType({runtime.name: runtime for runtime in (OURS, PUBLIC)})


def runtime(name: str) -> Runtime:
    """Return the runtime of that name. Raises InvalidInput for any other name."""
    if name not in RUNTIMES:
        raise InvalidInput("runtime", name, " or ".join(RUNTIMES))
    return RUNTIMES[name]


def with_runtime(site: Site, other: Runtime, call_seconds: float | None = None) -> Site:
    """Return a site of GPUs with the constants of another runtime, and with `call_seconds` if stated.

    Raises InvalidInput for CPUs, which have constants of our runtime alone.
    """
    if site.backend == "cpu":
        raise InvalidInput("runtime", other.name, f"{OURS.name}, or a cluster of GPUs")
    stated = other.efficiency if call_seconds is None else replace(other.efficiency, call_seconds=call_seconds)
    nodes = tuple(replace(node, efficiency=stated) for node in site.sources.nodes)
    return replace(site, sources=replace(site.sources, nodes=nodes))


def runtime_of(node: Hardware) -> Runtime | None:
    """Return the runtime with a node's constants, apart from `call_seconds`; None if no runtime has them."""
    alike = (each for each in RUNTIMES.values() if each.efficiency == _with_call_of(node.efficiency, each.efficiency))
    return next(alike, None)


def _with_call_of(efficiency: Efficiency, other: Efficiency) -> Efficiency:
    return replace(efficiency, call_seconds=other.call_seconds)
