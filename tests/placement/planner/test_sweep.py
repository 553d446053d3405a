"""One question on clusters of several sizes: what each costs, and from which size on more devices bring little."""

import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest

from prefect_rlhf.errors.errors import InvalidInput, NoClusterFits, NoClusterSuffices, PlanDoesNotFit
from prefect_rlhf.placement.memory.certificate import Certificate, Peak
from prefect_rlhf.placement.memory.needs import ByteShare
from prefect_rlhf.placement.planner.sweep import (
    ClusterSize,
    SizedPlan,
    Sweep,
    check_sizes,
    smallest_cluster,
    static_share,
    sweep,
)
from prefect_rlhf.placement.schedule.throughput import IterationWork
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


def sizes(kind, *num_nodes):
    return [ClusterSize(f"{nodes}x8:{kind}", kind, nodes, 8) for nodes in num_nodes]


def planned(size, speed=1.0, dollars=None):
    """Twice the nodes take 0.6 of the time; one node holds too little."""
    if size.num_nodes == 1:
        raise PlanDoesNotFit(f"plan of {size.name}", "120 GiB on n0:0", "a plan within 80 GiB", "", "{}")
    seconds = 100 * 0.6 ** (size.num_nodes // 2) / speed
    work = IterationWork(64, 120_000, 60_000, None if dollars is None else dollars * size.num_devices)
    return SizedPlan(
        Answered(seconds, 50.0, certificate(160 // size.num_nodes, 30)), work, 0.96 - size.num_nodes / 100, 0.4
    )


def of_two_kinds(size):
    """The new kind is three times as fast, and a device of it has four times the price."""
    return planned(size, *{"old": (1.0, 1.0), "new": (3.0, 4.0)}[size.kind])


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep(sizes("h100", 1, 2, 4, 2), planned)


def test_each_size_is_asked_once(swept):
    assert [(size.num_nodes, size.num_devices) for size in swept.sizes] == [(1, 8), (2, 16), (4, 32)]


def test_device_hours_are_devices_times_seconds(swept):
    assert swept.sizes[1].device_hours == pytest.approx(16 * 60 / 3600)


def test_static_memory_is_gradients_and_optimizer_of_the_device_that_has_most():
    """Neither weights, which move, nor what a node needs while it runs."""
    assert static_share(certificate(30, 45)) == pytest.approx(0.45)


def test_the_first_size_whose_static_use_is_below_60_percent_is_named(swept):
    assert swept.first_below == {"h100": swept.sizes[2]}
    assert "fill less than" not in swept.text(), "no larger size is in the table"
    larger = sweep(sizes("h100", 1, 2, 4, 8), planned)
    assert "beyond 32 devices a step gains less and less" in larger.text()


def test_a_size_without_a_plan_says_why(swept):
    assert swept.sizes[0].seconds is None and "does not fit: 120 GiB on n0:0" in swept.text()


def test_a_row_has_tokens_per_second_utilisation_and_dollars_if_there_are_prices(swept):
    assert "$" not in swept.text()
    header, row = (line.split("  ") for line in sweep(sizes("new", 2), of_two_kinds).text().splitlines()[:2])
    cells = dict(zip(filter(None, header), filter(None, row), strict=False))
    cells = {title.strip(): cell.strip() for title, cell in cells.items()}
    assert (cells["tokens/s"], cells["MFU"], cells["$/hour"]) == ("6,000", "40.0%", "64.00")
    assert float(cells["$/M response tokens"]) == pytest.approx(64 * 20 / 3600 / 0.06, rel=0.01)


@pytest.mark.parametrize(
    ("at_least", "priced", "unpriced"),
    [
        (None, "2x8:old", "2x8:new"),
        (2500, "4x8:old", "2x8:new"),
        (5000, "2x8:new", "2x8:new"),
        (7000, "4x8:new", "4x8:new"),
    ],
)
def test_the_smallest_cluster_costs_least_with_prices_and_has_fewest_devices_without(at_least, priced, unpriced):
    """Of equally many devices the fastest."""
    asked = [*sizes("old", 1, 2, 4), *sizes("new", 1, 2, 4)]
    assert smallest_cluster(sweep(asked, of_two_kinds, at_least)).cluster == priced
    without = sweep(asked, lambda size: planned(size, {"old": 1.0, "new": 3.0}[size.kind]), at_least)
    assert smallest_cluster(without).cluster == unpriced
    assert f"{unpriced} is the smallest cluster that " in without.text()


def test_a_throughput_that_no_cluster_reaches_is_refused_with_the_fastest(swept):
    with pytest.raises(NoClusterSuffices, match="at_least: got 20000, expected at most 3,333 tokens/s, which 4x8:h100"):
        smallest_cluster(sweep(sizes("h100", 2, 4), planned, 20000))
    with pytest.raises(NoClusterFits, match="expected a cluster with a plan that fits: more or larger") as error:
        smallest_cluster(sweep([*sizes("h100", 1), *sizes("l40s", 1)], planned))
    assert "does not fit: 120 GiB" in error.value.report


def test_other_reasons_than_memory_are_no_lack_of_memory():
    """No number of devices helps if a row of the table has another reason."""

    def mixed(size):
        if size.num_nodes == 1:
            return planned(size)
        raise InvalidInput("algo.batch_size", 3, "a multiple of 2")

    with pytest.raises(NoClusterSuffices, match="cluster: got '1x8:h100, 2x8:h100', expected a cluster with") as error:
        smallest_cluster(sweep(sizes("h100", 1, 2), mixed))
    assert "does not fit: 120 GiB" in error.value.report and "a multiple of 2" in error.value.report


def test_a_mistake_in_the_question_itself_is_not_hidden_in_rows():
    def mistaken(size):
        raise InvalidInput("pins.judge", "n0:0", "a call")

    with pytest.raises(InvalidInput, match="pins.judge"):
        sweep(sizes("h100", 1, 2), mistaken)


def test_a_machine_reads_the_same(swept):
    content = json.loads(swept.to_json())
    assert [size["num_nodes"] for size in content["sizes"]] == [1, 2, 4]
    assert (content["first_below"], content["sizes"][0]["seconds"]) == ({"h100": 4}, None)
    assert (content["smallest"], content["sizes"][1]["tokens_per_second"]) == ("2x8:h100", 2000)


def test_the_picture_has_a_bar_for_each_size_that_has_a_plan(swept):
    """Three panels, two bars each; their heights are in proportion to the values."""
    bars = [one for one in ET.fromstring(sweep_svg(swept)).iter(f"{SVG}rect") if one.get("rx")]
    assert len(bars) == 6
    seconds = [float(bar.get("height")) for bar in bars[:2]]
    assert seconds[1] / seconds[0] == pytest.approx(0.6, rel=0.01)


def test_a_size_below_a_node_is_refused():
    with pytest.raises(InvalidInput, match="sweep: got"):
        check_sizes([2, 0])
