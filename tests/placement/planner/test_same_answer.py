"""The same question has the same answer: neither the clock nor the order of sets in memory has a say."""

import itertools
import os
import subprocess
import sys
import time

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.search.budget import EVALUATIONS, Budget, Meter
from tests.placement.planner.test_planner import GRAPHS, question
from tests.support.cases import first

EVALUATED = 30_000
PROGRAM = """
from prefect_rlhf.placement.planner.best_plan import plan_graph
from tests.placement.planner.test_planner import GRAPHS, question
from tests.placement.planner.test_same_answer import EVALUATED, answer
print(answer(plan_graph(question(GRAPHS["ppo"]), evaluations=EVALUATED)))
"""


def answer(found: Planned) -> str:
    """All that a search decides."""
    return repr((found.plan.placements, found.seconds, found.lower_bound_seconds, found.search.evaluations))


@pytest.fixture(scope="module")
def as_it_is():
    return answer(plan_graph(question(GRAPHS["ppo"]), evaluations=EVALUATED))


@pytest.mark.all
@pytest.mark.parametrize("step", [1e3, 1e-9])
def test_no_clock_decides(monkeypatch, as_it_is, step):
    """However fast or slow a machine is: processor time passes by nanoseconds, or by a quarter of an hour a reading."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: next(ticks) * step)
    assert answer(plan_graph(question(GRAPHS["ppo"]), evaluations=EVALUATED)) == as_it_is


@pytest.mark.parametrize(("seeds", "busy"), first(1, [(["1"], 0), (["1", "2"], 1)]))
def test_another_process_with_other_hashes_has_the_same_answer(as_it_is, seeds, busy):
    """Its sets iterate in another order. In `make test-all` two processes at once, beside a busy one."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, "PYTHONHASHSEED": seed},
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in seeds
        ]
        printed = [each.communicate(timeout=300)[0].splitlines()[-1] for each in started]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert printed == [as_it_is] * len(seeds)


def test_a_budget_is_in_evaluations_unless_seconds_are_asked_for():
    assert Budget.of().evaluations == EVALUATIONS
    assert Budget.of(seconds=2.0).evaluations == float("inf")
    meter = Meter(Budget(evaluations=10))
    meter.spend(4)
    assert (meter.left, meter.left.is_spent) == (Budget(evaluations=6), False)
    meter.spend(6)
    assert meter.left.is_spent


@pytest.mark.parametrize("evaluations", [0, -1, float("nan")])
def test_a_number_of_evaluations_that_is_not_positive_is_refused(evaluations):
    with pytest.raises(InvalidInput, match="evaluations: got .*, expected more than 0 evaluations"):
        plan_graph(question(GRAPHS["dpo"]), evaluations=evaluations)
