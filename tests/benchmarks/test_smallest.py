"""The smallest cluster on which an algorithm fits, and a trunk that actor and critic share as a case of it."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.planner.smallest import Smallest, sizes_of, smallest_that_fits
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.plans.check import check_plan
from tests.support.strategies import SMALL, model, ppo

LENGTHS = Workload.fixed(256, 256)
A100S = sizes_of(Hardware(DATASHEETS["a100-80"], 8, NETWORKS["infiniband-200"]), 2)


def of_7b(graph: DataflowGraph) -> DataflowGraph:
    return replace(graph, models=tuple(model(one.role, one.head, KNOWN_SHAPES["llama-7b"]) for one in graph.models))


def shared_ppo() -> DataflowGraph:
    """PPO whose critic is a second head on the actor: its values, and its training, are the actor's calls."""
    separate = ppo()
    renamed = {"actor_train_step": "train_step"}
    calls = tuple(
        replace(
            one,
            name=renamed.get(one.name, one.name),
            role="actor_critic" if one.role in ("actor", "critic") else one.role,
        )
        for one in separate
        if one.name != "critic_train_step"
    )
    models = tuple(one for one in separate.models if one.role not in ("actor", "critic"))
    return replace(separate, calls=calls, models=(model("actor_critic", "lm+scalar"), *models))


@cache
def smallest(graph: DataflowGraph) -> Smallest:
    return smallest_that_fits(graph, A100S, LENGTHS, budget_seconds=0.5)


@pytest.mark.all
def test_no_smaller_cluster_has_a_plan():
    """PPO with four 7B models: one A100 of 80 GB cannot hold even one of its optimizers."""
    found = smallest(of_7b(ppo()))
    assert found.planned.certificate.fits
    smaller = A100S[A100S.index(found.size) - 1]
    assert found.refused.startswith(f"{smaller.cluster.name}: ")
    with pytest.raises(InvalidInput):
        plan_graph(Question(of_7b(ppo()), smaller, LENGTHS), 0.5)


@pytest.mark.all  # two searches for 7B models
def test_a_shared_trunk_is_planned_like_any_role():
    """Generation, values and training are calls of one role; with one optimizer instead of two they take less time."""
    graph = of_7b(shared_ppo())
    found, separate = smallest(graph), smallest(of_7b(ppo()))
    assert check_plan(found.planned.plan, graph, found.size.cluster.whole)
    assert found.size == separate.size
    assert found.planned.seconds < separate.planned.seconds


def test_a_shared_trunk_has_both_heads_elements_once():
    sizes = {head: ModelSizes.of(model("any", head)) for head in ("lm", "lm+scalar")}
    untied = replace(SMALL, tied_embeddings=False)
    assert sizes["lm+scalar"].num_parameters == sizes["lm"].num_parameters + SMALL.hidden_size
    for shape in (SMALL, untied):
        spec = model("any", "lm+scalar", shape)
        assert num_parameters(spec) == ModelSizes.of(spec).num_parameters
        assert ModelSizes.of(spec).stage_parameters(Strategy(), 0) == num_parameters(spec)


def test_models_too_large_for_every_size_are_refused_with_the_missing_memory():
    graph = replace(ppo(), models=tuple(model(m.role, m.head, KNOWN_SHAPES["llama-65b"]) for m in ppo().models))
    with pytest.raises(InvalidInput, match=r"GiB by .*\Z"):
        smallest_that_fits(graph, A100S[:3], LENGTHS, 0.5)


@pytest.mark.parametrize(("sizes", "says"), [((), "sizes"), (None, "most_nodes")])
def test_an_empty_range_of_sizes_is_refused(sizes, says):
    with pytest.raises(InvalidInput, match=f"^{says}: got"):
        smallest_that_fits(ppo(), sizes if sizes is not None else sizes_of(A100S[0].sources.nodes[0], 0), LENGTHS)
