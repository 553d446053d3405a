"""Whole runs of PPO whose actor and critic share a trunk: one result under every plan, in float32, and when resumed."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.files.tensor_files import stored_tensors
from tests import plan_matrix

TOLERANCE = 1e-5
EVERYWHERE = ("reward_inference", "ref_inference", "actor_values", "actor_train", "reward_evaluation")
ALONE = dict.fromkeys(EVERYWHERE, "0 engine=megatron") | dict.fromkeys(
    ("actor_generate", "actor_evaluation"), "0 engine=megatron"
)
PLANS = {
    "pipeline, values from a copy": {
        "actor_generate": "0-1 tp2 engine=vllm",
        "reward_inference": "0 engine=megatron",
        "ref_inference": "1 engine=megatron",
        "actor_values": "0-1 dp2 engine=megatron",
        "actor_train": "0-1 pp2 engine=megatron micro_batches=2",
        "actor_evaluation": "0-1 tp2 engine=vllm",
        "reward_evaluation": "0 engine=megatron",
    },
    "one copy in replicas": dict.fromkeys(ALONE, "0-1 dp2 engine=megatron"),
    "shards, and generation in a pipeline": {
        **dict.fromkeys(ALONE, "0-1 tp2 engine=megatron offload=all"),
        **dict.fromkeys(("actor_generate", "actor_evaluation"), "0-1 pp2 engine=megatron"),
    },
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    given = plan_matrix.parameters(tmp_path_factory.mktemp("shared"))
    del given["critic"]
    algo = {key: value for key, value in given["algo"].items() if key != "critic_optimizer"}
    algo |= {"value_weight": 0.5, "actor_optimizer": {"lr": 2e-3, "eps": 1e-3, "head_lr": 1e-2}}
    actor = given["actor"] | {"head": "lm+scalar", "new_head": True}
    return given | {"actor": actor, "algo": algo, "checkpoint_every": 1}


def run(given, plan, name, num_devices=2, **changes):
    """Rollouts and final weights of a run under a plan, and its folder."""
    from prefect_rlhf.flows.ppo import ppo

    path = plan_matrix.plan_file(plan, Path(given["output_dir"]).parent / f"{name[:5]}.json")
    with plan_matrix.leased(num_devices):
        state = ppo(**ppo.validate_parameters({**given, "plan": str(path), **changes}), return_state=True)
    assert state.is_completed(), state.message
    folder = Path(state.result()["run_dir"])
    return tokens(folder), weights(folder / "actor"), folder


def tokens(folder):
    files = sorted((folder / "rollouts").glob("*.parquet"))
    return {file.stem: pq.read_table(file).column("tokens").to_pylist() for file in files}


def weights(folder):
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


@pytest.fixture(scope="module")
def alone(prefect, parameters):
    """The run on one device."""
    return run(parameters, ALONE, "alone", num_devices=1)


def assert_equal_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert float((values - expected[name]).abs().max()) < TOLERANCE, name


@pytest.mark.all  # tests/engines/megatron/test_two_heads.py trains both heads under several layouts
@pytest.mark.parametrize("name", PLANS)
def test_a_shared_trunk_gives_one_result_under_every_plan_and_when_resumed(parameters, alone, name):
    found, trained, folder = run(parameters, PLANS[name], name)
    assert found == alone[0]
    assert_equal_weights(trained, alone[1])
    again, resumed, _ = run(parameters, PLANS[name], name, resume_from=str(folder / "checkpoints" / "step-000001"))
    assert again == {step: rows for step, rows in found.items() if step in again} and again
    assert all(bool((values == resumed[key]).all()) for key, values in trained.items())


def test_what_is_trained_has_both_heads_and_can_be_trained_on(parameters, alone):
    folder = alone[2] / "actor"
    assert "score.weight" in stored_tensors(folder, "actor.path")
    assert float(alone[1]["score.weight"].abs().max()) > 1e-3, "it began with zeros"
    assert read_model_spec("actor", folder, "lm+scalar").head == "lm+scalar"
    assert read_model_spec("ref", folder, "lm").head == "lm"
