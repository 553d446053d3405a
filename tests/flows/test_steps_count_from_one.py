"""Steps count from 1 to the last in everything that a run shows or leaves; an evaluation before training is step 0."""

import asyncio
import base64
import re
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
)

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.tasks.running.journal import read_spans
from tests.support.runs import end, folder_of, leased, plan_file, read_lines
from tests.support.trackers_read_back import READ_BACK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

LAST, HALF = 3, 2
EVALUATED = [0, 2, 3]
CALLS = ("actor_generate", "actor_evaluation", "reward_inference", "reward_evaluation", "actor_train")
COMPUTATIONS = ("grpo_advantages", "record_rollouts", "record_evaluation")


@pytest.fixture(scope="module")
def given(parameters, tmp_path_factory):
    """GRPO without a reference, with all that writes steps."""
    folder = tmp_path_factory.mktemp("counted")
    plan = plan_file(dict.fromkeys(CALLS, "0 engine=megatron"), folder / "alone.json", COMPUTATIONS)
    algo = {"sampling": {"max_new_tokens": 5}, "batch_size": 2, "samples_per_prompt": 2, "evaluate_every": 2}
    names = ("prompts", "held_out", "actor", "reward")
    return {name: parameters[name] for name in names} | {
        "algo": algo | {"kl": {"coefficient": 0.0}},
        "steps": LAST,
        "checkpoint_every": HALF,
        "keep_checkpoints": 3,
        "best_metric": "record_evaluation.score",
        "plan": str(plan),
        "tracking": {"report_to": ["tensorboard"], "names": "own"},
        "output_dir": str(folder / "runs"),
    }


@pytest.fixture(scope="module")
def counted(given):
    """The state in which a run of three steps ended, and its folder."""
    with leased(1):
        state = end(grpo, given)
    return SimpleNamespace(state=state, folder=folder_of(state))


def steps_named(text):
    """The numbers that a text gives to steps: `step 3`, `steps 0-2`, `Steps 1 to 3`, `actor_train@2`, `step-000002`."""
    found = re.findall(r"\b[Ss]teps? (\d+)(?:(?:-| to )(\d+))?|@(\d+)\b|step-(\d{6})", text)
    return {int(number) for numbers in found for number in numbers if number}


def files_of(folder, name):
    return [int(file.stem.removeprefix("step-")) for file in sorted((folder / name).glob("step-*"))]


def test_the_files_of_a_run_have_a_line_or_a_file_for_each_step(counted):
    folder = counted.folder
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in read_lines(folder / "evaluation.jsonl")] == EVALUATED
    for name, steps in (("rollouts", [1, 2, 3]), ("evaluation", EVALUATED), ("checkpoints", [2, 3])):
        assert files_of(folder, name) == steps
    for file in [*(folder / "rollouts").iterdir(), *(folder / "evaluation").iterdir()]:
        assert f"{file.parent.name}/step-{pq.read_table(file)['step'][0].as_py():06d}" in str(file)
    shown = [line for line in (folder / "progress.log").read_text().splitlines() if re.match(r"step \d+ of ", line)]
    assert [line.partition(" · ")[0] for line in shown] == [f"step {step} of 3" for step in range(4)]
    assert "before training" in shown[0] and "held-out" in shown[3]
    for file in ("plan.svg", "certificate.json", "memory.json"):
        assert steps_named((folder / file).read_text()) <= {0, 1, 2, 3}, file
    assert counted.state.result()["best"]["step"] in (2, 3)


def test_calls_read_the_previous_steps_weights_and_evaluations_their_own_steps(counted):
    spans = read_spans(counted.folder)
    assert {span.step for span in spans if span.kind == "train_step"} == {1, 2, 3}
    for span in spans:
        assert steps_named(span.node) == steps_named(span.title) == {span.step}
        if span.call in ("actor_generate", "actor_train"):
            assert span.reads == span.step - 1
        if span.call == "actor_evaluation":
            assert span.reads == span.step
    assert all("evaluation" in f"{span.node} {span.title}" for span in spans if span.step == 0)
    assert sorted({span.step for span in spans if span.call == "actor_evaluation"}) == EVALUATED


def test_the_ui_shows_the_same_steps(counted):
    flow_run = counted.state.state_details.flow_run_id

    async def read():
        async with get_client() as client:
            ours = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]))
            groups = [run for run in await client.read_flow_runs(flow_run_filter=ours) if run.name.startswith("step")]
            ids = FlowRunFilter.model_validate({"id": {"any_": [group.id for group in groups]}})
            task_runs = await client.read_task_runs(flow_run_filter=ids, limit=200)
            kept = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
            return groups, task_runs, await client.read_artifacts(artifact_filter=kept)

    groups, task_runs, artifacts = asyncio.run(read())
    assert sorted(group.name for group in groups) == ["step 3", "steps 0-2"]
    named = [(run.name, steps_named(run.name)) for run in task_runs]
    assert set.union(*(steps for _, steps in named)) == {0, 1, 2, 3}
    assert sorted(*zip(*[steps for name, steps in named if "train_step" in name], strict=True)) == [1, 2, 3]
    by_key = {artifact.key: str(artifact.data) for artifact in artifacts}
    assert {"metrics", "curves", "timeline", "predicted-and-measured", "plan", "estimate"} <= by_key.keys()
    for key, text in by_key.items():
        drawn = [base64.b64decode(one).decode() for one in re.findall(r"base64,([\w+/=]+)", text)]
        assert set().union(*map(steps_named, [text, *drawn])) <= {0, 1, 2, 3}, key
    assert "Steps 0 to 3" in by_key["timeline"] or "Steps 1 to 3" in by_key["timeline"]


def test_a_tracker_shows_the_same_steps(counted):
    scalars, _ = READ_BACK["tensorboard"](counted.folder)
    by_name = {name: [step for other, step, _ in scalars if other == name] for name, _, _ in scalars}
    assert by_name["record_evaluation/score"] == EVALUATED
    assert by_name["actor_train/loss"] == [1, 2, 3]


@pytest.mark.all  # test_resume.py compares the steps of both runs
def test_a_resumed_run_goes_on_with_the_next_number(given, counted, caplog):
    """From the checkpoint of step 2 at step 3, with no step twice and no gap; the evaluation of step 2 stays."""
    checkpoint = counted.folder / "checkpoints" / "step-000002"
    with leased(1):
        folder = folder_of(end(grpo, given | {"resume_from": str(checkpoint), "steps": 5}))
    assert "the run goes on at step 3" in caplog.text
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in read_lines(folder / "evaluation.jsonl")] == [0, 2, 4, 5]
    assert files_of(folder, "rollouts") == [1, 2, 3, 4, 5] and files_of(folder, "evaluation") == [0, 2, 4, 5]
    assert {span.step for span in read_spans(folder)} == {3, 4, 5}
    assert read_lines(folder / "metrics.jsonl")[:2] == read_lines(counted.folder / "metrics.jsonl")[:2]
    scalars, _ = READ_BACK["tensorboard"](folder)
    assert [step for name, step, _ in scalars if name == "actor_train/loss"] == [1, 2, 3, 4, 5]
    assert [step for name, step, _ in scalars if name == "record_evaluation/score"] == [0, 2, 4, 5]
