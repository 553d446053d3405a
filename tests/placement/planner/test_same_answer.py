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
from tests.cases import first
from tests.placement.planner.test_planner import GRAPHS, question

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


@pytest.mark.parametrize("step", first(1, [1e3, 1e-9]))
def test_no_clock_decides(monkeypatch, step):
    """However fast or slow a machine is: processor time passes by nanoseconds, or by a quarter of an hour a reading."""
    asked = question(GRAPHS["ppo"])
    as_it_is = answer(plan_graph(asked, evaluations=EVALUATED))
    ticks = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: next(ticks) * step)
    assert answer(plan_graph(question(GRAPHS["ppo"]), evaluations=EVALUATED)) == as_it_is


def test_another_process_with_other_hashes_under_load_has_the_same_answer():
    """Two processes at once, beside a busy one: their sets iterate in other orders."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, "PYTHONHASHSEED": seed},
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in ("1", "2")
        ]
        printed = [each.communicate(timeout=300)[0].splitlines()[-1] for each in started]
    finally:
        busy.kill()
        busy.wait()
    assert printed == [answer(plan_graph(question(GRAPHS["ppo"]), evaluations=EVALUATED))] * 2


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
