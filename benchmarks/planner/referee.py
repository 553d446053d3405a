"""Ask the planner real questions, and look for legal plans that fit and disprove its answers.

    python -m benchmarks.planner.referee [--plans 100] [--anneal 60] [--evaluations N] [--seed 1] [--only 1,5,...]

A question is a line of `prefect-rlhf plan`, with a comment behind it or not. Beside its answer stand the best of the
presets, and that of `--plans` others: neighbours of the answer and of the presets (one to three calls placed otherwise)
and plans drawn at random, each completed, checked, certified and timed as the answer is. With `--anneal` also the plans
of simulated annealing on the full estimate, for so many seconds of processor time. A violation is a plan below the
bound.

The line before the last is JSON: `plans` in all, `seconds_median` and `seconds_worst` (processor time of an answer,
imports apart). So is the last: `questions`, `violations`, `median_gap` and `worst_gap` (of an answer above its bound),
`beaten` (answers that another plan beats by more than 3%), `beaten_by_at_most`, and `fastest_beaten_by_at_most` (of the
fastest plan that the search found, which may be faster than the answer).
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planner.annealed_rival import annealed
from benchmarks.planner.read_flags import read_flags
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands import plan as plan_command
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question

QUESTIONS = Path(__file__).with_name("questions.txt")
TRIES = 20  # drawn plans for each one that is wanted: most of them do not fit
CLOSER = 0.03  # an answer is beaten by more than this: less is below the estimator's error
ROUNDING = 1e-6  # of seconds that are added up in another order


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question's answer, and the best of others, in seconds of an iteration; `took` is processor time."""

    question: str
    auto: float
    fastest: float
    bound: float
    gap_parts: Mapping[str, float]
    preset: float | None
    other: float | None
    annealed: float | None
    plans: int
    violations: int
    took: float

    @property
    def gap(self) -> float:
        return self.auto / self.bound - 1

    @property
    def beaten_by(self) -> float:
        """The share of the answer that the best other plan saves; 0 where none is faster."""
        return self._saved(self.auto)

    @property
    def fastest_beaten_by(self) -> float:
        """The same of the fastest plan that the search found."""
        return self._saved(self.fastest)

    def _saved(self, seconds: float) -> float:
        others = [other for other in (self.preset, self.other, self.annealed) if other is not None]
        return max(0.0, 1 - min(others, default=seconds) / seconds)


def main() -> None:
    """Judge each question, print a line for each, and the sums."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--questions", type=Path, default=QUESTIONS)
    flags.add_argument("--plans", type=int, default=100)
    flags.add_argument("--anneal", type=float, default=0.0, help="processor seconds of annealing for each question")
    flags.add_argument("--evaluations", type=float, help="length of the search for each question")
    flags.add_argument("--budget", type=float, help="seconds of search for each question, in place of evaluations")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--only", default="", help="numbers of questions, from 1 on")
    arguments = flags.parse_args()
    lines = questions(arguments.questions)
    chosen = [int(number) for number in arguments.only.split(",") if number] or range(1, len(lines) + 1)
    verdicts = []
    for number in chosen:
        draw = random.Random(arguments.seed)
        verdict = judge(
            lines[number - 1], arguments.plans, arguments.budget, draw, arguments.evaluations, arguments.anneal
        )
        verdicts.append(verdict)
        sums = {"number": number, "gap": verdict.gap, "beaten_by": verdict.beaten_by}
        print(json.dumps(sums | asdict(verdict)), flush=True)
    print(json.dumps(work(verdicts)))
    print(json.dumps(summary(verdicts)))


def questions(path: Path = QUESTIONS) -> list[str]:
    """Return the questions of a file, one a line, without comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def asked(line: str) -> Question:
    """Return the question of a line."""
    options = plan_command.read_options(read_flags(plan_command.plan, shlex.split(line)))
    return read_question(find_flow(options.algorithm), options)


def judge(
    line: str,
    num_plans: int,
    budget_seconds: float | None,
    draw: random.Random,
    evaluations: float | None = None,
    anneal_seconds: float = 0.0,
) -> Verdict:
    """Answer one question and try to disprove the answer."""
    question = asked(line)
    began = time.process_time()
    planned = plan_graph(question, budget_seconds, evaluations=evaluations)
    took = time.process_time() - began
    presets = [preset.plan for preset in planned.presets if preset.plan is not None]
    others = [question.seconds(plan) for plan in other_plans(question, planned, presets, num_plans, draw)]
    of_presets = [question.seconds(plan) for plan in presets]
    annealing = [question.seconds(plan) for plan in annealed(question, planned, drawn, anneal_seconds, draw)]
    rivals = [*of_presets, *others, *annealing]
    below = [s for s in (planned.fastest_seconds, *rivals) if s < planned.lower_bound_seconds * (1 - ROUNDING)]
    return Verdict(
        line,
        planned.seconds,
        planned.fastest_seconds,
        planned.lower_bound_seconds,
        planned.gap_parts,
        min(of_presets, default=None),
        min(others, default=None),
        min(annealing, default=None),
        len(rivals),
        len(below),
        took,
    )


def other_plans(
    question: Question, planned: Planned, presets: Sequence[ExecutionPlan], count: int, draw: random.Random
) -> Iterator[ExecutionPlan]:
    """Yield up to `count` different plans that fit: three of four are neighbours, the fourth is drawn from all."""
    seen: set[object] = {planned.plan.placements}
    for number in range(TRIES * count):
        if len(seen) > count:
            return
        known = {} if number % 4 == 3 else dict(draw.choice([planned.plan, *presets]).placements)
        try:
            plan = question.plan("other", drawn(planned, known, draw))
        except RlhfError:  # calls on one copy of weights that do not agree, for one
            continue
        if plan.placements not in seen and question.fits(plan):
            seen.add(plan.placements)
            yield plan


def drawn(planned: Planned, known: Mapping[str, Placement], draw: random.Random) -> dict[str, Placement]:
    """Return a placement of every call: one to three at random and the rest as `known`, or all at random."""
    candidates, meshes = planned.space.candidates, planned.space.context.space
    anew = draw.sample(sorted(candidates), min(len(candidates), draw.randint(1, 3))) if known else list(candidates)
    chosen = {name: known[name] for name in candidates if name not in anew}
    for name in anew:
        option = draw.choice(candidates[name])
        mesh = meshes.meshes[draw.choice(meshes.classes[option.mesh_class])]
        chosen[name] = replace(option.placement, mesh=mesh)
    return {name: replace(placement, device_order=()) for name, placement in chosen.items()}  # aligned anew


def work(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return what was looked at, and how long the answers took."""
    return {
        "plans": sum(verdict.plans for verdict in verdicts),
        "seconds_median": median(verdict.took for verdict in verdicts),
        "seconds_worst": max(verdict.took for verdict in verdicts),
    }


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the sums over all questions."""
    gaps = [verdict.gap for verdict in verdicts]
    return {
        "questions": len(verdicts),
        "violations": sum(verdict.violations for verdict in verdicts),
        "median_gap": median(gaps),
        "worst_gap": max(gaps),
        "beaten": sum(verdict.beaten_by > CLOSER for verdict in verdicts),
        "beaten_by_at_most": max(verdict.beaten_by for verdict in verdicts),
        "fastest_beaten_by_at_most": max(verdict.fastest_beaten_by for verdict in verdicts),
    }


if __name__ == "__main__":
    main()
