"""The planner's answer as a value: the plan, its certificate, its bound, and the presets for comparison."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from prefect_rlhf.placement.memory.certificate import NEARLY_FULL, Certificate
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.schedule.changed_constants import Dependence, strongest_dependence
from prefect_rlhf.placement.schedule.estimate import Estimate
from prefect_rlhf.placement.schedule.throughput import IterationWork
from prefect_rlhf.placement.search.driver import SearchResult

ROUNDING = 1e-6  # of an iteration: what summing seconds may lose


@dataclass(frozen=True, slots=True)
class PresetResult:
    """A preset's plan and its estimate, or the reason why it has no plan.

    A preset that `is_impossible` has no legal plan on these devices, however large their memory is.
    """

    name: str
    plan: ExecutionPlan | None = None
    estimate: Estimate | None = None
    refused: str = ""
    is_impossible: bool = False


@dataclass(frozen=True)  # without slots, since it keeps its dependence
class Planned:
    """The best plan found in `space`, and all results about it."""

    plan: ExecutionPlan
    """It may take a little longer than the fastest, and be simpler."""
    estimate: Estimate
    certificate: Certificate
    lower_bound_seconds: float
    """In a long run no plan of the whole space takes less per iteration, for any order of its nodes."""
    binding: str
    """The bound's reason, in words."""
    provable_seconds: float
    """The most to which more evaluations can raise the bound."""
    search: SearchResult
    """The search of the whole space with the highest bound."""
    presets: tuple[PresetResult, ...]
    space: PlanSpace
    fastest_seconds: float
    """The time of the fastest plan found."""
    finalists: tuple[ExecutionPlan, ...] = ()
    """All different plans that were compared at the end, the fastest first."""

    @property
    def seconds(self) -> float:
        """Iteration time in a long run, in seconds."""
        return self.estimate.seconds

    @cached_property
    def dependence(self) -> Dependence | None:
        """The constant that the plan's time depends on most; None if all its times are measured."""
        question = self.space.context.question
        return strongest_dependence(question.graph, self.plan, question.workload, question.site.sources)

    @property
    def beats_bound(self) -> bool:
        """Whether the fastest plan is below the bound, which means that either is wrong."""
        return self.fastest_seconds < self.lower_bound_seconds * (1 - ROUNDING)

    @property
    def gap(self) -> float:
        """How much longer the plan takes than the lower bound, as a share of the bound."""
        return self.seconds / self.lower_bound_seconds - 1

    @property
    def gap_parts(self) -> dict[str, float]:
        """The gap by cause, each as a share of the bound; together they are the gap.

        The causes are bounds that more evaluations may prove; effects that the problem does not count, such as the
        fullest device's bytes, moves of rows and the order of a run's locks; and the choice of a simpler plan.
        """
        bound = self.lower_bound_seconds
        searched = min(max(bound, self.provable_seconds), self.fastest_seconds)
        return {
            "left open by the search": searched / bound - 1,
            "by memory and moves that the bound does not count": (self.fastest_seconds - searched) / bound,
            "for a simpler plan": (self.seconds - self.fastest_seconds) / bound,
        }

    def rows(self, *others: PresetResult, work: IterationWork | None = None) -> list[dict[str, str]]:
        """Return a table row for the plan, for each of `others`, and for every possible preset.

        With the `work` of an iteration the rows have tokens per second, and with its price the dollars per million
        response tokens.
        """
        rows = []
        possible = (preset for preset in self.presets if not preset.is_impossible)
        for result in (PresetResult(self.plan.name, self.plan, self.estimate), *others, *possible):
            row = {"plan": result.name, "seconds": "-", "against auto": "-"}
            speeds = {"tokens/s": "-"} if work else {}
            speeds |= {"$/M response tokens": "-"} if work and work.dollars_per_hour is not None else {}
            if result.estimate is not None:
                seconds = result.estimate.seconds
                more = seconds / self.seconds - 1
                row |= {"seconds": f"{seconds:.3f}", "against auto": f"{more:+.1%}"}
                if work is not None:
                    speeds["tokens/s"] = f"{work.tokens / seconds:,.0f}"
                    if (dollars := work.dollars_per_million(seconds)) is not None:
                        speeds["$/M response tokens"] = f"{dollars:.3g}"
            rows.append(row | speeds | {"note": result.refused or self._fullness(result)})
        return rows

    def _fullness(self, result: PresetResult) -> str:
        """A mark for a plan that fills a device nearly; empty for others."""
        if result.plan is None:
            return ""
        question = self.space.context.question
        used = question.certificate(result.plan).used_share(result.plan.cluster.kept_share)
        return f"fills {used:.1%} of a device" if used > NEARLY_FULL else ""


def differently_placed(timed: Iterable[tuple[ExecutionPlan, float]]) -> list[ExecutionPlan]:
    """Return the fastest plan for each set of equal placements. The fastest of all comes first."""
    different: dict[object, ExecutionPlan] = {}
    for plan, _ in sorted(timed, key=lambda pair: pair[1]):
        different.setdefault(plan.placements, plan)
    return list(different.values())
