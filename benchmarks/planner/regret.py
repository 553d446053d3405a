"""How much slower the planner's answers are than the best known plan if a constant of the cost model is wrong.

    python -m benchmarks.planner.regret [--only 43,9,...] [--evaluations N] [--search-evaluations N] [--factors 0.5,2]

Each of the eight constants in turn takes 0.5, 0.7, 1.3 and 2 times as long. The best known plan under a change is the
fastest of a pool: the finalists of the question's own search, the presets among them, and the answer and fastest three
of each search with a constant changed by one of `--factors`. All of them fit, since no constant changes memory.

A line for each question has its regrets, the largest first. The last line is JSON: `questions`, `changes` (of all
questions), `above_5_percent`, `above_10_percent` (numbers of changes), `worst`, `median_worst` (of the questions),
`worst_of_steadiest` (of each question the plan of the pool within 3% of the best whose worst regret is least),
`seconds_lost` (by answers against the fastest plan of the pool without a change, a share, the mean) and `constants`
(the worst regret of each).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.planner.referee import asked, questions
from prefect_rlhf.placement.cost.datasheets.correction import CONSTANTS, Correction
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.fitted_constants import corrected
from prefect_rlhf.placement.planner.passes.simplicity import nearly
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.schedule.changed_constants import CHANGES, changed_seconds

QUESTIONS = (43, 9, 36, 11, 18, 3, 5, 39)
"""Numbers of the eight questions in `questions.txt`: PPO, GRPO, a mixture, ReMax, DPO, two nodes, staleness, two kinds
of nodes."""
SEARCH_EVALUATIONS = 40_000.0  # of each search under a changed constant
POOLED = 3  # finalists of each of these searches
SHOWN = 4  # largest regrets in a line


@dataclass(frozen=True, slots=True)
class Change:
    """A constant that takes `factor` times as long, the answer's seconds, and those of the best known plan."""

    constant: str
    factor: float
    seconds: float
    best: float

    @property
    def regret(self) -> float:
        return self.seconds / self.best - 1


@dataclass(frozen=True, slots=True)
class Regrets:
    """All changes of a question, the answer's seconds without a change, and those of the best known plan.

    `steadiest` is the least worst regret of the pool's plans that take at most 3% more than the best known plan.
    """

    question: str
    seconds: float
    best: float
    num_plans: int
    changes: tuple[Change, ...]
    steadiest: float

    @property
    def worst(self) -> float:
        return max(change.regret for change in self.changes)

    def above(self, share: float) -> int:
        """Return the number of changes with a larger regret."""
        return sum(change.regret > share for change in self.changes)

    def __str__(self) -> str:
        largest = sorted(self.changes, key=lambda change: -change.regret)[:SHOWN]
        words = (f"{each.constant} x {each.factor:g}: {each.regret:.1%}" for each in largest)
        now = f"{self.seconds:.3f} s, best known {self.best:.3f} s, {self.num_plans} plans"
        steadiest = f"above 5% in {self.above(0.05)} changes, the steadiest within 3% of the best {self.steadiest:.1%}"
        return f"{self.question}: {now}; {', '.join(words)}; {steadiest}"


def main() -> None:
    """Print a line for each question, and the sums."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(map(str, QUESTIONS)), help="numbers of questions, from 1 on")
    flags.add_argument("--evaluations", type=float, help="length of the search for each question")
    flags.add_argument("--search-evaluations", type=float, default=SEARCH_EVALUATIONS, help="of each further search")
    flags.add_argument("--factors", default="0.5,2", help="of a constant, in the further searches")
    arguments = flags.parse_args()
    lines, factors = questions(), tuple(map(float, arguments.factors.split(",")))
    found = []
    numbers = [int(number) for number in arguments.only.split(",")]
    if not all(1 <= number <= len(lines) for number in numbers):
        flags.error(f"--only: got {arguments.only}, expected numbers from 1 to {len(lines)}")
    for number in numbers:
        question = asked(lines[number - 1])
        searched = [Correction(**{name: factor}) for name in CONSTANTS for factor in factors]
        found.append(
            regrets(lines[number - 1], question, searched, arguments.evaluations, arguments.search_evaluations)
        )
        print(f"{number}: {found[-1]}", flush=True)
    print(json.dumps(summary(found)))


def regrets(
    line: str,
    question: Question,
    searched: Iterable[Correction],
    evaluations: float | None = None,
    search_evaluations: float = SEARCH_EVALUATIONS,
) -> Regrets:
    """Answer a question, and compare the answer with a pool of plans under each change."""
    planned = plan_graph(question, evaluations=evaluations)
    pool = {plan.placements: plan for plan in planned.finalists}
    for correction in searched:
        found = plan_graph(corrected(question, correction), evaluations=search_evaluations)
        pool |= {plan.placements: plan for plan in (found.plan, *found.finalists[:POOLED])}
    changes = (Correction(), *CHANGES.values())
    rivals = [seconds_under(question, plan, changes) for plan in pool.values()]
    answer, best = seconds_under(question, planned.plan, changes), [min(each) for each in zip(*rivals, strict=True)]
    changed = tuple(Change(*key, mine, other) for key, mine, other in zip(CHANGES, answer[1:], best[1:], strict=True))
    near = (each for each in rivals if each[0] <= nearly(best[0], math.inf))
    steadiest = min(max(mine / other for mine, other in zip(each[1:], best[1:], strict=True)) for each in near) - 1
    return Regrets(line, answer[0], best[0], len(pool), changed, steadiest)


def seconds_under(question: Question, plan: ExecutionPlan, changes: Sequence[Correction]) -> tuple[float, ...]:
    """Return the seconds of an iteration of a plan under each change."""
    return changed_seconds(question.graph, plan, question.workload, question.site.sources, changes)


def summary(found: Sequence[Regrets]) -> dict[str, Any]:
    """Return the sums over all questions."""
    changes = [change for each in found for change in each.changes]
    return {
        "questions": len(found),
        "changes": len(changes),
        "above_5_percent": sum(each.above(0.05) for each in found),
        "above_10_percent": sum(each.above(0.1) for each in found),
        "worst": max(change.regret for change in changes),
        "median_worst": median(each.worst for each in found),
        "worst_of_steadiest": max(each.steadiest for each in found),
        "seconds_lost": fmean(each.seconds / each.best - 1 for each in found),
        "constants": {
            name: max((each.regret for each in changes if each.constant == name), default=0.0) for name in CONSTANTS
        },
    }


if __name__ == "__main__":
    main()
