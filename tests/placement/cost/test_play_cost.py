"""Seconds of a generate whose rows are plays: turns, what the environment writes, and how long it takes."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from prefect_rlhf.placement.cost.call import Execution
from prefect_rlhf.placement.cost.workload import CallWork, LengthDistribution, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import PlayBounds
from tests.placement.cost.test_call_cost import cost

PLAY = PlayBounds("{}", max_tokens=512, max_turns=8, turns=4, observed=100, seconds=0.5)
WORK = CallWork("generate", 64, Workload.fixed(256, 512))


@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_a_row_waits_for_every_answer_but_the_last_turns(engine):
    execution = Execution(Strategy(), engine=engine)
    quick = cost(replace(WORK, play=replace(PLAY, seconds=0.0)), execution)
    slow = cost(replace(WORK, play=PLAY), execution)
    assert slow.environment == 3 * 0.5
    assert slow._replace(environment=0) == quick


@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_more_turns_prefill_more(engine):
    execution = Execution(Strategy(), engine=engine)
    few, many = (cost(replace(WORK, play=replace(PLAY, turns=turns)), execution) for turns in (2, 8))
    assert many.compute > few.compute


def test_tokens_of_the_environment_are_not_decoded():
    """They cost a prefill, which takes many tokens at a time."""
    execution = Execution(Strategy(), engine="vllm")
    little, much = (cost(replace(WORK, play=replace(PLAY, observed=observed)), execution) for observed in (0, 400))
    assert much.total < little.total


def test_a_one_turn_play_costs_as_much_as_a_generate():
    execution = Execution(Strategy(), engine="vllm")
    once = cost(replace(WORK, play=replace(PLAY, turns=1, observed=0)), execution)
    assert once.total == pytest.approx(cost(WORK, execution).total, rel=0.02)


@pytest.mark.parametrize("wait", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("deviation", [0.0, 0.745])
def test_the_estimate_is_at_most_a_tenth_above_a_simulation_of_each_row(wait, deviation):
    """It counts no step that is faster because rows wait. Rows of equal turns wait together: then it is exact."""
    rows, turns, draw = 64, 4, random.Random(0)
    execution = Execution(Strategy(), engine="vllm")
    drawn = [[max(1, round(draw.lognormvariate(4, deviation))) for _ in range(turns)] for _ in range(rows)]
    of_all = {length: count / rows for length, count in Counter(map(sum, drawn)).items()}
    once, twice = (
        [cost(CallWork("generate", each, Workload.fixed(256, length)), execution).total for each in range(1, rows + 1)]
        for length in (128, 129)
    )
    step_seconds = [0.0, *(two - one for one, two in zip(once, twice, strict=True))]
    workload = replace(Workload.fixed(256, 128), responses=LengthDistribution.of(of_all))
    work = CallWork("generate", rows, workload)
    play = replace(PLAY, turns=turns, observed=0, seconds=wait)
    without, estimate = (cost(replace(work, play=each), execution).total for each in (None, play))
    decoding = by_row(drawn, step_seconds.__getitem__, 0.0)
    truth = without - decoding + by_row(drawn, step_seconds.__getitem__, wait)
    assert 0.99 < estimate / truth < 1.1


def by_row(lengths: Sequence[Sequence[int]], step_seconds: Callable[[int], float], tool: float) -> float:
    """Return the seconds until all rows are over; a row with turns of these `lengths` goes on once it has its answer.

    `step_seconds` are those of a step by its number of rows.
    """
    turn, left = [0] * len(lengths), [each[0] for each in lengths]
    running, waiting, now = set(range(len(lengths))), list[tuple[float, int]](), 0.0
    while running or waiting:
        now = now if running else max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            running.add(heapq.heappop(waiting)[1])
        now += step_seconds(len(running))
        for each in tuple(running):
            left[each] -= 1
            if not left[each]:
                running.remove(each)
                turn[each] += 1
                if turn[each] < len(lengths[each]):
                    left[each] = lengths[each][turn[each]]
                    heapq.heappush(waiting, (now + tool, each))
    return now
