"""Runs with four bits or a follower that are killed and go on: the same bits as without the kill."""

import os
import signal

import pytest

from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.tasks.checkpoints.folders import folder_of
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.flows.stopped_run import descendants, killed_run
from tests.flows.test_adapter_runs import dpo_plan, of_four_bits
from tests.flows.test_following_runs import STEPS, following, with_adapter
from tests.support.cases import first
from tests.support.plan_matrix import COMPUTATIONS_OF_GRPO, Case, grpo_plan, made_once
from tests.support.runs import num_devices, plan_file

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

PLANS_OF_DPO = {"alone": dpo_plan("0", "0"), "split": dpo_plan("0-1 tp2", "0-1 pp2")}


def follower_in_four_bits(folder):
    """Its reference follows with an adapter of its own, on the base of both."""
    given = with_adapter(folder)
    return given | {"actor": given["actor"] | {"base_dtype": "nf4"}}


def grpo_in_four_bits(folder):
    return of_four_bits(folder) | {"steps": STEPS, "keep_checkpoints": STEPS}


CASES = {
    "follower in four bits": Case(dpo, follower_in_four_bits, PLANS_OF_DPO, ("preference_accuracy",)),
    "follower in two formats": Case(dpo, following, PLANS_OF_DPO, ("preference_accuracy",)),
    "grpo in four bits": Case(
        grpo,
        grpo_in_four_bits,
        {"split": grpo_plan("0-1 tp2 engine=megatron", "1", "0-1 tp2", "0-1 pp2")},
        COMPUTATIONS_OF_GRPO,
    ),
}
BEGINS = {name: "actor_train@4" if "grpo" in name else "follow.ref.megatron@4" for name in CASES}
"""The node that a rank dies at: the weights of the step before are in a checkpoint, or on the way into it."""
WRITTEN = dict.fromkeys(CASES, "actor.adapter") | {"follower in two formats": "ref.trunk"}
"""The weights of which a shard is missing when the whole run dies."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return made_once(CASES, lambda: tmp_path_factory.mktemp("killed"))


def assert_same_bits(resumed, whole):
    """Rows, metrics, the trained weights, and everything that the last checkpoint has."""
    assert resumed.tokens == whole.tokens
    clocks = ("seconds", "orchestration_share", "fingerprint_share")
    one, other = (
        [{key: value for key, value in line.items() if key not in clocks} for line in each.metrics]
        for each in (whole, resumed)
    )
    assert one == other and len(one) == STEPS
    one, other = (
        {file.relative_to(root): file.read_bytes() for file in sorted(root.glob("**/*.safetensors"))}
        for run in (whole, resumed)
        for root in [folder_of(run.run_dir, STEPS)]
    )
    assert one and one == other
    assert resumed.weights.keys() == whole.weights.keys() and whole.weights["actor"]
    for role, weights in whole.weights.items():
        assert all((resumed.weights[role][name] == values).all() for name, values in weights.items())


def assert_resumes(ran, case, plan, run_dir):
    parameters, run = ran
    assert not folder_of(run_dir, STEPS).exists()
    resumed = CASES[case].run(parameters(case) | {"resume_from": str(run_dir)}, plan)
    assert_same_bits(resumed, run(case, plan))


@pytest.mark.all
@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_rank_is_killed_resumes_as_if_it_had_not_been(ran, case, monkeypatch, tmp_path):
    """Between two versions of a follower, or before a step of adapters on four bits."""
    execute = Dispatcher.execute

    def harmed(self, node):
        if node.id == BEGINS[case]:
            os.kill(descendants(self.gang.process_group)[-1], signal.SIGKILL)
        return execute(self, node)

    given = ran[0](case) | {"output_dir": str(tmp_path / "runs")}
    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "execute", harmed)
        failed = CASES[case].end(given, "split")
    assert failed.is_failed() and "rank" in failed.message
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert_resumes(ran, case, "split", run_dir)


@pytest.mark.parametrize(
    ("case", "plan"), first(1, [("follower in four bits", "alone"), *((case, "split") for case in CASES)])
)
def test_a_run_that_is_killed_whole_resumes_as_if_it_had_not_been(ran, case, plan, tmp_path):
    """While the checkpoint of step 3 is written and step 4 runs: so from that of step 2."""
    given = ran[0](case)
    compact = CASES[case].plans[plan]
    planned = {"plan": str(plan_file(compact, tmp_path / "plan.json", CASES[case].computations))}
    file = f"checkpoints/step-000003.part/{WRITTEN[case]}/shard-00000.safetensors"

    def reached(run_dir):
        return '"node": "actor_train@4"' in (run_dir / "task_runs.jsonl").read_text()

    name = CASES[case].flow.algorithm.name
    run_dir, _ = killed_run(name, given | planned, num_devices(compact), tmp_path, "commit@3", file, reached)
    assert not folder_of(run_dir, 3).exists() and folder_of(run_dir, 2).exists()
    assert_resumes(ran, case, plan, run_dir)
