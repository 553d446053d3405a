"""The project's own prefect.yaml, deployed whole: a worker runs algorithms from it."""

from pathlib import Path

import pytest

from tests.blocks.prefect_site import PrefectSite, everything_up
from tests.support.runs import read_lines
from tests.support.tiny import make_model, make_pairs, make_prompts
from tests.tasks.data.stored import json_lines

POOL = "two-device-mesh"  # that prefect.yaml names
PROJECT = Path(__file__).parents[2]
ALGO = {"batch_size": 4, "sampling": {"max_new_tokens": 4}, "evaluate_every": 1, "optimizer": {"lr": 1e-3}}
ALGORITHMS = {
    "grpo": ALGO | {"samples_per_prompt": 2, "kl": {"coefficient": 0.01}},
    "remax": ALGO | {"kl": {"kind": "fixed", "coefficient": 0.01}},
}

pytestmark = [pytest.mark.slow, pytest.mark.all]


class ProjectSite(PrefectSite):
    """A site with the deployments of this project."""

    def deploy(self) -> None:
        """Deploy them as the README does."""
        self.environment["RLHF_HOME"] = str(self.folder)
        self.prefect("work-pool", "create", POOL, "--type", "gpu-mesh")
        self.prefect("--no-prompt", "deploy", "--all", cwd=PROJECT)

    def start_worker(self) -> None:
        """Start one for the pool that prefect.yaml names."""
        self._start("worker", "worker", "start", "--pool", POOL, "--name", "tester")
        self.until(lambda: b"started!" in (self.folder / "worker.log").read_bytes(), 60)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with everything_up(ProjectSite(tmp_path_factory.mktemp("deployed"))) as site:
        (site.folder / "my_rewards.py").write_text("def short(row):\n    return -float(len(row['response']))\n")
        yield site


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_without_a_critic_is_a_deployment_that_trains(site, algorithm):
    """With its form's own parameters: two steps, an evaluation beside each, and the trained model."""
    prompts = make_prompts(site.folder / "prompts.parquet")
    model = {"path": make_model(site.folder / "actor")}
    metrics = trained(
        site,
        algorithm,
        prompts={"path": prompts},
        held_out={"path": prompts, "split": "held_out"},
        actor=model,
        ref=model,
        reward={"functions": {"short": {"function": f"{site.folder}/my_rewards.py:short"}}},
        algo=ALGORITHMS[algorithm],
    )
    assert all("actor_train.loss" in step and "score.short" in step for step in metrics), metrics[0]


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto"])
def test_an_algorithm_that_learns_from_rows_is_a_deployment_that_trains(site, algorithm):
    """With the columns that the deployment itself names."""
    path = {"path": make_pairs(site.folder / "pairs.parquet")}
    if algorithm == "kto":
        answers = [
            {"prompt": "what is it", "completion": text, "label": text == "good", "split": split}
            for split in ("train", "held_out")
            for text in ("good", "bad")
        ]
        path = {"path": json_lines(site.folder / "answers.jsonl", *answers)}
    rows = {"sft": "chats", "dpo": "pairs", "kto": "answers"}[algorithm]
    given = {**path, "form": "text", "text_column": "chosen"} if algorithm == "sft" else path
    model = {"path": make_model(site.folder / "actor")}
    metrics = trained(
        site,
        algorithm,
        **{rows: given, "held_out": {**given, "split": "held_out"}},
        actor=model,
        **({} if algorithm == "sft" else {"ref": model}),
        algo={"batch_size": 2, "evaluate_every": 1, "optimizer": {"lr": 1e-3}},
    )
    assert all("actor_train.loss" in step for step in metrics), metrics[0]


def trained(site, algorithm, **parameters):
    """Run two steps of a deployment; return their metrics."""
    run = site.run(
        algorithm,
        {"lease_directory": str(site.folder / "leases")},
        **parameters,
        plan="flattening",
        steps=2,
        output_dir=str(site.folder / "runs"),
    )
    site.until_state(run, "COMPLETED", 300)
    folder = site.folder / "runs" / str(site.ask(f"/flow_runs/{run}")["name"])
    metrics = read_lines(folder / "metrics.jsonl")
    assert [step["step"] for step in metrics] == [1, 2]
    assert (folder / "evaluation.jsonl").read_text().count("\n") == 3
    assert (folder / "actor" / "model.safetensors").is_file()
    return metrics
