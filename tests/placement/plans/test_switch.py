"""The instances and the training states that a switch between two plans concerns, and their host memory."""

from dataclasses import replace

from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.switch_memory import switch_loads
from prefect_rlhf.placement.plan import instances, trained_instance
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.switch import closed_instances, moving_roles
from tests.support.strategies import GIB, placed, ppo

WORK = Workload.fixed(16, 8)
FOUR = ClusterShape("four", 1, 4, 8 * GIB)


def chosen(name: str = "flattening"):
    return preset(name, ppo(), FOUR, FOUR.whole)


def test_an_instance_stays_if_all_that_it_was_built_for_stays():
    plan, graph = chosen(), ppo()
    assert closed_instances(graph, plan, replace(plan, name="again")) == ()
    more = placed(plan, "actor_train_step", micro_batches=2)
    assert closed_instances(graph, plan, more) == () == closed_instances(graph, more, plan)
    offloaded = placed(plan, "ref_inference", offload="all")
    assert [one.role for one in closed_instances(graph, plan, offloaded)] == ["ref"]
    assert moving_roles(graph, plan, offloaded) == frozenset()


def test_the_states_of_roles_that_train_elsewhere_move():
    plan, other, graph = chosen(), chosen("split"), ppo()
    closed = closed_instances(graph, plan, other)
    assert set(closed) == instances(graph, plan).keys() - instances(graph, other).keys()
    moving = moving_roles(graph, plan, other)
    assert moving == {"actor", "critic"}
    certificates = tuple(certify_plan(each, graph, WORK, "cpu") for each in (plan, other))
    (load,) = switch_loads(graph, plan, other, certificates)
    parameters = sum(ModelSizes.of(graph.model(role)).num_parameters for role in moving)
    assert 12 * parameters <= load.num_bytes < 13 * parameters
    assert all(trained_instance(graph, plan, role) in closed for role in moving)


def test_a_checkpoint_uses_the_copies_of_a_switch():
    """They count once, also if the certificates of both plans count a checkpoint."""
    plan, other, graph = chosen(), chosen("split"), ppo()
    found = []
    for has_checkpoints in (False, True):
        work = replace(WORK, has_checkpoints=has_checkpoints)
        before, after = (certify_plan(each, graph, work, "cpu") for each in (plan, other))
        found.append(switch_loads(graph, plan, other, (before, after)))
    assert found[0] == found[1]
