"""`replan: say`: after a few steps, check the plan's predicted times against measured times.

The check corrects constants of the cost model and searches again, in a process that yields to the run. A log line names
a better plan and how to switch to it. The run folder keeps the result, so a resumed run does not check again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.remote_path import shown
from prefect_rlhf.flows.training.choice.auto_plan import EVALUATIONS
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.replan.recheck_process import RecheckProcess, RecheckRequest
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.plan_choice import is_searched
from prefect_rlhf.flows.training.spec.replanning import Say
from prefect_rlhf.flows.training.spec.run_spec import RunSpec
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.outputs import OUTPUTS
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.fitted_constants import Measured
from prefect_rlhf.placement.planner.recheck import Recheck
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.tasks.data.rollouts import ROLLOUTS
from prefect_rlhf.tasks.reporting.deviation import deviation
from prefect_rlhf.tasks.running.journal import STEPS_KEPT, Journal, TaskRunSpan

STEPS_AWAITED = 4  # the first builds and compiles, the others are measured
RECHECKED = "replan.json"
BETTER_PLAN = "plans/replanned.yaml"
TRY_PLANS = "plan: measure(3) compares plans by measured steps"


@dataclass(slots=True)
class PriceCheck:
    """A run's single check, after its first steps."""

    request: RunRequest
    policy: Say
    plan: ExecutionPlan
    predicted: Prediction
    _process: RecheckProcess | None = field(default=None, init=False)
    _spans: Sequence[TaskRunSpan] = field(default=(), init=False)
    _steps: int = field(default=0, init=False)
    _is_over: bool = field(default=False, init=False)

    def step_ended(self, journal: Journal) -> str | None:
        """Return a line for the run's log, if the check has a result that you can act on."""
        self._steps += 1
        if self._is_over or self._steps < STEPS_AWAITED:
            return None
        if self._process is None:
            return self._begin(journal)
        if not self._process.ended:
            return None
        self._is_over = True
        try:
            found = self._process.answer()
        except RlhfError as error:
            return f"the plan was not compared with others by measured seconds ({error})"
        return self._result(found, journal) if found else None

    def close(self) -> None:
        """End an unfinished check."""
        if self._process is not None:
            self._process.close()

    def _begin(self, journal: Journal) -> str | None:
        """Start the process. Profiles measured the model itself, so there are no constants to correct."""
        self._spans = journal.last_steps(STEPS_KEPT)
        if self.request.cost_sources.profiles:
            self._is_over = True
            return self._unexplained()
        try:
            self._process = begun_recheck(self.request, self.plan, self._spans, journal, self.policy.gain)
        except OSError as error:
            self._is_over = True
            return f"the plan was not compared with others by measured seconds ({error})"
        return None

    def _result(self, found: Recheck, journal: Journal) -> str | None:
        line, better = None, found.better
        if better is not None:
            better = replace(better, name="replanned")
            found = replace(found, better=better)
            journal.keep(BETTER_PLAN, plan_yaml(better))
            first = self.request.checkpoint.step if self.request.checkpoint else 0
            way = way_to_switch(journal.run_dir, self.request.spec, first + self._steps)
            line = f"{gain_in_words(found, self.plan.name)}; {way}"
        elif not found.fitted.explains:
            line = self._unexplained()
        journal.keep(RECHECKED, json.dumps(record_of(self.plan, found), indent=1))
        return line

    def _unexplained(self) -> str | None:
        """Return the deviation of the steps from their prediction, if other plans exist that could be faster."""
        found = deviation(self.predicted, self._spans)
        return f"{found}; {TRY_PLANS}" if found and self.request.lease.mesh.num_devices > 1 else None


def begun_recheck(
    request: RunRequest,
    plan: ExecutionPlan,
    spans: Sequence[TaskRunSpan],
    journal: Journal,
    least_gain: float,
    searched: bool = False,
    yields: bool = True,
) -> RecheckProcess:
    """Start a process that prices a plan again, given its steps' measured `spans`. Raises OSError if it cannot start.

    `least_gain` is the share of a step that a better plan must save. `searched` says that an earlier check found the
    plan, `yields` that the process yields to all other programs.
    """
    rollouts = sorted((journal.run_dir / ROLLOUTS).glob("*.parquet"))
    question = RecheckRequest(
        request.question,
        plan,
        measured_nodes(spans),
        was_searched=searched or is_searched(request.spec.plan),
        evaluations=EVALUATIONS,
        traits={str(name): traits for name, traits in TRAITS.items()},
        outputs=dict(OUTPUTS),
        rollouts=tuple(rollouts[-STEPS_AWAITED:]),
        least_gain=least_gain,
    )
    return RecheckProcess(question, yields)


def record_of(plan: ExecutionPlan, found: Recheck) -> dict[str, object]:
    """Return a check's result for `plan` in the form of the run's file."""
    return {
        "plan": plan_yaml(plan),
        "correction": asdict(found.fitted.correction),
        "deviation": [found.fitted.before, found.fitted.after],
        "seconds": found.seconds,
        "better_plan": None if found.better is None else plan_yaml(found.better),
        "best_seconds": found.best_seconds,
    }


def gain_in_words(found: Recheck, name: str) -> str:
    """Describe the better plan's gain over the plan `name`, and the reason for it."""
    prices = f"constants of the measured steps: {found.fitted.correction}"
    if found.fitted.confirms:
        prices = "the constants, which the measured steps confirm"
    times = f"{found.best_seconds:.3g} s per step, {found.gain:.0%} less than {name} ({found.seconds:.3g} s)"
    return f"by {prices}, another plan takes {times}"


def way_to_switch(run_dir: Path, spec: RunSpec, done: int) -> str:
    """Explain how to use the better plan in a run that has finished `done` steps."""
    use, every = f"-p plan={shown(run_dir / BETTER_PLAN)}", spec.checkpoint_every
    if every is None or (at := (done // every + 1) * every) >= spec.steps:
        return f"to use it in the next run: {use}"
    resume = f"{use} -p resume_from={shown(run_dir)}"
    return f"to switch, stop this run after its checkpoint of step {at} and resume it with {resume}"


def price_check(request: RunRequest, plan: ExecutionPlan, predicted: Prediction | None) -> PriceCheck | None:
    """Return the check of a run with one plan. None if it is off, was made before, or lacks predictions or steps."""
    policy = request.spec.replanning
    if not isinstance(policy, Say) or predicted is None:
        return None
    first = request.checkpoint.step if request.checkpoint else 0
    if request.spec.steps - first <= STEPS_AWAITED:
        return None
    earlier = earlier_check(request)
    if earlier and plan_yaml(plan) in (earlier.get("plan"), earlier.get("better_plan")):
        return None
    return PriceCheck(request, policy, plan, predicted)


def earlier_check(request: RunRequest) -> Mapping[str, object] | None:
    """Return the check's result in the run that this run continues."""
    file = request.checkpoint.folder.parent.parent / RECHECKED if request.checkpoint else None
    if file is None or not file.is_file():
        return None
    try:
        return read_json_object("resume_from", file)
    except InvalidInput as error:
        log_info(f"the earlier check of the plan is ignored ({error})")
        return None


def measured_nodes(spans: Sequence[TaskRunSpan]) -> Mapping[str, Measured]:
    """Return each node's measured seconds, by subject, without the first step of `spans`."""
    first, seconds = max(1, min(span.step for span in spans)), defaultdict[str, list[float]](list)
    for span in spans:
        if span.step > first and span.seconds > 0:
            seconds[subject_of(span.node)].append(span.seconds)
    return {subject: Measured.of(values) for subject, values in seconds.items()}
