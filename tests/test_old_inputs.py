"""Files of an earlier version work, or a line says what to write instead; tests/old_inputs/ has an example of each."""

import asyncio
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from prefect.flows import load_flow_from_entrypoint
from safetensors.torch import load_file

from prefect_rlhf.algorithms import ppo
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.runs import completed, leased, prepared, read_lines, whole

OLD = Path(__file__).parent / "old_inputs"
DEPLOYMENT = json.loads((OLD / "deployment.json").read_text())
STEPS_BEFORE, ROWS_OF_NEXT_STEP = 1, [7, 4, 6, 3]
TOLERANCE = 1e-4  # another processor rounds otherwise; without Adam's moments a weight moves by some 0.005 more


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the old files, as the working folder."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def parameters(folder):
    return yaml.safe_load((folder / "parameters.yaml").read_text())


def test_an_old_file_of_parameters_and_an_old_plan_file_make_a_run(parameters):
    run = prepared(ppo, parameters, whole(ClusterShape("desk", 1, 1, 8 << 30)))
    assert run.chosen.plan.name == "alone"
    assert run.request.options.steps == 2


def test_an_old_deployment_finds_its_flow_which_accepts_its_parameters():
    flow = load_flow_from_entrypoint(DEPLOYMENT["entrypoint"])
    assert flow.validate_parameters(DEPLOYMENT["parameters"]).keys() >= DEPLOYMENT["parameters"].keys()


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_a_worker_reads_old_job_variables_under_an_old_form_of_the_pool():
    template = DEPLOYMENT["work_pool"]["base_job_template"]
    reading = GpuMeshConfiguration.from_template_and_values(template, DEPLOYMENT["job_variables"])
    configuration = asyncio.run(reading)
    assert configuration.wanted == "n0:0-1"
    assert configuration.env == DEPLOYMENT["job_variables"]["env"]


def test_an_old_flow_file_works_and_a_line_for_each_moved_name_says_the_new_name(folder):
    program = "from prefect_rlhf.flows.commands.cli import main; main(['graph', 'my_reinforce.py:reinforce'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "actor_train" in done.stdout
    said = [line.partition(" moved: write ")[2].partition(";")[0] for line in done.stderr.splitlines()]
    assert [name for name in said if name] == [
        "prefect_rlhf.losses.policy_gradient",
        "prefect_rlhf.computations.record_evaluation",
        "prefect_rlhf.computations.record_rollouts",
    ]
    for name in filter(None, said):
        module, _, value = name.rpartition(".")
        assert hasattr(import_module(module), value)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_an_old_checkpoint_resumes_with_its_weights_optimizer_states_and_place_in_the_data(folder, parameters):
    """The run compares the fingerprints of all loaded weights with those that the old version stored."""
    with leased(1):
        run_dir = completed(ppo, parameters | {"resume_from": "checkpoint/step-000001"})
    assert [step["step"] for step in read_lines(run_dir / "metrics.jsonl")] == [STEPS_BEFORE + 1]
    (rollout,) = (run_dir / "rollouts").glob("*.parquet")
    assert pq.read_table(rollout).column("row_id").to_pylist() == ROWS_OF_NEXT_STEP
    for role in ("actor", "critic"):
        trained = load_file(run_dir / role / "model.safetensors")
        expected = load_file(folder / "trained" / f"{role}.safetensors")
        assert trained.keys() == expected.keys()
        for name, weights in expected.items():
            torch.testing.assert_close(trained[name], weights, rtol=0, atol=TOLERANCE)
