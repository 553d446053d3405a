"""Seconds of a generate whose rows are plays: turns, what the environment writes, and how long it takes."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.cost.call import Execution
from prefect_rlhf.placement.cost.workload import CallWork, Workload
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


def test_a_play_of_a_turn_costs_what_a_generate_costs():
    execution = Execution(Strategy(), engine="vllm")
    once = cost(replace(WORK, play=replace(PLAY, turns=1, observed=0)), execution)
    assert once.total == pytest.approx(cost(WORK, execution).total, rel=0.02)
