"""What the cost model is told of a run's rows: lengths as the data has them, the longest possible row for memory."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.training.inputs import longest_sequence, read_run_inputs
from prefect_rlhf.flows.training.workload import run_workload
from tests.support.tiny import make_model, make_pairs, ppo_parameters

pytestmark = pytest.mark.quick


def asked(flow, parameters):
    """Inputs and graph of a flow."""
    _, arguments = RunOptions.split(flow.validate_parameters(parameters))
    inputs = read_run_inputs(arguments).checked()
    return inputs, flow.algorithm.trace(arguments, inputs.models, inputs.datasets)


def token_counts(source, key):
    return sorted(len(row) for row in source.read(range(len(source)))[key])


def test_prompts_are_as_long_as_they_are_and_responses_as_long_as_they_may_become(tmp_path):
    inputs, graph = asked(ppo, ppo_parameters(tmp_path))
    found, prompts = run_workload(graph, inputs), token_counts(inputs.sources["prompts"], "prompt_tokens")
    assert len(set(prompts)) > 1
    assert found.prompts.mean == pytest.approx(sum(prompts) / len(prompts))
    assert found.responses.mean == found.responses.longest == 5
    assert found.longest == longest_sequence(graph, inputs)


@pytest.mark.parametrize(("expected", "shares"), [("2", ((2, 1.0), (5, 0.0))), ("2:1,5:3", ((2, 0.25), (5, 0.75)))])
def test_responses_are_as_long_as_expected_and_memory_counts_the_longest(tmp_path, expected, shares):
    inputs, graph = asked(ppo, ppo_parameters(tmp_path))
    found = run_workload(graph, inputs, expected)
    assert found.responses.shares == shares
    assert found.longest == longest_sequence(graph, inputs)


def test_expected_lengths_may_be_a_number_of_yaml(tmp_path):
    options, _ = RunOptions.split(ppo.validate_parameters(ppo_parameters(tmp_path) | {"expected_response_length": 2}))
    assert options.expected_response_length == "2"
    with pytest.raises(InvalidInput, match="expected_response_length"):
        RunOptions(expected_response_length=True)


def test_without_generation_every_token_may_be_scored(tmp_path):
    model, pairs = make_model(tmp_path / "model", scalar=True), make_pairs(tmp_path / "pairs.parquet")
    data = {"path": pairs, "prompt_column": "prompt"}
    settings = {"pairs": data, "held_out": {**data, "split": "held_out"}, "reward": {"path": model, "head": "scalar"}}
    inputs, graph = asked(reward, settings | {"algo": {"batch_size": 4}})
    found, rows = run_workload(graph, inputs), token_counts(inputs.sources["pairs"], "tokens")
    assert found.prompts.longest == 0
    assert found.responses.mean == pytest.approx(sum(rows) / len(rows))
    assert found.longest == longest_sequence(graph, inputs)
    with pytest.raises(InvalidInput, match="expected_response_length: '3' is not used: no call generates; remove it"):
        run_workload(graph, inputs, "3")
