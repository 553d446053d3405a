"""Generates of one body on the same prompts, in a whole run: each has its own responses, unless it states whose."""

from pathlib import Path

import pytest

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from tests.support.runs import completed, leased, plan_file, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("prefect", "own_home")]


def test_calls_draw_for_themselves_and_alike_where_they_state_it_on_both_engines(parameters, tmp_path):
    flow = find_flow(f"{Path(__file__).with_name('draws_alike.py')}:draws_alike")
    generates = {"actor_generate": "megatron", "again": "megatron", "common": "megatron"}
    generates |= {"again_on_vllm": "vllm", "common_on_vllm": "vllm"}
    compared = [f"{name}_alike" for name in generates if name != "actor_generate"]
    calls = {name: f"0 engine={engine}" for name, engine in generates.items()}
    plan = plan_file(calls, tmp_path / "alone.json", compared)
    exact = {"actor": parameters["actor"] | {"dtype": "float32"}, "prompts": parameters["prompts"]}
    given = exact | {"steps": 1, "plan": str(plan), "output_dir": str(tmp_path / "runs")}
    with leased(1):
        (step,) = read_lines(completed(flow, given) / "metrics.jsonl")
    shares = {name: step[f"{name}.share"] for name in compared}
    assert shares == {"again_alike": 0, "common_alike": 1, "again_on_vllm_alike": 0, "common_on_vllm_alike": 1}
