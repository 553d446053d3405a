"""Transfers and computations that bring rows to a call: which of them are certain, and their usual number.

Each occupies its devices at least for as long as the controller needs to start it.
"""

from collections import Counter
from collections.abc import Iterator

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.planner.space.candidates import Candidate


def surely_fed(call: Call, candidate: Candidate, graph: DataflowGraph) -> bool:
    """Whether the call certainly has its own transfer on all of its devices, after all its dependencies.

    This is the case if only this call reads the result of a computation, on a single device, and works on it with more
    devices. Whether the transfer follows the reload of the call's own copy over the host link is uncertain.
    """
    strategy = candidate.placement.strategy
    several = strategy.tp > 1 or (strategy.dp > 1 and call.num_items // call.mini_batches > 1)
    return several and candidate.placement.offload == "none" and len(call.by_row_set) == 1 and _reads_alone(call, graph)


def nodes_before(call: Call, graph: DataflowGraph) -> int:
    """Return how many transfers and computations usually run between a call and the calls that it waits for."""
    return int(bool(graph.reads_of(call.name))) + 2 * len(set(_computations(call, graph)))


def _reads_alone(call: Call, graph: DataflowGraph) -> bool:
    """Whether a call reads a key of a computation that no other call reads."""
    readers: Counter[tuple[str, str]] = Counter()
    for other in graph:
        readers.update((producer, key) for producer, keys in graph.reads_of(other.name).items() for key in set(keys))
    made = ((name, key) for name, keys in graph.reads_of(call.name).items() for key in keys)
    return any(graph.call(name).kind == "compute" and readers[name, key] == 1 for name, key in made)


def _computations(call: Call, graph: DataflowGraph) -> Iterator[str]:
    """Yield the computations whose results reach a call through computations alone."""
    for name in graph.reads_of(call.name):
        if graph.call(name).kind == "compute":
            yield name
            yield from _computations(graph.call(name), graph)
