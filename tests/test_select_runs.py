"""Whole runs that keep some rows: the same rows, tokens, losses and weights under every plan, in float32."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prefect.settings import get_current_settings
from safetensors.torch import load_file

from tests import plan_matrix
from tests.flows.test_resume import descendants
from tests.tiny import make_model, make_prompts

TOLERANCE = 1e-5
REWARD = """
def parity(row):
    return float(sum(map(ord, row["response"])) % 3 == 0)

def nothing(row):
    return 0.0
"""
COMPUTATIONS = {
    "grpo": ("score", "informative", "grpo_advantages", "record_rollouts", "reward_evaluation", "record_evaluation"),
    "keeps_best": ("score", "best", "no_advantages", "record_rollouts"),
    "keeps_pairs": ("score", "best_and_worst", "no_advantages", "record_rollouts"),
}
CALLS = {
    "grpo": ("actor_generate", "actor_train", "actor_evaluation"),
    "keeps_best": ("actor_generate", "actor_train"),
    "keeps_pairs": ("actor_generate", "ref_inference", "actor_train"),
}
PLANS = {
    "alone": ("0 engine=megatron", "0", "0"),
    "replicas": ("0-1 dp2 engine=megatron", "0-1 dp2", "0-1 dp2"),
    "pipeline of replicas": ("0-3 dp2 tp2 engine=megatron", "0-1 pp2", "0-3 dp2 pp2 micro_batches=2"),
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("select")
    actor = {"path": make_model(folder / "actor", layers=4, hidden=128, heads=4), "dtype": "float32"}
    (folder / "some_rewards.py").write_text(REWARD)
    prompts = make_prompts(folder / "prompts.parquet", num_train=12)
    return {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": actor,
        "ref": actor,
        "reward": {"functions": {"parity": {"function": f"{folder / 'some_rewards.py'}:parity"}}},
        "algo": {"batch_size": 3, "update": {"mini_batches": 2}, "optimizer": {"lr": 2e-3, "eps": 1e-3}},
        "output_dir": str(folder / "runs"),
        "steps": 2,
    }


OF_FLOW = {
    "grpo": {"over_sampling": 2, "samples_per_prompt": 3, "sampling": {"max_new_tokens": 8}, "kl": {"coefficient": 0}},
    "keeps_best": {"samples_per_prompt": 3, "sampling": {"max_new_tokens": 8}, "kl": {"coefficient": 0}},
    "keeps_pairs": {},
}


def flow_of(name):
    from prefect_rlhf.flows.grpo import grpo
    from tests import selecting

    return grpo if name == "grpo" else getattr(selecting, name)


def start(given, name, plan, **algo):
    """The state of a run under a plan."""
    generate, infer, train = PLANS[plan]
    train = train if name == "grpo" else train.removesuffix(" micro_batches=2")  # of fewer items
    places = {"actor_generate": generate, "actor_evaluation": generate, "ref_inference": f"{infer} engine=megatron"}
    calls = {call: places.get(call, f"{train} engine=megatron") for call in CALLS[name]}
    file = Path(given["output_dir"]).parent / f"{name}-{plan[:5]}.json"
    path = plan_matrix.plan_file(calls, file, COMPUTATIONS[name])
    unused = {"grpo": {"ref"}, "keeps_best": {"ref", "held_out"}, "keeps_pairs": {"held_out"}}[name]
    ours = {key: value for key, value in given.items() if key not in unused}
    ours |= {"plan": str(path), "algo": given["algo"] | OF_FLOW[name] | algo}
    flow = flow_of(name)
    with plan_matrix.leased(4 if "0-3" in "".join(PLANS[plan]) else 2 if "0-1" in generate else 1):
        return flow(**flow.validate_parameters(ours), return_state=True)


def result(state):
    """Rollouts by step (row numbers and tokens), metrics and weights."""
    assert state.is_completed(), state.message
    folder = Path(state.result()["run_dir"])
    tables = [pq.read_table(file) for file in sorted((folder / "rollouts").glob("*.parquet"))]
    rows = [table.select(["row_id", "tokens"]).to_pylist() for table in tables]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, metrics, load_file(folder / "actor" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(parameters):
    """The runs on one device, once each."""
    runs = {}
    return lambda name: runs.setdefault(name, runs.get(name) or result(start(parameters, name, "alone")))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("grpo", "pipeline of replicas"),
        pytest.param("keeps_pairs", "replicas", marks=pytest.mark.all),
        pytest.param("grpo", "replicas", marks=pytest.mark.all),
        pytest.param("keeps_best", "replicas", marks=pytest.mark.all),
        pytest.param("keeps_best", "pipeline of replicas", marks=pytest.mark.all),
        pytest.param("keeps_pairs", "pipeline of replicas", marks=pytest.mark.all),
    ],
)
def test_the_same_rows_are_kept_and_trained_on_under_every_plan(parameters, alone, name, plan):
    expected_rows, expected_metrics, expected_weights = alone(name)
    rows, metrics, weights = result(start(parameters, name, plan))
    assert rows == expected_rows
    assert any(0 < step[f"{COMPUTATIONS[name][1]}.kept_share"] < 1 for step in expected_metrics)
    for step, expected in zip(metrics, expected_metrics, strict=True):
        for metric in ("actor_train.loss", "actor_train.grad_norm", f"{COMPUTATIONS[name][1]}.kept_rows"):
            assert step.get(metric) == pytest.approx(expected.get(metric), abs=TOLERANCE, rel=1e-5)
    for key, values in weights.items():
        assert float((values - expected_weights[key]).abs().max()) < TOLERANCE, key


def test_a_step_that_keeps_nothing_trains_nothing_and_a_run_of_them_ends(parameters):
    """A step is skipped and counted; the bound on such steps names call and step."""
    file = parameters["reward"]["functions"]["parity"]["function"].rpartition(":")[0]
    nothing = parameters | {"reward": {"functions": {"nothing": {"function": f"{file}:nothing"}}}}
    _, metrics, weights = result(start(nothing, "keeps_pairs", "alone"))
    before = load_file(f"{parameters['actor']['path']}/model.safetensors")
    assert [step["actor_train.skipped_updates"] for step in metrics if "best_and_worst.kept_rows" in step] == [2.0, 2.0]
    assert all(step["best_and_worst.kept_rows"] == 0 for step in metrics if "best_and_worst.kept_rows" in step)
    assert all((weights[name] == values).all() for name, values in before.items() if name in weights)
    state = start(nothing | {"steps": 12}, "keeps_pairs", "alone")
    assert state.is_failed()
    assert "best_and_worst · step 9: kept 0 of 12 rows, and no row in the last 10 steps" in state.message
    assert "\n" not in state.message


@pytest.mark.all
def test_killed_and_resumed_it_keeps_the_same_rows(parameters, tmp_path):
    """Killed after its first checkpoint, the run goes on to the bits of one that was not."""
    longer = parameters | {"steps": 4, "checkpoint_every": 1}
    whole = result(start(longer, "grpo", "replicas"))
    given = longer | {"output_dir": str(tmp_path / "runs")}
    line = (
        "import json, sys; from tests.test_select_runs import start; start(json.loads(sys.argv[1]), 'grpo', 'replicas')"
    )
    environment = {**os.environ, "PREFECT_API_URL": get_current_settings().api.url}
    process = subprocess.Popen(
        [sys.executable, "-c", line, json.dumps(given)], env=environment, cwd=Path(__file__).parents[1]
    )
    deadline = time.monotonic() + 240
    while not (found := list((tmp_path / "runs").glob("*/checkpoints/step-000002"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    rows, _, weights = result(start(given | {"resume_from": str(found[0].parents[1])}, "grpo", "replicas"))
    assert rows == whole[0]
    assert all((weights[name] == values).all() for name, values in whole[2].items())
