"""A run over machines is the run on one: the same tokens, losses, gradient norms and weights."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.tasks.running.journal import read_spans
from tests.support import plan_matrix
from tests.support.plan_matrix import FOUR_RANKS, ONE, STEPS, grpo_plan, plan
from tests.support.ray_nodes import joined, ray_nodes, why_not
from tests.support.runs import Result, end, leased, loss_difference, plan_file, weight_difference
from tests.test_plan_invariance import assert_equal

TWO_BY_TWO = (
    "each call its own",
    "dp4",
    "tp4",
    "pp4",
    "dp2 pp2",
    "split",
    "disjoint",
    "offload",
    "pipeline generates",
    "streamed",
    "streamed pipelines",
)
THREE_BY_ONE = {
    "disjoint": plan("0 engine=vllm", "1", "1", "2", "1", "2 micro_batches=2"),
    "dp3": plan("0-2 dp3 engine=vllm", "0-2 dp3", "0-2 dp3", "0-2 dp3", "0-2 dp3", "0-2 dp3"),
}
GRPO = {
    "two": (2, grpo_plan("0-3 dp2 tp2 engine=vllm", "3", "0-1 pp2 micro_batches=2", "0-3 dp2 pp2 micro_batches=2")),
    "two streamed": (2, grpo_plan("0-1 dp2 engine=vllm parts=2", "3 parts=2", "2", "0-3 dp2 tp2")),
    "three": (3, grpo_plan("0-2 dp3 engine=vllm", "1", "2", "0-2 dp3")),
}
KINDS = ({"device": "new", "speed": 2}, {"device": "old", "speed": 1, "device_memory_gib": 6})
"""The first node of a run is twice as fast, and has more memory."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all,  # tests/engines/gang/test_gang.py has a gang over two nodes
    pytest.mark.usefixtures("prefect"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def nodes():
    """Three machines of two devices each, the second of another kind."""
    with ray_nodes((2, 2, 2), ("old", "new", "old")) as nodes, joined(nodes):
        yield nodes


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    return plan_matrix.parameters(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def alone(parameters):
    """The run on one device of this machine."""
    return plan_matrix.run(parameters, ONE, "one", num_devices=1)


@pytest.mark.parametrize("name", TWO_BY_TWO)
def test_ppo_on_two_machines_of_two_devices_is_the_run_on_one(parameters, alone, nodes, name, record_property):
    """Weights and rows go from machine to machine, and where a plan says so a pipeline or tensors do."""
    assert_equal(alone, plan_matrix.run(parameters, FOUR_RANKS[name], f"2x2 {name}", nodes=2), record_property)


@pytest.mark.parametrize("name", THREE_BY_ONE)
def test_nor_do_three_machines_change_it(parameters, alone, nodes, name, record_property):
    result = plan_matrix.run(parameters, THREE_BY_ONE[name], f"3x1 {name}", num_devices=3, nodes=3)
    assert_equal(alone, result, record_property)


def test_nor_does_a_switch_from_machine_to_machine(parameters, alone, nodes, tmp_path, record_property):
    """The critic's state goes to the first machine, the actor's to both, from the memory of ranks of the second."""
    before, after = (
        str(plan_file(FOUR_RANKS[name], tmp_path / f"{name}.json", per_node=2)) for name in ("disjoint", "dp4")
    )
    with leased(4, nodes=2):
        switched = Result.of(end(ppo, parameters | {"plan": {1: before, STEPS: after}}))
    assert_equal(alone, switched, record_property)
    (switch,) = (span for span in read_spans(switched.run_dir) if span.kind == "switch")
    assert switch.title == f"switch · step {STEPS} · disjoint → dp4" and switch.bytes_moved > 0


@pytest.mark.parametrize("name", GRPO)
def test_nor_for_grpo(parameters, nodes, name, record_property):
    """With over-sampling: rows that were chosen go from machine to machine.

    Bit for bit the run of the same plan on one machine. Another plan's run is equal up to rounding, and the gradient
    norm of step 2, which is 88, rounds beyond 1e-5.
    """
    given = plan_matrix.grpo_parameters(parameters)
    number, compact = GRPO[name]
    num_devices = 4 if number == 2 else 3
    here = plan_matrix.run(given, compact, f"grpo {name} here", num_devices=num_devices)
    over = plan_matrix.run(given, compact, f"grpo {name}", num_devices=num_devices, nodes=number)
    assert len(over.tokens[0]) == 16
    assert_equal(here, over, record_property)
    assert loss_difference(here, over) == weight_difference(here, over) == 0.0


@pytest.mark.parametrize("name", ["two", "three"])
def test_nor_for_an_adapter(parameters, nodes, name, record_property):
    """Each machine reads the base. Only the adapter moves, and nothing if each rank trained all of it."""
    given = plan_matrix.grpo_parameters(parameters)
    given |= {"actor": {**given["actor"], "adapter": {"rank": 4, "alpha": 8.0}}}
    number, compact = GRPO[name]
    num_devices = 4 if number == 2 else 3
    alone = plan_matrix.run(given, grpo_plan("0 engine=vllm", "0", "0", "0"), "adapter", num_devices=1)
    over = plan_matrix.run(given, compact, f"adapter {name}", num_devices=num_devices, nodes=number)
    assert_equal(alone, over, record_property)
    adapter = load_file(over.run_dir / "actor" / "adapter_model.safetensors")
    most = num_devices * sum(values.nbytes for values in adapter.values())
    moved = [span.bytes_moved for span in read_spans(over.run_dir) if span.kind == "reallocate"]
    assert moved and max(moved) <= most
    assert all(moved) if name == "two" else not any(moved)


@pytest.mark.parametrize("name", ["dp4", "each call its own", "auto"])
def test_nor_do_nodes_of_two_kinds(parameters, alone, nodes, name, record_property):
    """Where replicas on the faster node have more of the rows, by a plan that is given or searched."""
    given = Path(name) if name == "auto" else FOUR_RANKS[name]
    result = plan_matrix.run(parameters, given, f"kinds {name}", nodes=2, kinds=KINDS)
    assert_equal(alone, result, record_property)
