"""The page on the cost model says what the code has: every term, and at most eight constants."""

from dataclasses import fields, replace
from pathlib import Path

from prefect_rlhf.flows.hardware.node_hardware import CALL_SECONDS, GPU_CALL_SECONDS, RUNTIME
from prefect_rlhf.placement.cost.datasheets.hardware import DATASHEETS, NETWORKS, Efficiency
from prefect_rlhf.placement.cost.seconds import Seconds

PAGE = (Path(__file__).parents[3] / "docs" / "cost_model.md").read_text()


def rows(heading):
    """The cells of each row of a section's table; rows begin with a name in code font."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def first_column(heading):
    return [row[0].strip("`") for row in rows(heading)]


def test_every_term_is_listed_and_has_a_source():
    assert first_column("Terms") == list(Seconds._fields)
    assert all(len(row) == 3 and row[2] for row in rows("Terms"))


def test_there_are_eight_constants_and_each_is_listed():
    names = [field.name for field in fields(Efficiency)]
    assert first_column("The eight constants") == names
    assert len(names) == 8


def test_what_a_call_of_our_own_runs_takes_is_there_too():
    """In place of one of the eight, so there are never more."""
    assert f"{CALL_SECONDS * 1000:.0f} ms instead (`CALL_SECONDS`" in PAGE
    assert f"{GPU_CALL_SECONDS * 1000:.0f} ms (`GPU_CALL_SECONDS`)" in PAGE
    assert replace(Efficiency(), call_seconds=GPU_CALL_SECONDS) == RUNTIME


def test_every_device_and_network_cites_its_source():
    assert all(one.source for one in (*DATASHEETS.values(), *NETWORKS.values()))
