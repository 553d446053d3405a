"""The dataflow graph as people see it: every call, what it reads, and the version it waits for."""

from xml.etree import ElementTree

from prefect_rlhf.tasks.reporting.pictures.dataflow import dataflow_svg, dataflow_text, floors
from tests.support.strategies import ppo

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_a_box_for_each_call_and_dataset_and_a_line_for_each_edge():
    graph = ppo()
    drawn = ElementTree.fromstring(dataflow_svg(graph))
    names = {text[0].text for text in drawn.iter(f"{SVG}text")}
    assert names == {*(call.name for call in graph), *(data.name for data in graph.datasets)}
    lines = [line for line in drawn.iter(f"{SVG}path") if line.get("fill") == "none"]
    dashed = [line for line in lines if line.get("stroke-dasharray")]
    assert len(dashed) == sum(edge.source != edge.target for edge in graph.version_edges())
    assert len(lines) - len(dashed) == sum(len(call.inputs) for call in graph)


def test_a_calls_inputs_are_drawn_above_it():
    graph = ppo()
    floor = {name: number for number, level in enumerate(floors(graph)) for name in level}
    assert all(floor[port.source] < floor[call.name] for call in graph for port in call.inputs)


def test_the_text_says_which_version_each_call_waits_for():
    text = dataflow_text(ppo())
    assert "actor <- actor_train_step (of the step before)" in text
    assert all(f"\n{call.name}  " in text for call in ppo())
