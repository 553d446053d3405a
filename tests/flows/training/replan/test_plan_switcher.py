"""The decision to switch: when a check is due, what a better plan must save, and the end of poor switches. No clock."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.flows.training.choice.choose_plan import chosen_file
from prefect_rlhf.flows.training.choice.plans_by_step import PLANS_FILE, ChosenAt, check_switch
from prefect_rlhf.flows.training.replan import plan_switcher as switchers
from prefect_rlhf.flows.training.replan.plan_switcher import PlanSwitcher, pace, plan_switcher
from prefect_rlhf.flows.training.replan.price_check import STEPS_AWAITED
from prefect_rlhf.flows.training.spec.plan_choice import read_plans_by_step
from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.planner.fitted_constants import FittedConstants
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.recheck import Recheck
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan
from prefect_rlhf.tasks.running.switch.requests import Switches
from tests.flows.hardware.test_probes import DESK, HELD
from tests.flows.training.replan.test_price_check import GRAPH, PLAN, WORKLOAD, predicted, request

SPLIT = preset("split", GRAPH, DESK, DESK.whole, WORKLOAD.longest, "cpu")
FITTED = FittedConstants(Correction(compute=0.5), 3.0, 1.0)
MEMORY = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}


class Process:
    """A check that has answered."""

    ended = True

    def __init__(self, found):
        self.found = found

    def answer(self):
        if isinstance(self.found, RlhfError):
            raise self.found
        return self.found

    def close(self):
        pass


@pytest.fixture
def checks(own_home, monkeypatch):
    """The steps at which checks began, and what the next check answers."""
    seen = SimpleNamespace(steps=[], found=None)

    def begun(request, plan, spans, journal, least_gain, searched, yields):
        assert not yields, "a run that switches does not wait until its cores are free"
        seen.steps.append(max(span.step for span in spans))
        return Process(seen.found)

    monkeypatch.setattr(switchers, "begun_recheck", begun)
    return seen


def switcher(**options):
    asked = request(**{"replan": "switch", "steps": 200} | options)
    return PlanSwitcher(asked, asked.spec.replanning, [ChosenAt(1, chosen_file(asked, PLAN))], Switches(), 0)


def better(seconds=100.0):
    """A plan that saves a quarter of a step."""
    return Recheck(FITTED, seconds, 0.75 * seconds, SPLIT)


def run_steps(switcher, journal, steps, seconds=100.0, tokens=1000):
    """Let steps of so many seconds and trained tokens end; return the lines."""
    lines = []
    for step in steps:
        span = (f"actor_train@{step}", "", "train_step", "actor_train", step, "", "", ("n0:0",))
        when = step * seconds, (step + 1) * seconds
        journal.record(TaskRunSpan(*span, *when, seconds=seconds, num_tokens=tokens, **MEMORY))
        journal.finish_step(step)
        lines.append(switcher.step_ended(journal))
    return [line for line in lines if line]


@pytest.mark.parametrize(("every", "due"), [(20, [20, 40, 60]), (30, [30, 60])])
def test_checks_come_after_the_first_steps_and_then_every_few(checks, tmp_path, every, due):
    assert run_steps(switcher(replan_every=every), Journal(tmp_path), range(1, 66)) == []
    assert checks.steps == [STEPS_AWAITED, *due]


def test_a_plan_that_pays_is_asked_for_once_and_recorded(checks, tmp_path):
    checks.found, one, journal = better(), switcher(), Journal(tmp_path)
    (line,) = run_steps(one, journal, range(1, 10))
    assert "takes 75 s per step, 25% less than flattening (100 s); the run switches to it, which takes about" in line
    assert one.asks.asked is not None and one.asks.asked.placements == chosen_file(one.request, SPLIT).plan.placements
    run = SimpleNamespace(finished=9, plan=one.asks.take(10).plan)
    later = one.switches(run)
    assert later.step == 10 and later.switch_seconds > 0
    one.switched(run, journal)
    assert [step for step, _ in read_plans_by_step(tmp_path / PLANS_FILE).plans] == [1, 10]


def switched(checks, tmp_path, seconds, tokens=1000):
    """A switcher after a switch that was to save a quarter, and the lines of the steps after it."""
    checks.found, one, journal = better(), switcher(), Journal(tmp_path)
    run_steps(one, journal, range(1, 7))
    run = SimpleNamespace(finished=6, plan=one.asks.take(7).plan)
    one.switches(run)
    one.switched(run, journal)
    checks.steps.clear()
    return one, run_steps(one, journal, range(7, 51), seconds, tokens)


def test_after_a_switch_the_next_check_waits(checks, tmp_path):
    checks.found = better()
    one, lines = switched(checks, tmp_path, 75.0)
    assert lines[0] == "the switch to replanned-1 gained 25% of a step, predicted 25%"
    assert checks.steps == [26] and one.asks.asked is not None


def test_a_switch_that_gained_little_is_the_last(checks, tmp_path):
    one, lines = switched(checks, tmp_path, 90.0)
    assert lines == ["the switch to replanned-1 gained 10% of a step, predicted 25%; no other switch follows"]
    assert checks.steps == [] and one.asks.asked is None


def test_responses_that_grow_hide_no_gain_of_a_switch(checks, tmp_path):
    """Steps after the switch have a fifth more tokens, and take a tenth less."""
    one, lines = switched(checks, tmp_path, 90.0, tokens=1200)
    assert lines[0] == "the switch to replanned-1 gained 25% of a step, predicted 25%"
    assert checks.steps == [26]


def test_steps_without_training_have_no_pace(tmp_path):
    journal = Journal(tmp_path)
    run_steps(switcher(), journal, range(1, 2))
    assert pace(journal, 1) is None


@pytest.mark.parametrize(
    ("found", "options", "says"),
    [
        (better(0.1), {}, "too long for the 195 steps left"),
        (replace(better(), better=None), {}, None),
        (None, {}, None),
        (RlhfError("planted"), {}, "the plan was not compared with others by measured seconds (planted)"),
    ],
    ids=["too few steps", "no better plan", "nothing measured", "failed"],
)
def test_a_run_stays(checks, tmp_path, found, options, says):
    checks.found, one = found, switcher(**options)
    lines = run_steps(one, Journal(tmp_path), range(1, 6))
    assert one.asks.asked is None
    assert lines == [] if says is None else says in lines[0]


def test_a_switch_that_does_not_fit_in_host_memory_is_refused_in_a_line(own_home):
    small = replace(DESK, host_memory_bytes=1 << 30)  # the states of two models of 135M have 3 GiB
    asked = replace(request(), lease=replace(HELD, cluster=small))
    before, after = (chosen_file(asked, replace(plan, cluster=asked.lease.cluster)) for plan in (PLAN, SPLIT))
    with pytest.raises(InvalidInput) as error:
        check_switch(asked, before, ChosenAt(7, after))
    assert str(error.value).startswith("plan.7: got 'a switch from flattening to split that keeps 3")
    assert "expected at most 1.00 GiB, the memory of n0's host (host_memory_gib)" in str(error.value)


def test_only_a_run_that_may_switch_has_a_switcher(own_home):
    plans = (ChosenAt(0, chosen_file(request(), PLAN)),)
    assert plan_switcher(request(), plans, predicted(request()), Switches()) is None
    assert plan_switcher(request(replan="switch"), plans, None, Switches()) is None
    assert plan_switcher(request(replan="switch"), plans, predicted(request()), Switches()) is not None
