"""The searches for plans that fit: each search's aim, their order, and when a search can be skipped.

A search's problem leaves out effects that depend on more than two calls, so the best plan of the whole space may not
fit, or may take longer than predicted. Another search then counts memory with more caution, and the last searches let
models take turns on their devices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import PresetResult
from prefect_rlhf.placement.planner.preset_plan import best_admitted, preset_result
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.solution import TIGHTER, made_to_fit, solution, solve_fitting
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace
from prefect_rlhf.placement.planner.space.restrictions import divisions
from prefect_rlhf.placement.planner.space.streamed_problem import streamed_problems
from prefect_rlhf.placement.planner.time_sharing import time_sharing_problem
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.placement.plans.stated_words import Words
from prefect_rlhf.placement.search.budget import EVALUATIONS, Budget, Meter
from prefect_rlhf.placement.search.driver import Progress, Proof, SearchResult, prove, search
from prefect_rlhf.placement.search.method import Method
from prefect_rlhf.placement.search.partial.incumbent import SearchOutcome

WHOLE_SHARE = 0.5  # of the budget, for the search of the whole space, and for searches with models in alternation
COPIES_SHARE = 0.3  # for searches that decide which calls share a copy of weights
LEAST_BOUND_SHARE = 0.05  # for the plan of the least bound
LEAST_BOUND_EVALUATIONS = 2.0  # times the evaluations, for the same: a bound alone takes half a microsecond
CAUTIOUS_SHARE = 0.2  # for a search that counts memory with more caution
PROVED = 0.01  # of a plan's seconds: a proof ends so close below them, or as far above, if the bound is wrong
SMALL_SHARE = 0.03  # for each preset and each division: little is left to choose
SHORT = Budget(EVALUATIONS, 2.0)  # of the first round of attempts, if the budget is longer
NEARLY = 0.03  # of the fastest plan's time, as a request's simplicity: less than the estimates are wrong by
CLOSE = 0.03  # of the bound: a plan that is no further above it is as good as known, since no estimate tells more


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The plans to search, and the budget, which is divided over the attempts."""

    question: Question
    space: PlanSpace
    budget: Budget
    method: Method
    progress: Callable[[Progress], None] | None
    space_of: Callable[[Question], PlanSpace]
    """Gives the space of plans for a question with other constants."""
    words: Words = field(default_factory=dict)
    """What presets must have."""
    simplicity: float = NEARLY
    """The share of the fastest plan's time by which a simpler answer may be slower."""

    def search(
        self, problem: PlanProblem, share: float, progress: Callable[[Progress], None] | None = None
    ) -> SearchResult:
        """Search a problem with a share of the budget."""
        part, method = self.budget.times(share), self.method
        return search(problem.problem, part.seconds, method, max_evaluations=part.evaluations, progress=progress)


@dataclass(frozen=True, slots=True)
class Finding:
    """A search's plans that fit, apart from presets."""

    plans: tuple[ExecutionPlan, ...] = ()
    presets: tuple[PresetResult, ...] = ()
    admitted: tuple[ExecutionPlan, ...] = ()
    """The best plans that presets allow, with searched strategies."""
    bound: SearchResult | None = None
    """The search, if it bounds all plans of the question."""
    proof: Proof | None = None
    """A short proof, which a longer proof can continue."""
    take_turns: bool = False
    """Whether models alternate on devices in its plans."""

    def seconds(self, question: Question) -> Iterator[float]:
        """Yield the iteration time of each of its plans, in seconds."""
        yield from (question.seconds(plan) for plan in (*self.plans, *self.admitted))
        yield from (preset.estimate.seconds for preset in self.presets if preset.estimate)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A way to find plans that fit. Unless it is `always` made, it is skipped once a plan is close to the bound."""

    name: str
    make: Callable[[SearchRequest], Finding]
    always: bool = False


def make_attempts(request: SearchRequest, attempts: Sequence[Attempt]) -> list[Finding]:
    """Make the attempts with a short budget. If no plan is close to the bound, repeat them with the rest of the budget.

    A long search prefers plans that are faster by its problem but may be slower by the estimate: either budget may find
    the better plan. If the question's size leaves no time for both, only the whole space is searched longer, for its
    bound.
    """
    meter, short = Meter(request.budget), replace(request, budget=request.budget.at_most(SHORT))
    findings = _make_attempts(short, attempts)
    if short == request or is_close(request, findings):
        return findings
    meter.spend(short.budget.evaluations)
    left = meter.left
    if left.seconds == math.inf or left.seconds > short.budget.seconds:
        return findings + _make_attempts(replace(request, budget=left), attempts)
    rest = replace(left, seconds=request.budget.seconds - short.budget.seconds)
    return [*findings, search_whole_space(replace(request, budget=rest))]


def is_close(request: SearchRequest, findings: Sequence[Finding]) -> bool:
    """Whether some plan is closer to the bound than the requested simplicity."""
    least = min(seconds for finding in findings for seconds in (math.inf, *finding.seconds(request.question)))
    return least <= highest_bound(findings).lower_bound_seconds * (1 + min(CLOSE, request.simplicity))


def highest_bound(findings: Sequence[Finding]) -> SearchResult:
    """Return the search with the highest bound on all plans; the first attempt is such a search."""
    bounds = (finding.bound for finding in findings if finding.bound)
    return max(bounds, key=lambda bound: bound.lower_bound_seconds)


def presets_of(findings: Sequence[Finding]) -> tuple[PresetResult, ...]:
    """Return the faster of each preset's results, preferring results that fit."""
    results: dict[str, PresetResult] = {}
    for result in (preset for finding in findings for preset in finding.presets):
        known = results.get(result.name, result)
        results[result.name] = min((known, result), key=lambda one: one.estimate.seconds if one.estimate else math.inf)
    return tuple(results.values())


