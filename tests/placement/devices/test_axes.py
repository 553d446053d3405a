"""Axes are a table: strategies, plan files, parameters and texts read it."""

from dataclasses import fields
from inspect import Signature
from itertools import pairwise

import pytest

from prefect_rlhf.errors.errors import NotUsed
from prefect_rlhf.flows.forms.check import checked_parameters
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.forms.placement_words import PlacementWords
from prefect_rlhf.placement.devices.axes import AXES, INNERMOST_FIRST, OFFERED, ORDER
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.devices.strategy import Coordinate, Strategy
from prefect_rlhf.placement.plans.plan_file import CallEntry, parse_plan

pytestmark = pytest.mark.quick

DESK = ClusterShape("desk", 1, 4, 8 << 30)


def test_a_strategy_has_a_degree_for_each_axis_that_an_engine_offers():
    assert tuple(field.name for field in fields(Strategy)) == OFFERED
    assert dict(Strategy(2, 3, 4, 2).degrees) == {"dp": 2, "tp": 3, "pp": 4, "ep": 2}
    assert {field.name for field in fields(Coordinate)} == set(ORDER)
    assert set(OFFERED) <= CallEntry.model_fields.keys() & PlacementWords.model_fields.keys()


def test_an_axis_takes_its_own_devices_or_divides_another_axis():
    own = {name for name, axis in AXES.items() if axis.within is None}
    assert set(INNERMOST_FIRST) == own
    assert {axis.within for axis in AXES.values()} - {None} <= own


@pytest.mark.parametrize("axis", ORDER)
def test_a_stride_is_the_distance_of_neighbours_along_an_axis(axis):
    strategy = Strategy(dp=2, tp=4, pp=3)
    others = [other for other in ORDER if other != axis]
    lines: dict[tuple[int, ...], list[int]] = {}
    for place, at in enumerate(strategy.coordinates()):
        lines.setdefault(tuple(getattr(at, other) for other in others), []).append(place)
    distances = {second - first for line in lines.values() for first, second in pairwise(line)}
    assert distances == {strategy.stride(axis)}


def test_an_axis_that_no_engine_offers_is_refused_in_one_line():
    text = "cp: 2 is not used: no engine offers context parallelism, which divides the tokens of each row; remove it"
    with pytest.raises(NotUsed) as caught:
        parse_plan({"name": "mine", "calls": {"a": {"mesh": "n0:0-1", "engine": "megatron", "cp": 2}}}, DESK)
    assert str(caught.value) == f"plan.calls.a.{text}"
    with pytest.raises(NotUsed) as caught:
        checked_parameters(Signature(RunOptions.signature()), {"placement": {"actor_train": {"cp": 2}}})
    assert str(caught.value) == f"placement.actor_train.{text}"
