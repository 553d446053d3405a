"""The flow `rlhf/plan`: what a person asks in a form, and sees as artifacts of the run."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from prefect.artifacts import Artifact

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.commands.plan import PlanFlags
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.plan import plan
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.plans.plan_file import read_plan

DEPLOYMENT = Path(__file__).parents[3] / "prefect.yaml"
QUESTION = {
    "models": {"actor": "llama-7b"},
    "algorithm": "dpo",
    "cluster": "1x8:h100",
    "prompt_length": "256",
    "response_length": "256",
    "budget_seconds": 0.3,
    "prices": {"h100": 2.5},
}


@pytest.fixture(scope="module")
def answered(prefect, tmp_path_factory):
    """The final state of a run, with a home of its own."""
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.delenv("RLHF_LEASE", raising=False)
        state = plan(**QUESTION, output_dir=str(folder / "plans"), return_state=True)
        assert state.is_completed(), state.message
        shown = {key: Artifact.get(key) for key in ("plan", "presets", "memory", "what-if")}
        refused = plan(**QUESTION | {"cluster": "1x8:b9000"}, return_state=True)
        yield state.result(), shown, refused, folder


@pytest.mark.slow
def test_the_flow_returns_the_paths_of_written_files(answered):
    paths, *_ = answered
    assert set(paths) == {"plan.yaml", "plan.json", "report.md", "certificate.json", "timeline.svg", "memory.svg"}
    cluster = ClusterShape("bought", 1, 8, 80 << 30)
    assert read_plan(paths["plan.yaml"], cluster).name == "auto"


@pytest.mark.slow
def test_plan_presets_memory_and_pictures_are_artifacts(answered):
    _, shown, *_ = answered
    assert all(shown.values())
    rows = json.loads(shown["plan"].data)
    trained = next(row for row in rows if row["runs"] == "train_step")
    assert trained["MFU"].endswith("%") and float(trained["seconds"]) > 0
    assert all({"tokens/s", "$/M response tokens"} <= row.keys() for row in json.loads(shown["presets"].data))
    assert "per million response tokens at $20.00 an hour" in shown["plan"].description
    page = shown["what-if"].data
    assert "above the bound" in page and "](data:image/svg+xml;base64," in page


@pytest.mark.slow
def test_a_mistake_fails_the_run_with_one_line(answered):
    _, _, refused, _ = answered
    assert refused.is_failed()
    assert "b9000" in refused.message and "\n" not in refused.message


@pytest.mark.slow
def test_no_device_is_leased(answered):
    *_, folder = answered
    assert not (folder / ".prefect-rlhf" / "leases").exists()


def test_the_deployment_asks_a_question_that_the_flow_takes():
    """And tells the worker that no device is wanted."""
    (deployed,) = [one for one in yaml.safe_load(DEPLOYMENT.read_text())["deployments"] if one["name"] == "plan"]
    assert plan.validate_parameters(deployed["parameters"])["dry_run"] is True


def test_a_plan_on_devices_is_refused():
    with pytest.raises(InvalidInput, match="dry_run"):
        plan.validate_parameters({"dry_run": False})


def test_every_field_of_the_form_is_a_flag_of_the_command():
    assert {*PlanOptions.model_fields, "param", "json"} == {field.name for field in fields(PlanFlags)}
    assert set(inspect.signature(plan.fn).parameters) == {*PlanOptions.model_fields, "dry_run"}
