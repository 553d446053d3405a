"""One question on clusters of several sizes: what each costs, and from which size on more devices bring little."""

import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.memory.certificate import Certificate, Peak
from prefect_rlhf.placement.memory.needs import ByteShare
from prefect_rlhf.placement.planner.sweep import Sweep, check_sizes, static_share, sweep
from prefect_rlhf.tasks.reporting.pictures.sweep import sweep_svg

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Answered:
    """What a sweep reads of a planned question."""

    seconds: float
    lower_bound_seconds: float
    certificate: Certificate


def certificate(*static, passing=5):
    """Devices of 100 bytes: what gradients and optimizers fill of each, beside weights and what passes."""
    peaks = (
        Peak(
            f"n0:{index}",
            "train@0",
            (
                ByteShare("actor", "gradients", size // 3, False),
                ByteShare("actor", "optimizer", size - size // 3, False),
                ByteShare("actor", "weights", 20, False),
                ByteShare("train@0", "optimizer", passing, True),
            ),
            100,
        )
        for index, size in enumerate(static)
    )
    return Certificate("auto", tuple(peaks), (), 0)


def planned(num_nodes):
    """Twice the nodes take 0.6 of the time; one node holds too little."""
    if num_nodes == 1:
        raise InvalidInput("plan of ppo", "120 GiB", "a plan within 80 GiB")
    return Answered(100 * 0.6 ** (num_nodes // 2), 50.0, certificate(160 // num_nodes, 30))


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep([4, 1, 2, 4], 8, planned)


def test_sizes_ascend_and_each_is_asked_once(swept):
    assert [(size.num_nodes, size.num_devices) for size in swept.sizes] == [(1, 8), (2, 16), (4, 32)]


def test_device_hours_are_devices_times_seconds(swept):
    assert swept.sizes[1].device_hours == pytest.approx(16 * 60 / 3600)


def test_static_memory_is_gradients_and_optimizer_of_the_device_that_has_most():
    """Neither weights, which move, nor what a node needs while it runs."""
    assert static_share(certificate(30, 45)) == pytest.approx(0.45)


def test_the_first_size_whose_static_use_is_below_60_percent_is_named(swept):
    assert swept.first_below == swept.sizes[2]
    assert "below 60% from 4 nodes (32 devices) on" in swept.text()
    assert "on any of these sizes" in sweep([2], 8, planned).text()


def test_a_size_without_a_plan_says_why(swept):
    assert swept.sizes[0].seconds is None and "120 GiB" in swept.text()


def test_a_machine_reads_the_same(swept):
    content = json.loads(swept.to_json())
    assert [size["num_nodes"] for size in content["sizes"]] == [1, 2, 4]
    assert (content["first_below"], content["sizes"][0]["seconds"]) == (4, None)


def test_the_picture_has_a_bar_for_each_size_that_has_a_plan(swept):
    """Three panels, two bars each; their heights are in proportion to the values."""
    bars = [one for one in ET.fromstring(sweep_svg(swept)).iter(f"{SVG}rect") if one.get("rx")]
    assert len(bars) == 6
    seconds = [float(bar.get("height")) for bar in bars[:2]]
    assert seconds[1] / seconds[0] == pytest.approx(0.6, rel=0.01)


def test_a_size_below_one_node_is_refused():
    with pytest.raises(InvalidInput, match="sweep: got"):
        check_sizes([2, 0])
