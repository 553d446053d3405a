"""Exchanges a training state between ranks: each missing region is assembled and written."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import StateMove, StateRegion
from prefect_rlhf.engines.engine import StateKind, StatePart
from prefect_rlhf.engines.weights.send_receive import send_receive
from prefect_rlhf.engines.weights.state_moves import round_of
from prefect_rlhf.engines.weights.views import within
from prefect_rlhf.placement.layout.regions import Region, shape_of


def exchange_state(
    moves: Sequence[StateMove],
    rank: int,
    held: Sequence[StatePart],
    write: Callable[[StateRegion, Tensor], None],
) -> int:
    """Do this rank's part of the moves; return the bytes that other ranks sent. Collective over the ranks of `moves`.

    `write` gets each region that this rank lacks, complete. Messages carry at most one parameter at a time.
    """
    parts = {(part.kind, part.parameter, part.region): part.values for part in held}
    num_bytes = 0
    own = (move for move in moves if rank in (move.source, move.target))
    for _, of_round in groupby(own, key=round_of):
        num_bytes += _exchange_round(list(of_round), rank, parts, write)
    return num_bytes


def _exchange_round(
    moves: Sequence[StateMove],
    rank: int,
    parts: Mapping[tuple[StateKind, str, Region], Tensor],
    write: Callable[[StateRegion, Tensor], None],
) -> int:
    def piece(move: StateMove) -> Tensor:
        values = parts[move.kind, move.parameter, move.held].view(shape_of(move.held))
        return values[within(move.common, move.held)].contiguous()

    outgoing: dict[int, list[Tensor]] = defaultdict(list)
    incoming: dict[int, list[Tensor]] = defaultdict(list)
    arriving: list[tuple[StateMove, Tensor]] = []
    for move in moves:
        if move.source == rank == move.target:
            arriving.append((move, piece(move)))
        elif move.source == rank:
            outgoing[move.target].append(piece(move))
        else:
            place = torch.empty(shape_of(move.common))
            incoming[move.source].append(place)
            arriving.append((move, place))
    send_receive(outgoing, incoming)
    whole: dict[Region, Tensor] = {}
    for move, values in arriving:
        target = whole.setdefault(move.lacking, torch.empty(shape_of(move.lacking)))
        target[within(move.common, move.lacking)] = values
    for region, values in whole.items():
        write(StateRegion(moves[0].kind, moves[0].parameter, region), values)
    return sum(place.nbytes for places in incoming.values() for place in places)
