"""An output of a forward pass is an entry of a table: bodies, losses, costs, rows and trials read it there."""

import re
from pathlib import Path

import pytest

from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.engines.rank.trial.trial_rank import made_up
from prefect_rlhf.engines.rows import keys_of_calls
from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.placement.cost.moves import row_bytes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.outputs import OUTPUTS, Output, head_of, register
from prefect_rlhf.placement.rows.shares import _stage_keys
from prefect_rlhf.tasks.settings import Sampling
from prefect_rlhf.tasks.tracing.calls import generate, inference, train_step
from prefect_rlhf.tasks.tracing.operations import loss
from tests.engines.likeliest import NAME, OUTPUT, WIDTH, registered
from tests.tasks.tracing.test_trace import Gain, traced

ROOT = Path(__file__).parents[3]


@pytest.fixture
def likeliest():
    with registered():
        yield


def graph_of(body_output):
    def body(prompts, actor, reward):
        rollout = generate(actor, prompts, batch_size=4, sampling=Sampling(max_new_tokens=3), samples=2)
        inference(actor, rollout, output=body_output, name="further")
        inference(reward, rollout, output="scores")
        train_step(actor, flatness(Gain()).on(rollout))

    with registered():
        flatness = loss(NAME, name="flatness_of_the_likeliest")(_flatness)
        return traced(body)


def _flatness(likeliest, batch, settings):
    return LossValues(likeliest[..., 0])


def test_a_body_and_a_loss_may_name_a_registered_output():
    graph = graph_of(NAME)
    assert graph.call("further").outputs == (NAME,)
    assert graph.call("actor_train").terms[0].outputs == (NAME,)


def test_an_unregistered_output_is_refused_with_the_known_outputs():
    with pytest.raises(GraphError, match="got output 'likely', expected one of .*'entropy', 'likeliest'") as error:
        graph_of("likely")
    assert "\n" not in str(error.value)
    with pytest.raises(GraphError, match="@loss: got output 'likeliest', expected one or more of logprobs, values,"):
        loss(NAME)


def test_costs_and_rows_know_its_shape_and_its_head(likeliest):
    """A vector for each response token, from a pass over the vocabulary that reads no token but those before."""
    work, call = Workload.fixed(10, 6), graph_of(NAME).call("further")
    with registered():
        assert head_of(NAME) == "lm"
        assert row_bytes((NAME,), work) == WIDTH * row_bytes(("values",), work)
        assert CallWork.of(call, work).vocabulary_passes == 1
        assert _stage_keys(call, 0, Strategy(), frozenset()) == {"tokens", "prompt_length"}
        assert _stage_keys(call, 1, Strategy(pp=2), frozenset()) == {"prompt_length"}
        assert NAME in keys_of_calls()


def test_a_trial_makes_up_numbers_of_its_shape(likeliest):
    assert [tuple(row.shape) for row in made_up(NAME, [2, 1])] == [(2, WIDTH), (1, WIDTH)]


def test_a_name_stands_for_a_single_output(likeliest):
    register(NAME, OUTPUT)
    for name in (NAME, "logprobs"):
        with pytest.raises(InvalidInput, match=f"output: got '{name}', expected an identifier other than logprobs"):
            register(name, Output(head="scalar", made_by="mine:other"))
    with pytest.raises(InvalidInput, match="output: got 'top-3'"):
        register("top-3", OUTPUT)


def test_few_files_name_an_output():
    """Another output is an entry, and no branch elsewhere: entropy is named where it is made and where a flow asks."""
    rooms = ("placement", "engines", "tasks/tracing", "tasks/running", "tasks/profiling")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    named = {str(file.relative_to(ROOT)) for file in files if re.search(r'"entropy"', file.read_text())}
    assert named == {"placement/models/outputs.py"}
    assert set(OUTPUTS) == {"logprobs", "values", "scores", "entropy"}
