"""An author's own file, deployed with `prefect deploy` and run by a worker that was started elsewhere.

Nothing of it is on any path: ranks and the processes of rewards find it, and what lies beside it, all the same.
"""

import json
import shlex
from pathlib import Path

import pytest

from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.tasks.reporting.run_record import RunRecord
from tests.blocks.prefect_site import PrefectSite, everything_up
from tests.support.runs import rollouts
from tests.support.tiny import make_model, make_prompts

pytestmark = [pytest.mark.slow, pytest.mark.all]

FLOW = """
from beside_my_flow import SCALE
from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.flows.forms.reward import Reward
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.tracing.calls import compute, generate, score, train_step
from prefect_rlhf.tasks.data.rollouts import record_rollouts
from prefect_rlhf.tasks.tracing.operations import computation
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings

class Mine(Settings):
    scale: float = SCALE

@computation("advantages")
def scaled(rollout, scores, settings):
    return Computed({"advantages": settings.scale * scores["scores"][:, None] * rollout.mask("logprobs")})

@rlhf_flow("mine")
def mine(prompts: Prompts, student: Model, reward: Reward, algo: Mine = Mine()) -> None:
    rollout = generate(student, prompts, batch_size=4, sampling=Sampling(max_new_tokens=4))
    scores = score(reward, rollout)
    advantages = compute(scaled, rollout, scores, settings=algo)
    compute(record_rollouts, rollout, scores, advantages, settings=algo)
    train_step(student, policy_gradient(algo).on(rollout, advantages), optimizer=Optimizer())
"""
PLAN = """
name: author
calls:
  student_generate: {mesh: "n0:0-1", engine: megatron, dp: 2}
  score: {mesh: "n0:0", engine: python}
  scaled: {mesh: "n0:0", engine: python}
  record_rollouts: {mesh: "n0:0", engine: python}
  student_train: {mesh: "n0:0-1", engine: megatron, dp: 2}
"""


class AuthorSite(PrefectSite):
    """A site whose worker does not stand in the folder of the flow that it runs."""

    @property
    def home(self) -> Path:
        return self.folder / "of the author"

    def deploy(self) -> None:
        """Deploy `rlhf/mine` from the author's folder, with places as they are named there."""
        self.home.mkdir()
        (self.home / "my_flow.py").write_text(FLOW)
        (self.home / "beside_my_flow.py").write_text("SCALE = 0.5\n")
        (self.home / "my_rewards.py").write_text("def length(row):\n    return len(row['response'])\n")
        (self.home / "plan.yaml").write_text(PLAN)
        parameters = {
            "prompts": {"path": make_prompts(self.home / "prompts.parquet")},
            "student": {"path": make_model(self.home / "student")},
            "reward": {"functions": {"length": {"function": "my_rewards.py:length"}}},
            "plan": str(self.home / "plan.yaml"),
            "output_dir": str(self.folder / "runs"),
            "steps": 2,
        }
        variables = {"cluster": "author", "devices_per_node": 2, "lease_directory": str(self.folder / "leases")}
        deployment = {
            "name": "mine",
            "entrypoint": "my_flow.py:mine",
            "work_pool": {"name": "mesh", "job_variables": variables},
            "parameters": parameters,
        }
        (self.home / "prefect.yaml").write_text(json.dumps({"name": "mine", "deployments": [deployment]}))
        self.prefect("work-pool", "create", "mesh", "--type", "gpu-mesh")
        self.prefect("deploy", "--all", cwd=self.home)


def test_an_authors_flow_is_trained_by_a_worker_that_was_started_elsewhere(tmp_path, monkeypatch):
    """Its trained role has a name of its own, whose versions the rollouts name."""
    with everything_up(AuthorSite(tmp_path)) as site:
        run = site.run("mine")
        site.until_state(run, "COMPLETED", 300)
        folder = tmp_path / "runs" / str(site.ask(f"/flow_runs/{run}")["name"])
    assert [rows[0] for rows in rollouts(folder, "weight_version")] == [0, 1]
    assert (folder / "student" / "model.safetensors").is_file()
    command = RunRecord.read(folder).command
    assert f"my_flow.py:mine --parameters {folder}/parameters.yaml --devices 2" in command
    monkeypatch.chdir(tmp_path / "of the author")  # where its relative paths are
    assert main([*shlex.split(command)[1:], "--dry-run"]) == 0
