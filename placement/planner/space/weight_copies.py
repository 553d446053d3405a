"""Sharing trained weights: a second reader has its own copy or uses the first reader's."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.planner.space.candidates import Candidate
from prefect_rlhf.placement.search.problem import PairNode

FORBIDDEN = 10**12  # microseconds, of a move for which there is no room, and of a copy that is not there


def readers_of(graph: DataflowGraph, call: Call) -> list[Call]:
    """Return the calls that use a call's weights without training them."""
    return [other for other in graph if other.role == call.role and other != graph.trained_by(call.role or "")]


def second_reader(graph: DataflowGraph, name: str) -> bool:
    """Whether a call is the second of exactly two readers of trained weights; with more, it is open who shares with
    whom.
    """
    call = graph.call(name)
    readers = readers_of(graph, call)
    return graph.trained_by(call.role or "") is not None and len(readers) == 2 and call == readers[1]


def use_of_copy(first: Call, holders: Sequence[Candidate], second: Call, own: Sequence[Candidate]) -> PairNode:
    """Return a node that keeps `second` from using the copy of `first` if mesh, engine or strategy differ.

    The options of `second` are `own`, each with its own copy, followed by the same options with the copy of `first`.
    """
    held, used = ([(o.placement.engine, o.placement.strategy) for o in options] for options in (holders, own))
    held_kinds, used_kinds = ({copy: kind for kind, copy in enumerate(dict.fromkeys(each))} for each in (held, used))
    alike = np.array([[one == other for other in used_kinds] for one in held_kinds])
    microseconds = np.full((3, len(held_kinds), 2 * len(used_kinds)), FORBIDDEN, dtype=np.int64)
    microseconds[:, :, : len(used_kinds)] = 0
    microseconds[2, :, len(used_kinds) :][alike] = 0
    of_second = np.array([used_kinds[copy] for copy in used])
    kinds = np.array([held_kinds[copy] for copy in held]), np.concatenate([of_second, of_second + len(used_kinds)])
    return PairNode(f"copy of {first.name}", first.name, second.name, "second", microseconds, kinds)


def with_unmoved(move: PairNode) -> PairNode:
    """Return a move with each option of its second call twice, the second time without the move."""
    microseconds = np.concatenate([move.microseconds, np.zeros_like(move.microseconds)], axis=-1)
    assert move.kinds is not None  # weight moves have them
    first, second = move.kinds
    return replace(
        move, microseconds=microseconds, kinds=(first, np.concatenate([second, second + move.microseconds.shape[-1]]))
    )
