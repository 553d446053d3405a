"""The table of moves, read in bulk, says what each of its keys says; a wrong key among many is named."""

from random import Random

import pytest

from benchmarks.planner import move_table
from benchmarks.planner.move_table import moves_between
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.strategy import Strategy

STRATEGIES = [Strategy(dp, tp, pp) for dp in (1, 3, 10) for tp in (1, 2) for pp in (1, 12)]


def key(size: int, source: Strategy, target: Strategy) -> str:
    return ",".join(map(str, (size, source.pp, source.tp, source.dp, target.pp, target.tp, target.dp)))


def table() -> dict[str, float]:
    """Of two sizes; some moves are left out, some are to strategies that no call has."""
    random = Random(0)
    ends = [*STRATEGIES, Strategy(99, 1, 1), Strategy(1 << 40, 1, 1)]
    moves = [(size, source, target) for size in (7, 70) for source in ends for target in ends]
    return {key(*move): random.randrange(1000) + 0.25 for move in moves if random.random() < 0.9}


@pytest.mark.parametrize("at_once", [1, 10, 1_000_000])
def test_a_move_takes_the_seconds_of_its_key(monkeypatch, at_once):
    """However the table is cut into parts: 0 where there is no key, and between equal strategies."""
    monkeypatch.setattr(move_table, "AT_ONCE", at_once)
    moves = moves_between(table(), {7: STRATEGIES[:8], 70: STRATEGIES})
    for size, sources, targets in [(7, STRATEGIES[:8], STRATEGIES[2:5]), (70, STRATEGIES[::-1], STRATEGIES)]:
        expected = [[0 if a == b else round(table().get(key(size, a, b), 0)) for b in targets] for a in sources]
        assert expected == moves[size].between(sources, targets).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "7,1,1,1,1,1",
        "7,1,1,1,1,1,1,1",
        "7,1,1,,1,1,1",
        "7,1,1,-1,1,1,1",
        "7,1,1,1,1,1,1\n7",
        ",7,1,1,1,1,1",
        "\u0667",
    ],
)
def test_a_wrong_key_among_many_is_named(wrong):
    """Also one that other wrong keys would make up for."""
    entries = {**table(), wrong: 1.0, "7,1,1,1,1,1,1,1": 2.0, "7,1,1,1,1": 2.0}
    with pytest.raises(InvalidInput) as raised:
        moves_between(entries, {7: STRATEGIES})
    assert repr(wrong) in str(raised.value)
