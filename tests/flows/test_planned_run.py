"""What planning adds to a run: real Prefect and gangs, tiny models; plans measured, predictions, and a refusal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.artifacts import Artifact

from prefect_rlhf.errors.errors import OutOfDeviceMemory, PlanDoesNotFit
from prefect_rlhf.flows.hardware import probes
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.choice import auto_plan, measured_plan
from prefect_rlhf.flows.training.replan import price_check, recheck_process
from prefect_rlhf.flows.training.replan.recheck_process import RecheckProcess
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.running import train as session
from prefect_rlhf.tasks.running.journal import read_spans
from tests.flows.hardware.test_probes import SPEEDS
from tests.support.runs import end, folder_of, whole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.fixture(autouse=True)
def home(own_home, monkeypatch):
    """Plans of this test alone, searched for half a second."""
    for module in (auto_plan, price_check):
        monkeypatch.setattr(module, "EVALUATIONS", 50_000)
    monkeypatch.setattr(probes, "_probe", lambda leased, dtype: replace(SPEEDS, dtype=dtype))


def run(parameters, monkeypatch, device_bytes=8 << 30, **changes):
    """Run PPO on two devices; the final state."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, whole(ClusterShape("test", 1, 2, device_bytes)).to_json())
    return end(ppo, parameters | changes)


def ends(recheck):
    """Wait for its end. It started without the credentials of this process, since tools can read its variables."""
    if recheck._process.poll() is None:
        variables = Path(f"/proc/{recheck._process.pid}/environ").read_bytes()
        assert b"PATH=" in variables and b"canary" not in variables
    return recheck._process.wait(300) is not None


def test_plans_run_two_steps_and_the_fastest_that_ran_is_kept(parameters, monkeypatch):
    """The one that the estimate likes best is out of memory: it is said, and left out. The run is predicted, too."""
    tried, real = [], session.train

    def train_but_the_first(run, journal, report, steps, *moves):
        if isinstance(report, measured_plan._Silence):
            tried.append(run)
            if len(tried) == 1:
                raise OutOfDeviceMemory("rank 1: planted")
        return real(run, journal, report, steps, *moves)

    monkeypatch.setattr(session, "train", train_but_the_first)
    monkeypatch.setattr(recheck_process, "_YIELD", "")
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setattr(RecheckProcess, "ended", property(ends))
    run_dir = folder_of(run(parameters, monkeypatch, plan="measure(2)", steps=6))

    failed, ran = json.loads((run_dir / "measured_plans.json").read_text())["plans"]
    assert failed["failure"] == "OutOfDeviceMemory: rank 1: planted"
    assert (failed["measured_seconds"], failed["chosen"]) == (None, False)
    assert ran["measured_seconds"] > 0 and ran["predicted_seconds"] > failed["predicted_seconds"] > 0
    assert ran["chosen"] and (run_dir / "plan.yaml").read_text() == ran["plan"]
    assert "planted" in Artifact.get("measured-plans").data
    assert not any(one.run_dir.exists() for one in tried)
    assert {one.seed for one in tried} == {1}

    kept = {"plan.yaml", "certificate.json", "plan.svg", "measured_plans.json", "task_runs.jsonl", "metrics.jsonl"}
    kept |= {"memory.json", "flow_run_id", "result.json", "progress.log", "speeds.json", "parameters.yaml", "run.json"}
    written = {path.name for path in run_dir.iterdir()} - {"plans"}
    assert written == kept | {"actor", "critic", "rollouts", "evaluation", "evaluation.jsonl", "replan.json"}
    assert json.loads((run_dir / "certificate.json").read_text())["fits"] is True
    assert (run_dir / "plan.svg").read_text().startswith("<svg")
    check_predictions(read_spans(run_dir))
    check_replan(run_dir)


def check_replan(run_dir):
    """Measured seconds priced the plan again. A better plan, if there is one, is a file and a line."""
    record, plan = json.loads((run_dir / "replan.json").read_text()), run_dir / "plans" / "replanned.yaml"
    assert record["plan"] == (run_dir / "plan.yaml").read_text()
    assert record["seconds"] > 0 and record["best_seconds"] > 0
    assert (plan.read_text() if plan.exists() else None) == record["better_plan"]
    assert (f"-p plan={plan}" in (run_dir / "progress.log").read_text()) == plan.exists()


def check_predictions(spans):
    """Every node with a source of times has its prediction beside what was measured; others plainly have none."""
    unknown = {span.kind for span in spans if span.predicted_seconds is None}
    assert unknown == {"compute", "export"}
    predicted = [span for span in spans if span.kind not in unknown]
    assert all(span.predicted_seconds >= 0 for span in predicted)
    assert {"generate", "inference", "train_step"} <= {span.kind for span in predicted if span.predicted_seconds > 0}
    assert "record_evaluation" in {span.call for span in spans}
    table = json.loads(Artifact.get("predicted-and-measured").data)
    rows = {row["node"]: row for row in table}
    assert rows["actor_train"]["predicted s"] and rows["actor_train"]["measured s"] and rows["actor_train"]["ratio"]
    assert rows["record_rollouts"]["predicted s"] == ""
    assert rows["step"]["predicted s"] and rows["step"]["measured s"]
    planned = Artifact.get("plan")
    rows = {row["call"]: row for row in json.loads(planned.data)}
    assert float(rows["actor_train"]["seconds"]) > 0 and rows["actor_train"]["tokens/s"] and not rows["gae"]["tokens/s"]
    assert "tokens/s" in planned.description and "samples/s" in planned.description
    assert "data:image/svg+xml" in Artifact.get("estimate").data
    assert "dataflow graph" in Artifact.get("graph").data


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_plan_that_does_not_fit_ends_the_run_with_a_line_a_table_and_json(parameters, monkeypatch, dry_run):
    state = run(parameters, monkeypatch, device_bytes=1 << 20, dry_run=dry_run)
    assert state.is_failed()
    assert state.message.startswith("PlanDoesNotFit: plan flattening: memory of n0:0: got '")
    assert "\n" not in state.message
    error = state.result(raise_on_failure=False)
    assert isinstance(error, PlanDoesNotFit)
    shown = Artifact.get("does-not-fit").data
    assert error.report in shown and "What would make it fit" in shown
    details = json.loads(shown.partition("```json\n")[2].partition("\n```")[0])
    assert details["certificate"]["peaks"][0]["device"] == "n0:0"
    assert details["certificate"]["fits"] is False


def test_a_dry_run_shows_the_plan_that_would_be_measured_first(parameters, monkeypatch):
    monkeypatch.setattr(session, "train", lambda *_: pytest.fail("a dry run takes no device"))
    state = run(parameters, monkeypatch, plan="measure(2)", dry_run=True)
    assert state.is_completed(), state.message
    assert state.result()["dry_run"]


def test_unmeasurable_plans_end_the_run_in_one_line(parameters, monkeypatch):
    state = run(parameters, monkeypatch, plan="measure(many)")
    assert state.is_failed()
    assert state.message.startswith("InvalidInput: plan: got 'measure(many)', expected measure(k)")
