"""The page on the cost model says what the code has: every term, and every constant of a runtime."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from prefect_rlhf.flows.hardware.node_hardware import CALL_SECONDS, RUNTIME, VLLM_LAYER_SECONDS
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Efficiency, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.models.model import TransformerShape

H100_PCIE = replace(DATASHEETS["h100"], name="h100-pcie", bfloat16_flops=756e12, memory_bytes_per_second=2.0e12)
"""NVIDIA H100 datasheet, PCIe: the device of a published figure. Nobody trains on it, so it is not in the list."""
PAGE = (Path(__file__).parents[3] / "docs" / "internals" / "cost_model.md").read_text()


def rows(heading):
    """The cells of each row of a section's table; rows begin with a name in code font."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def first_column(heading):
    return [row[0].strip("`") for row in rows(heading)]


def test_every_term_is_listed_and_has_a_source():
    assert first_column("Terms") == list(Seconds._fields)
    assert all(len(row) == 3 and row[2] for row in rows("Terms"))


def test_every_constant_is_listed_with_its_value_in_both_runtimes():
    """Also that of ReaL, whose tables set the defaults."""
    listed = rows("The constants of a runtime")
    assert [row[0].strip("`") for row in listed] == [field.name for field in fields(Efficiency)]
    for row, field in zip(listed, fields(Efficiency), strict=True):
        for cell, runtime in zip(row[1:3], (Efficiency(), RUNTIME), strict=True):
            assert number(cell) == pytest.approx(getattr(runtime, field.name)), field.name


def number(text):
    """A cell of the table: yes or no, or a number with its unit."""
    value, _, unit = text.partition(" ")
    if value in ("yes", "no"):
        return value == "yes"
    return float(value) * {"us": 1e-6, "ms": 1e-3}.get(unit, 1.0)


def test_the_page_has_our_own_runs_call_times_too():
    assert f"count {CALL_SECONDS * 1000:.0f} ms (`CALL_SECONDS`" in PAGE
    assert f"count {1e6 * VLLM_LAYER_SECONDS:.0f} us a layer" in PAGE
    assert (RUNTIME.call_seconds, RUNTIME.graph_layer_seconds) == (CALL_SECONDS, VLLM_LAYER_SECONDS)


SHAPE_1_3B = TransformerShape(2048, 8192, 24, 16, 16, 128, 50304, 32768, 1e4, 1e-5, False)
"""`1.3B` of benchmarks/gpu/models.py, with which the H100 was measured."""
CALLS = {
    "train_step of 1.3B": (SHAPE_1_3B, "train_step", 8, 0, 2048, 4),
    "inference of 1.3B": (SHAPE_1_3B, "inference", 8, 0, 2048, 4),
    "train_step of 1.5B, 64": (known_shape("qwen2.5-1.5b"), "train_step", 64, 128, 512, 4),
    "inference of 1.5B, 64": (known_shape("qwen2.5-1.5b"), "inference", 64, 128, 512, 4),
    "train_step of 1.5B, 256": (known_shape("qwen2.5-1.5b"), "train_step", 256, 128, 512, 16),
    "generation of 1.5B, 256": (known_shape("qwen2.5-1.5b"), "generate", 256, 128, 512, 1),
    "generation of 1.5B, 8": (known_shape("qwen2.5-1.5b"), "generate", 8, 128, 512, 1),
}


def test_the_readings_of_an_h100_are_within_10_percent():
    """The table of the page has what was measured, and what the model says with the constants of our runtime."""
    table = [line.strip("| ").split(" | ") for line in PAGE.split("| on one H100 |")[1].splitlines()[2:9]]
    for cells, (shape, kind, num_rows, prompt, response, micro_batches) in zip(table, CALLS.values(), strict=True):
        engine = "vllm" if kind == "generate" else "megatron"
        times = DatasheetTimes.of(
            ModelSizes.of_shape(shape), Hardware(DATASHEETS["h100"], 1, efficiency=RUNTIME), engine
        )
        work = CallWork(kind, num_rows, Workload.fixed(prompt, response))
        found = call_cost(work, Execution(Strategy(), micro_batches=micro_batches, engine=engine), times).total
        assert found == pytest.approx(number(cells[2]), rel=0.005), cells[0]
        assert found == pytest.approx(number(cells[1]), rel=0.1), cells[0]


NO_HOST = replace(RUNTIME, host_step_seconds=0.0, host_row_seconds=0.0)
"""Our runtime without the host's work beside a decoding step, which is that of our engine."""


def token_milliseconds(model, device, tp, context, efficiency=NO_HOST):
    """A decoded token of one row, by default with the constants of our runtime."""
    sheet = {**DATASHEETS, "h100-pcie": H100_PCIE}[device]
    hardware = Hardware(sheet, 8, efficiency=efficiency)
    times = DatasheetTimes.of(ModelSizes.of_shape(known_shape(model)), hardware, "vllm")
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
