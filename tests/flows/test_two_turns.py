"""Rows that a computation makes: as long as the body states, counted before a device is used, and held to it after."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.training.inputs import read_run_inputs
from prefect_rlhf.flows.training.workload import run_workload
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.row_set import RowLimit
from tests.support.runs import completed, leased, plan_file, read_lines

PAGE = Path(__file__).parents[2] / "docs" / "authoring.md"
ONE = ClusterShape("desk", num_nodes=1, devices_per_node=1, device_memory_bytes=8 << 30)
ALGO = {"batch_size": 4, "first": {"max_new_tokens": 5}, "second": {"max_new_tokens": 4}, "tool_tokens": 3}


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """The flow that docs/authoring.md shows, from a file of its own."""
    (text,) = re.findall(r"```python file=two_turns.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path_factory.mktemp("author") / "two_turns.py"
    file.write_text(text)
    return find_flow(f"{file}:two_turns")


@pytest.fixture(scope="module")
def given(parameters):
    """Parameters of two turns of at most 5 and 4 new tokens, with at most 3 of the tool between them."""
    return {name: parameters[name] for name in ("prompts", "actor", "reward", "output_dir")} | {"algo": ALGO}


def traced(flow, given, **algo):
    """The graph and the inputs of the flow."""
    _, arguments = RunOptions.split(flow.validate_parameters(given | {"algo": ALGO | algo}))
    inputs = read_run_inputs(arguments).checked()
    return flow.algorithm.trace(arguments, inputs.models, inputs.datasets), inputs


def test_the_longest_row_is_a_prompt_with_both_turns_and_the_tools_words(flow, given):
    graph, inputs = traced(flow, given)
    assert run_workload(graph, inputs).longest == inputs.longest["prompts"] + 5 + 3 + 4


def test_an_absolute_limit_counts_as_it_stands(flow, given):
    graph, inputs = traced(flow, given)
    calls = (replace(c, row_limit=RowLimit(longest=30)) if c.name == "ask_tool" else c for c in graph)
    assert run_workload(replace(graph, calls=tuple(calls)), inputs).longest == 30 + 4


def test_the_second_turn_is_estimated_on_its_own_prompts(flow, given):
    """Its prompts have what the first turn and the tool add; what is trained on has both turns as one response."""
    graph, inputs = traced(flow, given)
    workload = run_workload(graph, inputs)
    first, second, trained = (
        CallWork.expected(graph.call(name), workload).workload
        for name in ("actor_generate", "second_turn", "actor_train")
    )
    assert second.prompts.mean == pytest.approx(first.prompts.mean + 5 + 3, abs=0.5)
    assert trained.responses.mean == pytest.approx(second.prompts.mean + 4, abs=0.5)
    assert first.longest == second.longest == trained.longest == workload.longest


def test_the_certificate_counts_tool_answers(flow, given):
    """Cache and activations of both generates, and those of training."""

    def peak(**algo):
        graph, inputs = traced(flow, given, **algo)
        workload = run_workload(graph, inputs)
        plan = preset("flattening", graph, ONE, ONE.whole, workload.longest, "cpu")
        (found,) = certify_plan(plan, graph, workload, "cpu").peaks
        return found.num_bytes

    assert peak(tool_tokens=3) < peak(tool_tokens=20) < peak(tool_tokens=40)


@pytest.mark.parametrize(
    ("algo", "says"),
    [
        (
            {"tool_tokens": 60},
            r"ask_tool\.max_new_tokens: got 60, expected at most \d+, the room left in the models' context",
        ),
        (
            {"tool_tokens": 50, "second": {"max_new_tokens": 30}},
            r"algo\.second\.max_new_tokens: got 30, expected at most \d, the room left in the models' context",
        ),
    ],
)
def test_rows_beyond_the_context_are_refused(flow, given, algo, says):
    with pytest.raises(InvalidInput, match=says):
        run_workload(*traced(flow, given, **algo))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect", "own_home")
def test_two_turns_run_as_the_docs_show_them(flow, given, tmp_path):
    graph, _ = traced(flow, given)
    engines = {call.name: f"0 engine={'python' if call.kind == 'compute' else 'megatron'}" for call in graph}
    plan = plan_file(engines, tmp_path / "alone.json", ())
    with leased(1):
        (step,) = read_lines(completed(flow, given | {"steps": 1, "plan": str(plan)}) / "metrics.jsonl")
    assert step["actor_train.grad_norm"] > 0