def _make_attempts(request: SearchRequest, attempts: Sequence[Attempt]) -> list[Finding]:
    """Make the attempts in order until a plan is close to the bound, and the attempts that are always made."""
    findings: list[Finding] = []
    for attempt in attempts:
        if attempt.always or not is_close(request, findings):
            findings.append(attempt.make(request))
    return findings


def prove_bound(
    request: SearchRequest, budget: Budget | None, findings: Sequence[Finding], fastest_seconds: float
) -> Proof:
    """Return the highest bound on all plans, from a search or a proof; the fastest plan takes `fastest_seconds`.

    Plans that stream parts of a call may be below it; then their bound counts. Their problems share another budget of
    this size. Without a budget, and if a search was interrupted, the bound is the search's.
    """
    bound = highest_bound(findings)
    if budget is None or bound.outcome is SearchOutcome.INTERRUPTED:
        return Proof(bound.lower_bound_seconds, bound.seconds, bound.binding)
    space, most, enough = request.space, fastest_seconds * (1 + PROVED), fastest_seconds / (1 + PROVED)
    earlier = next((finding.proof for finding in reversed(findings) if finding.proof), None)
    best = prove(space.computed_with_copies.problem, most, budget.seconds, budget.evaluations, enough, earlier)
    if best.lower_bound_seconds <= bound.lower_bound_seconds:
        provable = max(best.provable_seconds, bound.lower_bound_seconds)
        best = Proof(bound.lower_bound_seconds, provable, bound.binding)
    problems = list(streamed_problems(space, most))
    for problem in problems:
        part = budget.times(1 / len(problems))
        found = prove(problem, most, part.seconds, part.evaluations, best.lower_bound_seconds)
        provable = min(best.provable_seconds, found.provable_seconds)
        lower = found if found.lower_bound_seconds < best.lower_bound_seconds else best
        binding = best.binding if lower is best else f"{found.binding}, in plans with streamed parts"
        best = Proof(lower.lower_bound_seconds, provable, binding)
    return best


def search_whole_space(request: SearchRequest) -> Finding:
    """Search all plans, counting only bytes that every device surely holds, so that the bound is valid."""
    question, problem = request.question, request.space.least
    result = request.search(problem, WHOLE_SHARE, request.progress)
    plan = solution(question, problem, result)
    return _finding(None if plan is None else made_to_fit(question, plan), bound=result)


def search_copies(request: SearchRequest) -> Finding:
    """Search all plans, deciding for a second reader of trained weights whether it shares the first reader's copy.

    This includes the cost of weight moves that other searches ignore, at the cost of a larger search. Returns an empty
    finding without such a call.
    """
    question, problem = request.question, request.space.with_copies
    if problem is None:
        return Finding()
    result = request.search(problem, COPIES_SHARE)
    plan = solution(question, problem, result)
    return _finding(None if plan is None else made_to_fit(question, plan), bound=result)


def search_least_bound(request: SearchRequest) -> Finding:
    """Find the plan with the lowest bound, which may be fast even if it is slow in the problem's order of nodes."""
    problem, budget = request.space.computed_with_copies, request.budget
    evaluations = budget.evaluations * LEAST_BOUND_EVALUATIONS
    found = prove(problem.problem, math.inf, budget.seconds * LEAST_BOUND_SHARE, evaluations)
    plan = solution(request.question, problem, found)
    return replace(_finding(None if plan is None else made_to_fit(request.question, plan)), proof=found)


def search_presets(request: SearchRequest) -> Finding:
    """Complete each preset as a run does, and search the best strategies that it allows on its meshes."""
    budget, question = request.budget.times(SMALL_SHARE), request.question
    results = tuple(preset_result(question, name, request.words) for name in PRESETS)
    admitted = []
    for name, rule in PRESETS.items():
        with suppress(RlhfError):
            admitted.append(best_admitted(question, request.space, name, rule, budget))
    return Finding(presets=results, admitted=tuple(plan for plan in admitted if plan is not None))


def search_fullest_devices(request: SearchRequest) -> Finding:
    """Search all plans again, counting the fullest device of each mesh."""
    budget = request.budget.times(CAUTIOUS_SHARE)
    return _finding(solve_fitting(request.question, request.space.most, budget, request.method, shares=TIGHTER))


def search_divisions(request: SearchRequest) -> Finding:
    """If there are several kinds of nodes, search plans that keep them apart; a search of all plans may miss these."""
    budget = request.budget.times(SMALL_SHARE)
    parts = divisions(request.space)
    return _finding(*(solve_fitting(request.question, part.most, budget) for part in parts))


def search_time_sharing(request: SearchRequest) -> Finding:
    """Search plans that fit because models leave their devices while others use them."""
    parts = (request.space, *divisions(request.space))
    budget = request.budget.times(WHOLE_SHARE / len(parts))
    plans = [solve_fitting(request.question, time_sharing_problem(part), budget, shares=TIGHTER) for part in parts]
    return replace(_finding(*plans), take_turns=True)


def _finding(*plans: ExecutionPlan | None, bound: SearchResult | None = None) -> Finding:
    return Finding(tuple(plan for plan in plans if plan is not None), bound=bound)


ATTEMPTS = (
    Attempt("whole space", search_whole_space, always=True),
    Attempt("copies", search_copies),
    Attempt("presets", search_presets, always=True),
    Attempt("plan of the least bound", search_least_bound),
    Attempt("fullest devices", search_fullest_devices),
    Attempt("divisions", search_divisions, always=True),
    Attempt("time sharing", search_time_sharing),
)
