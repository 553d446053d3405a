"""The regret of an answer: how much slower it is than the best known plan if a constant is wrong."""

from math import inf

import pytest

from benchmarks.planner.referee import asked, questions
from benchmarks.planner.regret import QUESTIONS, Change, Regrets, regrets, seconds_under, summary
from prefect_rlhf.placement.cost.datasheets.correction import CONSTANTS, Correction
from prefect_rlhf.placement.planner.attempts import NEARLY
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.fitted_constants import corrected
from prefect_rlhf.placement.schedule.changed_constants import CHANGES, FACTORS

GRPO = next(line for line in questions() if line.startswith("grpo") and "1x8" in line)
DPO = next(line for line in questions() if line.startswith("dpo") and "1x8" in line)


def test_the_questions_are_eight_of_the_list():
    assert len(set(QUESTIONS)) == 8
    assert max(QUESTIONS) <= len(questions())


@pytest.mark.all
def test_the_best_known_plan_is_at_least_as_fast_as_the_answer_and_as_a_search_that_knows_the_change():
    """Under no change does the pool lose against a plan that was put in it."""
    change = Correction(eager_launch=2.0)
    found = regrets(DPO, asked(DPO), [change], evaluations=2000, search_evaluations=2000)
    assert [(each.constant, each.factor) for each in found.changes] == list(CHANGES)
    assert len(CHANGES) == len(CONSTANTS) * len(FACTORS) == 32
    assert found.seconds >= found.best > 0
    assert all(inf > each.seconds >= each.best > 0 for each in found.changes)
    assert 0 <= found.steadiest <= found.worst or found.seconds > found.best * (1 + NEARLY)
    answer = plan_graph(corrected(asked(DPO), change), evaluations=2000).plan
    (alone,) = seconds_under(asked(DPO), answer, [change])
    (doubled,) = (each for each in found.changes if (each.constant, each.factor) == ("eager_launch", 2.0))
    assert doubled.best <= alone


def test_the_sums_count_the_changes_above_each_limit():
    changes = (Change("compute", 0.5, 1.2, 1.0), Change("compute", 2.0, 2.0, 2.0), Change("call", 2.0, 1.07, 1.0))
    dpo = Regrets("dpo", 1.0, 1.0, 2, (Change("link", 2.0, 1.0, 1.0),), 0.0)
    sums = summary([Regrets("ppo", 1.1, 1.0, 3, changes, 0.15), dpo])
    assert (sums["questions"], sums["changes"], sums["above_5_percent"], sums["above_10_percent"]) == (2, 4, 2, 1)
    assert (sums["worst"], sums["median_worst"], sums["worst_of_steadiest"]) == pytest.approx((0.2, 0.1, 0.15))
    assert sums["seconds_lost"] == pytest.approx(0.05)
    assert sums["constants"]["call"] == pytest.approx(0.07)
    assert sums["constants"]["host"] == 0


@pytest.mark.all
def test_the_answer_stays_close_to_the_best_if_launches_of_kernels_take_twice_as_long():
    """The fastest plan of GRPO is 12% slower then than a plan that is 1% slower now."""
    change = Correction(eager_launch=2.0)
    question = asked(GRPO)
    found = plan_graph(question)
    knowing = plan_graph(corrected(question, change), evaluations=40_000).plan
    mine, best = (seconds_under(question, plan, [Correction(), change]) for plan in (found.plan, knowing))
    assert mine[0] == pytest.approx(found.seconds) and found.seconds <= found.fastest_seconds * (1 + NEARLY)
    assert mine[1] <= best[1] * 1.05
