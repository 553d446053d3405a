"""Moves of training states: each lacking element comes from its only holder, once."""

import random

import numpy as np
import pytest

from prefect_rlhf.engines.commands import StateRegion
from prefect_rlhf.engines.weights.state_moves import state_moves
from prefect_rlhf.errors.errors import RlhfError


def tiles(rows: int, columns: int, chance: random.Random) -> list[StateRegion]:
    """Regions that cover a matrix without overlap."""
    row_cuts = [0, *sorted(chance.sample(range(1, rows), chance.randint(0, rows - 1))), rows]
    column_cuts = [0, *sorted(chance.sample(range(1, columns), chance.randint(0, columns - 1))), columns]
    return [
        StateRegion("main", "w", ((top, bottom), (left, right)))
        for top, bottom in zip(row_cuts, row_cuts[1:], strict=False)
        for left, right in zip(column_cuts, column_cuts[1:], strict=False)
    ]


def dealt(regions: list[StateRegion], ranks: int, chance: random.Random) -> dict[int, list[StateRegion]]:
    by_rank: dict[int, list[StateRegion]] = {rank: [] for rank in range(ranks)}
    for region in regions:
        by_rank[chance.randrange(ranks)].append(region)
    return by_rank


@pytest.mark.parametrize("seed", range(40))
def test_each_element_comes_once_from_its_holder(seed):
    chance = random.Random(seed)
    rows, columns = chance.randint(1, 6), chance.randint(1, 6)
    held = dealt(tiles(rows, columns, chance), 3, chance)
    owner = np.full((rows, columns), -1)
    for rank, regions in held.items():
        for region in regions:
            owner[tuple(slice(*span) for span in region.region)] = rank
    lacking = dealt(tiles(rows, columns, chance), 4, chance)
    received = {rank: np.zeros((rows, columns), int) for rank in lacking}
    for move in state_moves(held, lacking):
        place = tuple(slice(*span) for span in move.common)
        assert (owner[place] == move.source).all()
        received[move.target][place] += 1
    for rank, regions in lacking.items():
        expected = np.zeros((rows, columns), int)
        for region in regions:
            expected[tuple(slice(*span) for span in region.region)] += 1
        assert (received[rank] == expected).all()


def test_missing_elements_are_refused():
    half = [StateRegion("exp_avg", "norm", ((0, 2),))]
    with pytest.raises(RlhfError, match="hold 2 of 4 elements of exp_avg norm"):
        state_moves({0: half}, {1: [StateRegion("exp_avg", "norm", ((0, 4),))]})
