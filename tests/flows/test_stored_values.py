"""Parameters that a Prefect server would store and never list again: it refuses them by the deployment's schema."""

import json
import uuid

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL

from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.flows.grpo import grpo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]
GIVEN = {"prompts": {"path": "p"}, "held_out": {"path": "e"}, "actor": {"path": "a"}, "ref": {"path": "r"}}
GIVEN |= {"reward": {"path": "w"}}
HALF = "\ud800"  # of a surrogate pair
BREAKING = {
    "plan": HALF,
    "output_dir": "a\0b",
    "seed": 2**64,
    "role_deadlines": {HALF: 5.0},
    "limits": {f"a{HALF}": 1.0},
    "resume_from": f"{HALF}latest",
    "actor": {"path": HALF},
    "algo": {"sampling": {"stop": [HALF]}},
    "tracking": {"project": f"a{HALF}"},
    "play": {"function": "p.py:f", "arguments": {"servers": {"one": {"env": {"KEY": HALF}}}}},
}


@pytest.fixture(scope="module")
def pool(prefect):
    """Ask the API of a server with a pool and a deployment of GRPO, in raw JSON; gives the function that asks."""
    name = f"pool-{uuid.uuid4().hex[:8]}"
    with get_client(sync_client=True) as client:
        template = GpuMeshWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type="gpu-mesh", base_job_template=template))
        deployment = grpo.to_deployment("stored", work_pool_name=name, parameters=GIVEN, _sync=True)
        deployment.entrypoint = "prefect_rlhf.flows.grpo:grpo"
        identifier = deployment.apply(_sync=True)

    def ask(path, content):
        url = f"{PREFECT_API_URL.value()}/{path.format(pool=name, deployment=identifier)}"
        return httpx.post(url, content=json.dumps(content), headers={"Content-Type": "application/json"}, timeout=60)

    return ask


def test_a_runs_parameters_never_stop_the_pools_other_runs(pool):
    """The server refuses the call, and a worker of the pool still gets its runs."""
    asked = {"parameters": GIVEN, "state": {"type": "SCHEDULED", "name": "Scheduled"}}
    right = pool("deployments/{deployment}/create_flow_run", asked)
    assert right.status_code == 201, right.text
    for name, value in BREAKING.items():
        wrong = asked | {"parameters": GIVEN | {name: value}}
        answer = pool("deployments/{deployment}/create_flow_run", wrong)
        assert answer.status_code == 409 and name in answer.text, (name, answer.text)
    for variables in ({"env": {"A": HALF}}, {"env.A": HALF}, {"command": "a\0b"}, {"labels": {HALF: "a"}}, {HALF: 1}):
        answer = pool("deployments/{deployment}/create_flow_run", asked | {"job_variables": variables})
        assert answer.status_code == 422, (variables, answer.text)
    runs = pool("work_pools/{pool}/get_scheduled_flow_runs", {})
    assert runs.status_code == 200
    assert [run["flow_run"]["id"] for run in runs.json()] == [right.json()["id"]]
