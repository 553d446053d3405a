"""A searched plan with what the search counts as nothing: one call at a time goes where an iteration is shorter.

The search's problem leaves out moves of rows and copies that calls share. Here a few placements of each call that it
ranks highest are certified and timed as the plan was.
"""

from __future__ import annotations

from itertools import islice

from prefect_rlhf.placement.candidates import Candidates, Setting
from prefect_rlhf.placement.neighbours import NOTHING, changed_plan, neighbours
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner import Planner

TRIED = 2  # placements of a call


def polished(planner: Planner, plan: ExecutionPlan, setting: Setting, every: Candidates) -> ExecutionPlan:
    """The plan, or a faster one that fits; each call is looked at once. `every` are the calls' candidates."""
    seconds = planner.seconds(plan)
    for call, others in neighbours(planner, plan, setting, every).items():
        for placement in islice((placement for placement, has_room in others if has_room), TRIED):
            changed = changed_plan(planner, plan, call, placement)
            if changed is None:
                continue
            takes = planner.seconds(changed)
            if takes < seconds * (1 - NOTHING) and planner.fits(changed):
                plan, seconds = changed, takes
                break
    return plan
