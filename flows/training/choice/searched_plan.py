"""The summary and the file of a searched plan, for people and for the next run."""

from collections.abc import Iterator

from prefect_rlhf.errors.table import table
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import Planned, PresetResult
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import COLD_ITERATIONS
from prefect_rlhf.placement.schedule.throughput import IterationWork
from prefect_rlhf.tasks.reporting.pictures.speeds import iteration_text

SHOWN_SHARE = 0.0005  # smallest part of a gap that is shown: less reads 0.0%
LARGE_GAP = 0.05  # from here on, a line says how far each cause of the gap is known
PROVED_GAP = 0.0005  # up to this gap, the bound proves the plan itself


def summary(planned: Planned, *others: PresetResult, work: IterationWork | None = None) -> str:
    """Return a summary of a plan: estimate, bound, binding constraint, search, a table with `others` and presets.

    With the `work` of an iteration it includes the throughput.
    """
    left_out, depends = planned.space.left_out, planned.dependence
    return "\n".join(
        [
            f"{planned.seconds:.4g} s per iteration by the estimate, {_against_bound(planned)}",
            *_causes(planned),
            *([iteration_text(work, planned.seconds)] if work else []),
            f"a cold start: {planned.estimate.cold_seconds:.4g} s for the first {COLD_ITERATIONS} iterations",
            f"binding constraint: {planned.binding}",
            *([str(depends)] if depends else []),
            f"search: {_proof(planned)} ({planned.search.cpu_seconds:.1f} s)",
            f"not searched: {left_out}",
            table(planned.rows(*others, work=work)),
        ]
    )


def _proof(planned: Planned) -> str:
    """Return what is proved about the printed plan; about the relaxed problem more may be proved."""
    if planned.gap < PROVED_GAP:
        return f"proved: no searched plan is more than {max(0.0, planned.gap):.2%} faster than this plan"
    if planned.lower_bound_seconds < planned.provable_seconds and not planned.search.proved_optimal:
        return planned.search.outcome.value
    return (
        "the relaxed problem is solved, with free row transfers and least memory: no plan is below the bound, but "
        "plans between it and this plan are not ruled out"
    )


def _against_bound(planned: Planned) -> str:
    bound = f"the bound ({planned.lower_bound_seconds:.4g} s)"
    if planned.beats_bound:
        below = 1 - planned.fastest_seconds / planned.lower_bound_seconds
        return f"{below:.1%} BELOW {bound}: the estimate or the bound is wrong, please report it"
    parts = (f"{share:+.1%} {words}" for words, share in planned.gap_parts.items() if abs(share) >= SHOWN_SHARE)
    why = "; ".join(parts)
    return f"{max(0.0, planned.gap):.1%} above {bound}, which no plan can beat{f': {why}' if why else ''}"


def _causes(planned: Planned) -> Iterator[str]:
    """Yield a line on a large gap: what is the search's, and what is the bound's, as far as that is known."""
    if planned.gap <= LARGE_GAP:
        return
    searched, uncounted, _ = planned.gap_parts.values()
    parts = [f"of this gap a longer search (--evaluations) can close {searched:.1%} at most by a higher bound"]
    if abs(uncounted) >= SHOWN_SHARE:
        parts.append(
            f"{uncounted:.1%} are above the bound of a single plan: the bound leaves out some memory, moves and "
            "waits, or a faster plan exists"
        )
    yield ". ".join(parts)


def plan_file(planned: Planned, plan: ExecutionPlan, work: IterationWork | None = None) -> str:
    """Return a plan file of `plan`, with the search's summary as comments at the top."""
    comments = "\n".join(f"# {line}".rstrip() for line in summary(planned, work=work).splitlines())
    return f"{comments}\n{plan_yaml(plan)}"
