"""PPO where generation runs on the weights that are trained: no copy of them, and no vLLM anywhere."""

import pytest

from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.augmented.work import ModelCall
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support import plan_matrix
from tests.support.plan_matrix import plan
from tests.support.runs import plan_file, prepared, weight_difference, whole

TWO = ClusterShape("matrix", 1, 2, 8 << 30)
SHARED = plan("0-1 tp2 engine=megatron", "0-1 dp2", "0-1 dp2", "0-1 dp2", "0-1 tp2", "0-1 dp2")
"""Generation as the actor is trained; every other call at its own."""
APART = SHARED | {
    "actor_generate": "0-1 pp2 engine=megatron micro_batches=2",
    "actor_evaluation": "0-1 pp2 engine=megatron",
}

POISON = """
import os, pathlib
pathlib.Path(os.environ["VLLM_WITNESS"]).touch()
raise ImportError("not installed here")
"""


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    return plan_matrix.parameters(tmp_path_factory.mktemp("tiny"))


def planned(parameters, compact, tmp_path):
    """The augmented graph of a dry run."""
    file = plan_file(compact, tmp_path / "plan.json")
    return prepared(ppo, parameters | {"plan": str(file)}, whole(TWO)).augmented


def test_generation_placed_like_training_needs_no_copy_of_the_weights(parameters, tmp_path):
    """One instance of the actor, and nothing to reallocate."""
    graph = planned(parameters, SHARED, tmp_path)
    assert not [node.id for node in graph if node.kind == "reallocate"]
    users = {node.work.instance for node in graph if isinstance(node.work, ModelCall) and node.call.role == "actor"}
    assert len(users) == 1


def test_generation_placed_otherwise_gets_each_version(parameters, tmp_path):
    graph = planned(parameters, APART, tmp_path)
    moves = [node for node in graph if node.kind == "reallocate"]
    assert {str(node.work.target.strategy) for node in moves} == {"pp2"}
    assert [node.reads for node in moves] == [1, 2]


@pytest.fixture(scope="module")
def results(prefect, parameters, tmp_path_factory):
    """Runs of both kinds, on ranks where importing vLLM leaves a trace and fails."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "vllm.py").write_text(POISON)
    with pytest.MonkeyPatch.context() as changed:
        changed.syspath_prepend(folder)
        changed.setenv("VLLM_WITNESS", str(folder / "imported"))
        changed.setenv("HOME", str(folder))
        runs = [plan_matrix.run(parameters, plan, name, 2) for name, plan in (("shared", SHARED), ("apart", APART))]
    return runs, (folder / "imported").exists()


@pytest.mark.all
@pytest.mark.slow
def test_runs_end_where_vllm_cannot_be_imported(results):
    """And nothing tries to."""
    runs, imported = results
    assert [len(run.tokens) for run in runs] == [2, 2]
    assert not imported


@pytest.mark.all
@pytest.mark.slow
def test_what_generates_are_the_newest_weights(results):
    """Shared or brought to another split, step 2 samples from what step 1 trained, and the end is the same."""
    (shared, apart), _ = results
    assert shared.tokens == apart.tokens
    assert weight_difference(shared, apart) < 1e-5
