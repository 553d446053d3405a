"""How a training state moves from ranks' host memory to an engine on other ranks, region by region."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prefect_rlhf.engines.commands import StateMove, StateRegion
from prefect_rlhf.engines.engine import StateKind
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.layout.regions import Region, intersection, num_elements


def state_moves(
    held: Mapping[int, Iterable[StateRegion]], lacking: Mapping[int, Iterable[StateRegion]]
) -> tuple[StateMove, ...]:
    """Return the moves that fill each rank's lacking regions, ordered by kind and parameter.

    The held regions must not overlap. Raises RlhfError if the ranks do not hold all lacking elements.

    >>> half = [StateRegion("main", "norm", ((0, 2),)), StateRegion("main", "norm", ((2, 4),))]
    >>> moves = state_moves({0: half[:1], 1: half[1:]}, {1: [StateRegion("main", "norm", ((1, 4),))]})
    >>> [(move.source, move.common) for move in moves]
    [(0, ((1, 2),)), (1, ((2, 4),))]
    """
    holders: dict[tuple[StateKind, str], list[tuple[int, Region]]] = defaultdict(list)
    for rank, regions in sorted(held.items()):
        for kind, parameter, region in regions:
            holders[kind, parameter].append((rank, region))
    moves: list[StateMove] = []
    for target, regions in sorted(lacking.items()):
        for kind, parameter, region in regions:
            of_region = [
                StateMove(source, target, kind, parameter, other, region)
                for source, other in holders[kind, parameter]
                if intersection(other, region) is not None
            ]
            found = sum(num_elements(move.common) for move in of_region)
            if found != num_elements(region):
                raise RlhfError(f"the ranks hold {found} of {num_elements(region)} elements of {kind} {parameter}")
            moves += of_region
    return tuple(sorted(moves, key=round_of))


def round_of(move: StateMove) -> tuple[str, str]:
    """Return the round of a move: the moves of a parameter go together."""
    return move.kind, move.parameter
