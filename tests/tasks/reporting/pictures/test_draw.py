"""Plans, graphs and timelines as people see them."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import SWITCH
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.schedule import schedule
from prefect_rlhf.tasks.reporting.pictures.plan import schedule_bars
from prefect_rlhf.tasks.reporting.pictures.text import graph_text, plan_rows, plan_text
from prefect_rlhf.tasks.reporting.pictures.timeline import COLOURS, Bar, timeline_svg
from tests.support.strategies import TWO_DEVICES, ppo

PLAN = preset("flattening", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_plan_table_has_a_row_per_call():
    rows = plan_rows(PLAN, ppo())
    assert [row["call"] for row in rows] == [call.name for call in ppo()]
    assert rows[0] == {
        "call": "actor_generate",
        "runs": "generate",
        "role": "actor",
        "engine": "vllm",
        "mesh": "n0:0-1",
        "dp": "2",
        "tp": "1",
        "pp": "1",
        "rows": "8",
        "mini-batches": "",
        "micro-batches": "",
    }


def test_the_table_has_a_column_for_each_decision_of_the_plan():
    """Any field of a placement that some call does not have as usual, and expert parallelism, beside the others."""
    placements = dict(PLAN.placements)
    shared = placements["actor_train_step"]
    placements["actor_train_step"] = replace(shared, strategy=replace(shared.strategy, ep=2))
    placements["actor_generate"] = replace(placements["actor_generate"], offload="all", prefetch=False)
    placements["ref_inference"] = replace(placements["ref_inference"], device_order=(1, 0))
    rows = plan_rows(replace(PLAN, placements=tuple(placements.items())), ppo())
    cells = {row["call"]: (row["offload"], row["prefetch"], row["order"]) for row in rows}
    assert cells["actor_generate"] == ("all", "no", "")
    assert cells["ref_inference"] == ("", "", "1 0")
    assert {row["call"]: row["ep"] for row in rows if row["ep"]} == {"actor_train_step": "2"}
    assert list(rows[0])[5:9] == ["dp", "tp", "pp", "ep"]
    assert not {"ep", "offload", "prefetch", "order"} & plan_rows(PLAN, ppo())[0].keys()


def test_the_table_and_the_picture_show_parts():
    placements = dict(PLAN.placements)
    placements["actor_generate"] = replace(placements["actor_generate"], parts=4)
    plan = replace(PLAN, placements=tuple(placements.items()))
    assert {row["call"]: row["parts"] for row in plan_rows(plan, ppo()) if row["parts"]} == {"actor_generate": "4"}
    bars = schedule_bars(schedule(augment(ppo(), plan, 1), lambda node: 1.0))
    drawn = timeline_svg(bars)
    assert all(f"<title>actor.generate · part {part} of 4 · step 1 · " in drawn for part in (1, 2, 3, 4))


def test_replicas_of_different_speeds_are_shown_with_the_rows_they_get():
    cluster = ClusterShape("halves", 2, 1, TWO_DEVICES.device_memory_bytes, node_speeds=(1.0, 0.5))
    plan = preset("flattening", ppo(), cluster, cluster.whole)
    rows = {row["call"]: row["rows"] for row in plan_rows(plan, ppo())}
    assert (rows["actor_generate"], rows["advantages"]) == ("8 (6 2)", "8")


def test_the_text_table_is_aligned():
    lines = plan_text(PLAN, ppo()).splitlines()
    column = lines[0].index("mesh")
    assert {line[column : column + 2] for line in lines[1:]} == {"n0"}


def test_the_graph_as_text_names_every_node_of_the_first_steps_and_why_it_waits():
    augmented = augment(ppo(), PLAN, 5)
    text = graph_text(augmented)
    for step in (0, 1):
        assert all(node.title in text for node in augmented.of_step(step))
    assert "    version <- reallocate.actor.vllm@2 (actor v1)" in text
    assert text.splitlines()[1] == "    data <- dataset prompts (prompt_tokens)"
    assert text.endswith("\n... and 3 more steps")
    assert graph_text(augment(ppo(), PLAN, 3)).endswith("\n... and 1 more step")
    assert augment(ppo(), PLAN, 2).nodes[-1].title in graph_text(augment(ppo(), PLAN, 2))


def rectangles(bars):
    """Of each bar of the picture: its title and its rectangle as (left, top, right, bottom)."""
    root = ElementTree.fromstring(timeline_svg(bars))
    found = []
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect").attrib
        x, y, width, height = (float(box[key]) for key in ("x", "y", "width", "height"))
        found.append((group.find(f"{SVG}title").text, (x, y, x + width, y + height)))
    return found


def test_a_bar_begins_and_ends_at_its_times():
    [(_, first), (_, second)] = rectangles(
        [Bar("a", "generate", ("n0:0",), 100.0, 110.0), Bar("b", "compute", ("n0:0",), 110.0, 120.0)]
    )
    assert (first[0], first[2], second[2]) == pytest.approx((92, 638, 1184), abs=0.2)


def test_nodes_without_devices_have_no_lane():
    """The commit of a checkpoint is the controller's."""
    written = Bar("actor.checkpoint", "checkpoint", ("n0:0",), 0, 1)
    assert rectangles([written, Bar("checkpoint.commit", "commit", (), 1, 2)]) == rectangles([written])


def test_neighbouring_devices_of_one_node_share_a_bar():
    [(_, both)] = rectangles([Bar("a", "generate", ("n0:0", "n0:1"), 0, 1)])
    [(_, one), (_, other)] = rectangles([Bar("a", "generate", ("n0:0",), 0, 1), Bar("b", "generate", ("n0:1",), 0, 1)])
    assert (both[1], both[3]) == (one[1], other[3])


@given(
    st.lists(
        st.builds(
            lambda devices, start, length, kind: Bar(f"<{kind}> & {start}", kind, devices, start, start + length),
            st.sampled_from([("n0:0",), ("n0:1",), ("n0:0", "n0:1"), ("n0:0", "n0:3"), ("n1:10",)]),
            st.integers(0, 30),
            st.integers(1, 10),
            st.sampled_from([*COLOURS, "unknown"]),
        ),
        max_size=12,
        unique=True,
    )
)
def test_bars_do_not_cover_each_other(bars):
    """Whatever ran together is drawn beside each other, and inside the picture; titles are escaped."""
    boxes = [box for _, box in rectangles(bars)]
    for index, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 63.9 and right <= 1200
        for other in boxes[:index]:
            apart = right <= other[0] + 0.2 or other[2] <= left + 0.2
            assert apart or bottom <= other[1] + 0.2 or other[3] <= top + 0.2


def test_the_legend_names_the_kinds_that_ran():
    kinds = ("generate", "offload", SWITCH)
    text = timeline_svg([Bar(kind, kind, ("n0:0",), start, start + 1) for start, kind in enumerate(kinds)])
    assert {kind for kind in COLOURS if f">{kind}</text>" in text} == set(kinds)
