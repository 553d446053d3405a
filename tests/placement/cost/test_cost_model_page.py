"""The page on the cost model says what the code has: every term, and at most eight constants."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from prefect_rlhf.flows.hardware.node_hardware import CALL_SECONDS, GPU_CALL_SECONDS, RUNTIME, VLLM_LAYER_SECONDS
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheets.hardware import DATASHEETS, NETWORKS, Efficiency, Hardware
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.known_models import known_shape

H100_PCIE = replace(DATASHEETS["h100"], name="h100-pcie", bfloat16_flops=756e12, memory_bytes_per_second=2.0e12)
"""NVIDIA H100 datasheet, PCIe: the device of a published figure. Nobody trains on it, so it is not in the list."""
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
    assert f"count {1e6 * VLLM_LAYER_SECONDS:.0f} us a layer" in PAGE
    ours = {"call_seconds": GPU_CALL_SECONDS, "graph_layer_seconds": VLLM_LAYER_SECONDS}
    assert replace(Efficiency(), **ours) == RUNTIME


def token_milliseconds(model, device, tp, context, efficiency=RUNTIME):
    """A decoded token of one row, by default with the constants of our runtime."""
    sheet = {**DATASHEETS, "h100-pcie": H100_PCIE}[device]
    times = DatasheetTimes.of(ModelSizes.of_shape(known_shape(model)), Hardware(sheet, 8, efficiency=efficiency))
    execution = Execution(Strategy(1, tp, 1), 1, 8, engine="vllm")
    one, more = (
        call_cost(CallWork("generate", 1, Workload.fixed(context, tokens)), execution, times).total for tokens in (1, 3)
    )
    return 1e3 * (more - one) / 2


def test_published_single_streams_are_within_15_percent():
    """The page has the model's figure of each. ReaL's constant is as far off as the page says."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.count(" ms |") == 2]
    assert len(lines) == 7
    for model, device, tp, context, published, estimated, _ in lines:
        found = token_milliseconds(model, device, int(tp), int(context))
        assert found == pytest.approx(float(estimated.removesuffix(" ms")), rel=0.01)
        assert found == pytest.approx(float(published.removesuffix(" ms")), rel=0.15)
        old = token_milliseconds(model, device, int(tp), int(context), Efficiency())
        assert old > 1.37 * float(published.removesuffix(" ms"))


def test_every_device_and_network_cites_its_source():
    assert all(one.source for one in (*DATASHEETS.values(), *NETWORKS.values()))
