"""The picture of a plan's memory: a bar for each kind of device, as wide as its bytes, and what a plan may fill."""

import xml.etree.ElementTree as ET

from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.bytes import GIB, byte_size
from prefect_rlhf.placement.memory.certificate import Certificate, Peak
from prefect_rlhf.placement.memory.needs import ByteShare
from prefect_rlhf.tasks.reporting.pictures.memory import SHOWN, WIDTH, memory_svg

SVG = "{http://www.w3.org/2000/svg}"


def peak(device: str, *sizes: int) -> Peak:
    shares = tuple(ByteShare(f"owner{number}", "weights", size * GIB, False) for number, size in enumerate(sizes))
    return Peak(device, "train@1", shares, 9 * GIB)


def bars(svg: str) -> dict[str, float]:
    """The width of each part by its title."""
    return {
        part.findtext(f"{SVG}title") or "": float(part.attrib["width"])
        for part in ET.fromstring(svg).iter(f"{SVG}rect")
        if part.find(f"{SVG}title") is not None
    }


def drawn(*peaks: Peak) -> str:
    return memory_svg(Certificate("mine", peaks, (), 0), ClusterShape("two", 1, 2, 10 * GIB))


def test_equal_devices_share_a_bar_with_parts_in_proportion_to_bytes():
    svg = drawn(peak("n0:0", 2, 5), peak("n0:1", 2, 5))
    assert svg.count("n0:0-1 during train: 7.0 of 10.0 GiB") == 1
    widths = bars(svg)
    assert widths[f"owner1: weights {byte_size(5 * GIB)}"] == WIDTH / 2
    assert widths[f"owner0: weights {byte_size(2 * GIB)}"] == WIDTH / 5
    assert f"a plan may fill {byte_size(9 * GIB)}" in svg


def test_different_devices_have_bars_of_their_own_and_small_owners_share_a_colour():
    svg = drawn(peak("n0:0", *range(1, SHOWN + 3)), peak("n0:1", 3))
    assert "n0:0 during" in svg and "n0:1 during" in svg and "all others" in svg
    assert len(bars(svg)) == SHOWN + 3  # each share once, of both devices
