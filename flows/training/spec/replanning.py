"""The parameter `replan` as a value: the reaction to a better plan found by measuring steps."""

from dataclasses import dataclass

from prefect_rlhf.errors.errors import NotUsed
from prefect_rlhf.flows.forms.options import RunOptions


@dataclass(frozen=True, slots=True)
class Say:
    """Report once a plan that saves at least `gain` of a step."""

    gain: float


@dataclass(frozen=True, slots=True)
class Switch:
    """Switch to a plan that saves at least `gain` of a step; check after the first steps, and then `every` steps."""

    gain: float
    every: int


Replanning = Say | Switch
"""A run without this does not look for a better plan."""


def read_replanning(options: RunOptions) -> Replanning | None:
    """Return the reaction to a better plan. Raises NotUsed for settings of `replan` without effect."""
    fields = RunOptions.model_fields
    if options.replan != "switch" and options.replan_every != fields["replan_every"].default:
        raise NotUsed("replan_every", options.replan_every, f"replan is {options.replan}", "set replan: switch")
    if options.replan == "off" and options.replan_gain != fields["replan_gain"].default:
        raise NotUsed("replan_gain", options.replan_gain, "replan is off", "set replan: say or switch")
    if options.replan == "off":
        return None
    if options.replan == "say":
        return Say(options.replan_gain)
    return Switch(options.replan_gain, options.replan_every)
