"""`replan: switch`: a run switches to a better plan on its own, if that pays off in the remaining steps.

It checks as `replan: say` does, after the first steps and then every `replan_every` steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.flows.training.choice.choose_plan import ChosenPlan, chosen_file
from prefect_rlhf.flows.training.choice.plans_by_step import PLANS_FILE, ChosenAt, check_switch, plans_yaml
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.replan.predicted import later_plan
from prefect_rlhf.flows.training.replan.price_check import (
    RECHECKED,
    STEPS_AWAITED,
    begun_recheck,
    gain_in_words,
    record_of,
)
from prefect_rlhf.flows.training.replan.recheck_process import RecheckProcess
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.replanning import Switch
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan, ModelInstance
from prefect_rlhf.placement.planner.recheck import Recheck, pays
from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.placement.schedule.switch import switch_seconds
from prefect_rlhf.tasks.reporting.comparison import step_ends
from prefect_rlhf.tasks.reporting.report import LaterPlan
from prefect_rlhf.tasks.running.journal import STEPS_KEPT, Journal
from prefect_rlhf.tasks.running.switch.requests import Switches
from prefect_rlhf.tasks.running.training_run import TrainingRun

LEAST_SHARE = 0.5
"""If a switch gains less than this share of its predicted gain, it is the run's last."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A step's seconds and trained tokens, as medians of several steps."""

    seconds: float
    tokens: float

    def at(self, tokens: float) -> float:
        """Return the step time for this many trained tokens, in proportion; without a count, the mean step time."""
        return self.seconds * tokens / self.tokens if tokens and self.tokens else self.seconds


@dataclass(slots=True)
class PlanSwitcher:
    """Decides when a run switches. `plans` are its plans so far, the current plan last; `step` is the last finished
    step.
    """

    request: RunRequest
    policy: Switch
    plans: list[ChosenAt]
    asks: Switches
    step: int
    _steps: int = field(default=0, init=False)  # that have ended under the present plan
    _is_over: bool = field(default=False, init=False)
    _process: RecheckProcess | None = field(default=None, init=False)
    _next: ChosenPlan | None = field(default=None, init=False)
    _expected: tuple[Pace, float] | None = field(default=None, init=False)  # steps before a switch, and its gain
    _starts: dict[EngineKind, float] = field(default_factory=dict, init=False)

    def step_ended(self, journal: Journal) -> str | None:
        """Return a line if a check has a result. Requests a switch if a better plan pays off."""
        self.step, self._steps = self.step + 1, self._steps + 1
        if self._is_over or self._next is not None:
            return None
        if self._process is not None:
            return self._result(self._process, journal) if self._process.ended else None
        if self._expected is not None and self._steps == STEPS_AWAITED:
            return self._measured(journal, *self._expected)
        return self._begin(journal) if self._is_due() else None

    def built(self, instance: ModelInstance, seconds: float) -> None:
        """Note how long an engine took to start; the longest time counts."""
        self._starts[instance.engine] = max(seconds, self._starts.get(instance.engine, 0.0))

    def switches(self, run: TrainingRun) -> LaterPlan:
        """Return the plan that this object asked to switch to."""
        assert self._next is not None
        return later_plan(self.request, self._plan, ChosenAt(run.finished + 1, self._next), self._starts)

    def switched(self, run: TrainingRun, journal: Journal) -> None:
        """Add the new plan to the file that repeats the run."""
        assert self._next is not None
        self.plans.append(ChosenAt(run.finished + 1, self._next))
        self._next, self._steps = None, 0
        journal.keep(PLANS_FILE, plans_yaml(self.plans))

    def close(self) -> None:
        """End an unfinished check."""
        if self._process is not None:
            self._process.close()
            self._process = None

    @property
    def _plan(self) -> ExecutionPlan:
        return self.plans[-1].chosen.plan

    def _is_due(self) -> bool:
        """Whether to check now: after the first steps, and then at most every `replan_every` steps."""
        every = self.policy.every
        is_first = len(self.plans) == 1 and self._steps == STEPS_AWAITED
        return (is_first or self._steps % every == 0) and self.step < self.request.spec.steps

    def _begin(self, journal: Journal) -> str | None:
        spans, was_switched = journal.last_steps(min(STEPS_KEPT, self._steps)), len(self.plans) > 1
        try:  # the run waits for a better plan: a check that yields to busy ranks may take longer than the plan gains
            asked = self.request, self._plan, spans, journal, self.policy.gain
            self._process = begun_recheck(*asked, searched=was_switched, yields=False)
        except OSError as error:
            self._is_over = True
            return f"the plan was not compared with others by measured seconds ({error})"
        return None

    def _result(self, process: RecheckProcess, journal: Journal) -> str | None:
        try:
            found = process.answer()
        except RlhfError as error:
            return f"the plan was not compared with others by measured seconds ({error})"
        finally:
            self.close()
        if found is None:
            return None
        journal.keep(RECHECKED, json.dumps(record_of(self._plan, found), indent=1))
        return None if found.better is None else self._decide(found, found.better, journal)

    def _decide(self, found: Recheck, better: ExecutionPlan, journal: Journal) -> str:
        """Ask for a switch if the better plan pays for it and fits."""
        gain = gain_in_words(found, self._plan.name)
        left, seconds = self.request.spec.steps - self.step, self._switch_seconds(better)
        if not pays(found, left, seconds):
            return f"{gain}; the run stays: a switch takes {seconds:.1f} s, too long for the {left} steps left"
        try:
            chosen = chosen_file(self.request, replace(better, name=f"replanned-{len(self.plans)}"))
            check_switch(self.request, self.plans[-1].chosen, ChosenAt(self.step + 1, chosen))
        except InvalidInput as error:
            return f"{gain}; the run stays ({error})"
        before = pace(journal, self._steps)
        self._next, self._expected = chosen, None if before is None else (before, found.gain)
        self.asks.ask(chosen.plan)
        return f"{gain}; the run switches to it, which takes about {seconds:.1f} s"

    def _measured(self, journal: Journal, before: Pace, expected: float) -> str | None:
        """Compare the gain of the last switch with its prediction. After a poor switch there is no other.

        Responses may have grown since: the steps before the switch count in proportion to their tokens.
        """
        self._expected, after = None, pace(journal, self._steps)
        if after is None:
            return None
        gain = 1 - after.seconds / before.at(after.tokens)
        self._is_over = gain < LEAST_SHARE * expected
        last = "; no other switch follows" if self._is_over else ""
        return f"the switch to {self._plan.name} gained {gain:.0%} of a step, predicted {expected:.0%}{last}"

    def _switch_seconds(self, plan: ExecutionPlan) -> float:
        return switch_seconds(self.request.graph, self._plan, plan, self.request.cost_sources, self._starts)


def pace(journal: Journal, steps: int) -> Pace | None:
    """Return the pace of up to `steps` recent steps, without the first step; None if fewer than two of them trained."""
    spans = journal.last_steps(min(STEPS_KEPT, steps))
    ends, tokens = step_ends(spans), defaultdict[int, int](int)
    for span in spans:
        if span.kind == "train_step":
            tokens[span.step] += span.num_tokens
    if len(ends) < 2:
        return None
    seconds = median(after - before for before, after in pairwise(ends))
    return Pace(seconds, median(tokens[step] for step in sorted(tokens)[1:]))


def plan_switcher(
    request: RunRequest, plans: tuple[ChosenAt, ...], predicted: Prediction | None, asks: Switches
) -> PlanSwitcher | None:
    """Return the switcher for `replan: switch`; None if the devices are unknown, or the models were profiled."""
    policy = request.spec.replanning
    if not isinstance(policy, Switch):
        return None
    if predicted is None or request.cost_sources.profiles:
        log_info("replan: the run keeps its plan: only constants of a known device without a profile are corrected")
        return None
    return PlanSwitcher(request, policy, list(plans), asks, request.checkpoint.step if request.checkpoint else 0)
