"""Curves of metrics as a picture: every finite value has its place, and a run of any length few points."""

import re
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.tasks.reporting.pictures.curves import HEIGHT, WIDTH, curves_svg

SVG = "{http://www.w3.org/2000/svg}"


def panels(svg):
    """The points of each panel's curve, by its name."""
    found = ElementTree.fromstring(svg).findall(f"{SVG}g")
    return {
        group.find(f"{SVG}text").text: [
            tuple(map(float, point.split(","))) for point in group.find(f"{SVG}polyline").get("points").split()
        ]
        for group in found
    }


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30))
def test_every_value_is_at_its_place_in_the_panel(values):
    (points,) = panels(curves_svg({"a<b.loss": list(enumerate(values))})).values()
    assert len(points) == len(values)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    ranked = sorted(zip(values, points, strict=True))
    assert all(lower[1][1] >= higher[1][1] for lower, higher in pairwise(ranked))  # up is more


def test_panels_share_their_steps():
    """What is measured now and then stands above the steps of its measurements."""
    drawn = panels(curves_svg({"every": [(0, 1.0), (5, 2.0), (10, 3.0)], "once": [(5, 7.0)]}))
    assert drawn["once"][0][0] == drawn["every"][1][0]


def test_values_that_are_not_finite_are_left_out():
    drawn = panels(curves_svg({"a": [(0, 1.0), (1, float("nan")), (2, 2.0)], "b": [(0, float("inf"))]}))
    assert len(drawn["a"]) == 2 and "b" not in drawn


def test_without_curves_there_is_still_a_picture():
    assert ElementTree.fromstring(curves_svg({})).tag == f"{SVG}svg"


def test_the_newest_value_is_written_beside_the_name():
    assert re.search(r">kl</text>\s*<text[^>]*>0.25</text>", curves_svg({"kl": [(0, 0.5), (1, 0.25)]}))


def test_the_values_beside_the_axis_differ():
    """A curve that stays at 8 once had 8 beside each of its three lines."""
    written = re.findall(r'text-anchor="end" fill="#666666"[^>]*>([^<]*)<', curves_svg({"turns": [(0, 8.0)]}))
    assert written == ["8.004", "8", "7.996"]


def test_a_curve_is_within_its_band_and_both_are_in_the_panel():
    svg = curves_svg({"score": [(0, 0.5), (4, 0.6)], "b": [(0, 1.0)]}, {"score": [(0, 0.2, 0.9), (4, 0.1, 0.7)]})
    (band,) = ElementTree.fromstring(svg).findall(f"{SVG}g/{SVG}polygon")
    around = [tuple(map(float, point.split(","))) for point in band.get("points").split()]
    (first, last), (top, last_top, last_low, low) = panels(svg)["score"], around
    assert first[0] == top[0] == low[0] and last[0] == last_top[0] == last_low[0]
    assert 0 <= top[1] < first[1] < low[1] <= HEIGHT and last_top[1] < last[1] < last_low[1]
