"""The summary and plan file of a searched plan, for people and for the next run."""

import re
from collections.abc import Iterator

from prefect_rlhf.errors.table import table
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.planned import Planned, PresetResult
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.schedule.estimate import COLD_ITERATIONS
from prefect_rlhf.placement.schedule.throughput import IterationWork
from prefect_rlhf.tasks.reporting.pictures.speeds import iteration_text

SHOWN_SHARE = 0.0005  # smallest part of a gap that is shown: less reads 0.0%
COLD_SHARE = 0.01  # smallest share by which the first steps differ that is shown
LARGE_GAP = 0.05  # from here on, a line says how far each cause of the gap is known
PROVED_GAP = 0.0005  # up to this gap, the bound proves the plan itself


def summary(planned: Planned, *others: PresetResult, work: IterationWork | None = None) -> str:
    """Summarise a plan: its proof, and a table that compares it with `others` and with presets.

    Includes the throughput if the `work` of an iteration is given.
    """
    return "\n".join([*proof_lines(planned, work), table(planned.rows(*others, work=work))])


def proof_lines(planned: Planned, work: IterationWork | None = None) -> Iterator[str]:
    """Yield lines about a plan: estimate, bound, throughput, the limiting constraint, and the search."""
    yield f"{planned.seconds:.4g} s per iteration by the estimate, {_against_bound(planned)}"
    yield from _causes(planned)
    if work is not None:
        yield iteration_text(work, planned.seconds)
    cold, steady = planned.estimate.cold_seconds, COLD_ITERATIONS * planned.seconds
    if abs(cold / steady - 1) > COLD_SHARE:
        yield f"the first {COLD_ITERATIONS} iterations take {cold:.4g} s together, and {steady:.4g} s later in the run"
    yield f"binding constraint: {_binding_in_words(planned.binding)}"
    if planned.dependence:
        yield str(planned.dependence)
    yield f"search: {_proof(planned)} ({planned.search.cpu_seconds:.1f} processor seconds)"
    yield f"not searched: {planned.space.left_out}"


BINDING = {
    "chain: ": "these wait for each other: ",
    "device load of ": "these share devices: ",
    "area of ": "the work of ",
    "loop: ": "these wait for each other from step to step: ",
}
"""The words of the bound's terms (`search.exact.binding`), for a person."""


def _binding_in_words(binding: str) -> str:
    """Return what keeps a plan from being faster.

    >>> _binding_in_words("chain: actor_generate -> actor_train with 1 move")
    'these wait for each other: actor_generate -> actor_train and 1 move of weights'
    """
    for term, words in BINDING.items():
        binding = binding.replace(term, words)
    return re.sub(r" with (\d+) (moves?)\b", r" and \1 \2 of weights", binding)


def _proof(planned: Planned) -> str:
    """Return what is proved about the printed plan; about the relaxed problem more may be proved."""
    if planned.gap < PROVED_GAP:
        return f"proved: no searched plan is more than {max(0.0, planned.gap):.2%} faster than this plan"
    if planned.lower_bound_seconds < planned.provable_seconds and not planned.search.proved_optimal:
        return planned.search.outcome.value
    return (
        "complete for a simpler problem, in which rows move for free and memory is counted at its least: no plan takes "
        "less than the bound, but one between the bound and this plan may exist"
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
    parts = [f"of this a longer search (--evaluations) can explain at most {searched:.1%} by a higher bound"]
    if abs(uncounted) >= SHOWN_SHARE:
        parts.append(
            f"for the other {uncounted:.1%} either the bound leaves out memory, moves and waits that this plan needs, "
            "or a faster plan exists that was not found"
        )
    yield "; ".join(parts)


def plan_file(planned: Planned, plan: ExecutionPlan, work: IterationWork | None = None) -> str:
    """Return a plan file for `plan` that begins with the search's summary as comments."""
    comments = "\n".join(f"# {line}".rstrip() for line in summary(planned, work=work).splitlines())
    return f"{comments}\n{plan_yaml(plan)}"
