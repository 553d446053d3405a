"""Simulated runs with `replan: switch` whose nodes take their true seconds with noise of a tenth; no clock, no rank.

Checks, decisions, certificates and switches are those of a run. Only the process of a check is left out: it answers at
once. The question is PPO of `test_price_check`, on two CPU ranks.
"""

import random
from dataclasses import dataclass, field
from functools import cache
from math import exp
from types import SimpleNamespace

import pytest

from prefect_rlhf.flows.training.choice.choose_plan import chosen_file
from prefect_rlhf.flows.training.choice.plans_by_step import PLANS_FILE, ChosenAt
from prefect_rlhf.flows.training.replan import price_check
from prefect_rlhf.flows.training.replan.plan_switcher import PlanSwitcher
from prefect_rlhf.flows.training.replan.price_check import STEPS_AWAITED
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.plan_choice import read_plans_by_step
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.fitted_constants import OVERHEAD_SECONDS, STEPS, corrected
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan
from prefect_rlhf.tasks.running.switch.requests import Switches
from tests.flows.training.replan.test_price_check import GRAPH, PLAN, SLOW_LINK, WORKLOAD, request

NOISE = 0.1
"""Standard deviation of the logarithm of measured over true seconds, of each node in each step."""
RIGHT = Correction()
RUNS = 10
EVERY = 5
MEMORY = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}
SEARCH = 2_000  # evaluations: as in `test_recheck`, more find nothing better on two devices


@cache
def true_question(correction):
    """The question with true constants, which keeps the seconds of a plan that it has estimated."""
    return corrected(request().question, correction)


class Answered:
    """A check that answers at once, in the process of the test."""

    ended = True

    def __init__(self, asked, yields):
        self.asked = asked

    def answer(self):
        return self.asked.answer()

    def close(self):
        pass


@pytest.fixture(autouse=True)
def answered(own_home, monkeypatch):
    monkeypatch.setattr(price_check, "RecheckProcess", Answered)
    monkeypatch.setattr(price_check, "EVALUATIONS", SEARCH)


@dataclass
class Simulated:
    """A run that begins with `plan`, on a machine with the constants of `truth`."""

    journal: Journal
    plan: ExecutionPlan
    truth: Question
    asked: RunRequest
    seed: int
    switches: list[tuple[float, float]] = field(default_factory=list)  # true seconds of a step before and after each

    def run(self):
        generator = random.Random(self.seed)
        switcher = PlanSwitcher(
            self.asked, self.asked.spec.replanning, [ChosenAt(1, chosen_file(self.asked, self.plan))], Switches(), 0
        )
        now, plan = 0.0, self.plan
        for step in range(1, self.asked.spec.steps + 1):
            now = self._step(plan, step, now, generator)
            switcher.step_ended(self.journal)
            if (better := switcher.asks.asked) is not None:
                self.switches.append((self.truth.seconds(plan), self.truth.seconds(better)))
                plan = better
                switched = SimpleNamespace(finished=step, plan=switcher.asks.take(step + 1).plan)
                switcher.switches(switched)
                switcher.switched(switched, self.journal)
        return self

    def _step(self, plan, step, now, generator):
        """Record a step that begins at `now`; return its end."""
        end = now + self.truth.seconds(plan) * exp(generator.gauss(0, NOISE))
        for subject, (node, true_seconds) in nodes_of(self.truth.site.sources, plan).items():
            seconds = true_seconds * exp(generator.gauss(0, NOISE))
            call = node.call.name if node.call else None
            span = (f"{subject}@{step}", node.title, node.kind, call, step, "", "", ("n0:0",), now, end)
            self.journal.record(TaskRunSpan(*span, seconds=seconds, **MEMORY))
        self.journal.finish_step(step)
        return end


@cache
def nodes_of(sources, plan):
    """The nodes of a step that take long enough for a check to use them, with their true seconds, by subject."""
    costs = NodeCosts(GRAPH, plan, WORKLOAD, sources)
    nodes = {subject_of(node.id): node for node in augment(GRAPH, plan, STEPS)}
    seconds = {name: (node, costs.cost(node).worked) for name, node in nodes.items()}
    return {name: each for name, each in seconds.items() if each[1] > OVERHEAD_SECONDS}


def simulated(folder, seed, began, correction=RIGHT, steps=16, **options):
    asked = request(**{"plan": "auto", "replan": "switch", "replan_every": EVERY, "steps": steps} | options)
    return Simulated(Journal(folder / f"run-{seed}"), began, true_question(correction), asked, seed).run()


def best_plan(correction=RIGHT):
    return plan_graph(true_question(correction), evaluations=SEARCH).plan


@pytest.mark.all
def test_noise_alone_switches_no_run_in_a_hundred(tmp_path):
    """Four checks each. The plan is the best by constants that are right."""
    plan = best_plan()
    assert [run.switches for seed in range(100) if (run := simulated(tmp_path, seed, plan)).switches] == []


@pytest.mark.all  # test_plan_switches.py runs a switch
def test_a_run_whose_constants_are_wrong_switches_to_a_plan_that_is_faster(tmp_path):
    """The link is slower than the datasheet of the plan says. A second switch would need a gain that does not exist."""
    run = simulated(tmp_path, 0, PLAN, SLOW_LINK, steps=11, plan="flattening")
    ((before, after),) = run.switches
    assert after < 0.9 * before
    assert [step for step, _ in read_plans_by_step(run.journal.run_dir / PLANS_FILE).plans] == [1, STEPS_AWAITED + 2]


def test_a_gain_below_replan_gain_switches_no_run(tmp_path):
    run = simulated(tmp_path, 0, PLAN, SLOW_LINK, steps=6, plan="flattening", replan_gain=0.2)
    assert run.switches == []


@pytest.mark.all
@pytest.mark.parametrize("begins", ["flattening", "best"])
def test_each_switch_of_runs_whose_constants_are_wrong_has_a_true_gain(tmp_path, begins):
    """Four checks each. Runs under a plan that is 15% slower than the best switch once, or stay where noise leaves the
    gain in doubt; runs under the best plan stay.
    """
    best = best_plan(SLOW_LINK)
    began, name = (PLAN, begins) if begins == "flattening" else (best, "auto")
    runs = [simulated(tmp_path, seed, began, SLOW_LINK, plan=name, replan_gain=0.05) for seed in range(RUNS)]
    numbers = [len(run.switches) for run in runs]
    assert all(after < before for run in runs for before, after in run.switches)
    assert max(numbers) == (begins == "flattening")
