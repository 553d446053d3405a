"""Whole runs in miniature on one device, without a worker: real Prefect, Megatron-core and vLLM, tiny models."""

import json
import re
from pathlib import Path

import pytest

from prefect_rlhf.engines.weights.move_weights import Moved, WeightMover
from prefect_rlhf.errors.errors import StaleWeights
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.ppo import ppo
from tests.support.runs import completed, end, leased, plan_file, read_lines, rollouts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]


@pytest.fixture(scope="module")
def once(prefect, parameters, tmp_path_factory):
    """The folder of a run from seed 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        return completed(ppo, parameters | {"seed": 1})


@pytest.mark.all  # test_plan_invariance.py compares the tokens of runs
def test_the_same_seed_gives_the_same_tokens_and_another_seed_gives_others(parameters, once):
    again, other = (completed(ppo, parameters | {"seed": seed, "steps": 1}) for seed in (1, 2))
    assert rollouts(once)[:1] == rollouts(again)
    assert rollouts(once)[:1] != rollouts(other)


def test_a_stale_weight_stops_the_run_and_both_versions_are_named(parameters, monkeypatch):
    """Planted: the copy of trained weights to vLLM silently does nothing (as in TRL for eight months)."""
    monkeypatch.setattr(WeightMover, "move", lambda *_: Moved(0, 0, 0))
    state = end(ppo, parameters)
    assert state.is_failed()
    assert "v0" in state.message and "v1" in state.message and "actor.vllm" in state.message
    with pytest.raises(StaleWeights):
        state.result()


def test_recomputed_logprobs_are_compared_with_vllms(parameters):
    """One field adds the recomputation; in float32 the two engines agree within 1e-4, whatever top_p leaves out.

    So the ratio of a first mini-batch is 1.
    """
    exact = {role: parameters[role] | {"dtype": "float32"} for role in ("actor", "ref", "critic", "reward")}
    sampling = parameters["algo"]["sampling"] | {"top_p": 0.8}
    algo = parameters["algo"] | {"old_logprobs": "recompute", "sampling": sampling}
    run_dir = completed(ppo, parameters | exact | {"algo": algo})
    steps = read_lines(run_dir / "metrics.jsonl")
    differences = [step["compare_logprobs.max"] for step in steps if "compare_logprobs.max" in step]
    assert len(differences) == 2
    assert max(differences) < 1e-4


def test_no_rank_keeps_rows_of_a_step_that_ended(once):
    """What the run's own record says of the stores: rows in the middle of each step, none at its end."""
    spans = read_lines(once / "task_runs.jsonl")
    for step in (1, 2):
        held = [sum(span["store_bytes"].values()) for span in spans if span["step"] == step]
        assert max(held) > 0
        last_call = [span for span in spans if span["step"] == step and span["kind"] == "train_step"][-1]
        assert set(last_call["store_bytes"].values()) == {0}


def test_measured_memory_is_shown_next_to_its_certificate(once):
    """No more than certified, of the bytes that the ranks themselves report."""
    (device,) = json.loads((once / "memory.json").read_text())["devices"]
    spans = read_lines(once / "task_runs.jsonl")
    assert device["measured_bytes"] >= max(span["device_bytes"]["0"] for span in spans) > 0
    assert device["measured_bytes"] <= device["certified_bytes"]
    assert device["gpu"] == {} and device["at"]


def test_ranks_that_import_for_too_long_are_named_with_the_key_that_gives_them_more(parameters):
    """Cold imports from a network's disk may take longer than the default limit."""
    with leased(2):
        state = end(ppo, parameters | {"start_deadline_seconds": 1, "plan": "flattening"})
    late = "rank(s 0, 1| 0| 1) did not answer within 1 s to importing the engines"
    assert re.fullmatch(f"RankSilent: {late}; start_deadline_seconds gives it more", state.message)


def test_a_mistake_ends_the_run_with_one_line(parameters):
    state = end(ppo, parameters | {"actor": {"path": "/nowhere"}})
    assert state.is_failed()
    assert state.message.startswith("InvalidInput: ") and "\n" not in state.message


@pytest.mark.all
def test_a_nan_loss_ends_the_run_and_names_call_and_last_good_checkpoint(parameters, tmp_path, caplog):
    """What was trained before it is whole, and nothing is tried again."""
    turns_nan = find_flow(f"{Path(__file__).with_name('turns_nan.py')}:turns_nan")
    calls = dict.fromkeys(("actor_generate", "actor_train"), "0 engine=megatron")
    plan = plan_file(calls, tmp_path / "alone.json", ["no_numbers_later"])
    given = {name: parameters[name] for name in ("prompts", "actor")}
    given |= {"steps": 3, "checkpoint_every": 1, "plan": str(plan), "output_dir": str(tmp_path / "runs")}
    state = end(turns_nan, given)
    assert state.is_failed()
    assert re.fullmatch(r"NotFinite: rank 0: actor_train · step 2: the gradient's norm is nan: .*", state.message)
    assert "step-000001 is complete; to resume from it, set resume_from=" in caplog.text
