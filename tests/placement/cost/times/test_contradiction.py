"""When a profile and a probe of the same devices contradict each other."""

from dataclasses import replace

import pytest

from prefect_rlhf.flows.hardware.node_hardware import node_hardware
from prefect_rlhf.placement.cost.speeds import Speeds
from prefect_rlhf.placement.cost.times.contradiction import CONTRADICTION, contradictions
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from tests.placement.cost.times.test_profile import SIZES, measure

pytestmark = pytest.mark.quick

SPEEDS = Speeds(
    dtype="bfloat16",
    product_flops=4e14,
    memory_bytes_per_second=2e12,
    host_bytes_per_second=3e10,
    link_bytes_per_second=2e11,
)


def profile_of(speeds):
    """The profile of eight devices that have exactly these speeds."""
    return replace(measure(DatasheetTimes.of(SIZES, speeds.on(node_hardware("h100", 8, None)))), num_devices=8)


def found(**changes):
    return contradictions(profile_of(replace(SPEEDS, **changes)), SPEEDS.on(node_hardware("h100", 8, None)))


def test_numbers_that_agree_within_the_factor_are_no_contradiction():
    assert found() == []
    assert found(product_flops=SPEEDS.product_flops / (0.9 * CONTRADICTION)) == []


@pytest.mark.parametrize("factor", [1.2 * CONTRADICTION, 1 / (1.2 * CONTRADICTION)])
def test_each_time_that_differs_by_more_is_named_with_both_values(factor):
    forward, backward = found(
        product_flops=SPEEDS.product_flops / factor, memory_bytes_per_second=SPEEDS.memory_bytes_per_second / factor
    )
    assert forward.startswith("a layer's forward of 128 x 2048 tokens ")
    assert forward.endswith(" ms by the probe") and " ms by the profile, " in forward
    assert backward.startswith("a layer's backward of 128 x 2048 tokens ")
    (link,) = found(link_bytes_per_second=2e11 / factor)
    assert link == f"a megabyte between devices {5e-3 * factor:.3g} ms by the profile, 0.005 ms by the probe"


def test_a_profile_of_a_single_device_has_no_link_to_compare():
    slow_link = replace(profile_of(replace(SPEEDS, link_bytes_per_second=1e9)), num_devices=1)
    assert contradictions(slow_link, SPEEDS.on(node_hardware("h100", 1, None))) == []
