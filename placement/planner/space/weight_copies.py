"""Sharing of trained weights: a second reader uses its own copy or the first reader's."""

from collections.abc import Sequence

import numpy as np

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.planner.space.candidates import Candidate
from prefect_rlhf.placement.search.problem import PairNode

FORBIDDEN = 10**12  # microseconds, of a move for which there is no room, and of a copy that is not there


def readers_of(graph: DataflowGraph, call: Call) -> list[Call]:
    """Return the calls that use the weights of a call's role and do not train them."""
    return [other for other in graph if other.role == call.role and other != graph.trained_by(call.role or "")]


def second_reader(graph: DataflowGraph, name: str) -> bool:
    """Return whether a call is the second of two that use trained weights: of more, whose copy is whose is open."""
    call = graph.call(name)
    readers = readers_of(graph, call)
    return graph.trained_by(call.role or "") is not None and len(readers) == 2 and call == readers[1]


def use_of_copy(first: Call, holders: Sequence[Candidate], second: Call, own: Sequence[Candidate]) -> PairNode:
    """Return a node that forbids `second` to use the copy of `first` if mesh, engine or strategy differ.

    The options of `second` are `own`, each with its own copy, and then the same options with the copy of `first`.
    """
    held, used = ([(o.placement.engine, o.placement.strategy) for o in options] for options in (holders, own))
    numbers = {copy: number for number, copy in enumerate(dict.fromkeys((*held, *used)))}
    alike = np.equal.outer([numbers[copy] for copy in held], [numbers[copy] for copy in used])
    microseconds = np.full((3, len(held), 2 * len(used)), FORBIDDEN, dtype=np.int64)
    microseconds[:, :, : len(used)] = 0
    microseconds[2, :, len(used) :][alike] = 0
    return PairNode(f"copy of {first.name}", first.name, second.name, "second", microseconds)
