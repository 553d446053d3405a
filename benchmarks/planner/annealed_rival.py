"""A rival of the planner's answer: simulated annealing on the full estimate, from the answer, in processor seconds.

It shares no search with the planner: each step draws placements of one to three calls, completes, certifies and times
the plan, and takes a slower plan with a probability that falls with the time left.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question

HOTTEST = 0.03  # of an iteration: a plan that is slower by this is taken in one of e cases at first
Draw = Callable[[Planned, dict[str, Placement], random.Random], dict[str, Placement]]


def annealed(
    question: Question, planned: Planned, draw_placements: Draw, cpu_seconds: float, draw: random.Random
) -> Iterator[ExecutionPlan]:
    """Yield each plan that is taken, until `cpu_seconds` of processor time have passed; all of them fit."""
    began, plan, seconds = time.process_time(), planned.plan, planned.seconds
    while (elapsed := time.process_time() - began) < cpu_seconds:
        try:
            other = question.plan("annealed", draw_placements(planned, dict(plan.placements), draw))
        except RlhfError:  # calls on one copy of weights that do not agree, for one
            continue
        slower = question.seconds(other) / seconds - 1
        temperature = HOTTEST * (1 - elapsed / cpu_seconds)
        is_taken = slower <= 0 or draw.random() < math.exp(-slower / max(temperature, 1e-9))
        if is_taken and question.fits(other):
            plan, seconds = other, question.seconds(other)
            yield plan
